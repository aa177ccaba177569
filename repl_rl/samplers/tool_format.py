"""Formats in which models write tool calls inside a turn, and detection of the format of a chat template.

TRL knows the format of well-known templates. Newer models describe theirs in `response_template` of their tokenizer.
For other models one of our two formats may fit.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import LineStatus
from repl_rl.rollout.chat_template import Message
from repl_rl.samplers.chat import ChatFormat, calling
from repl_rl.samplers.tools import Call, CallResult

ParseCalls = Callable[[str], Sequence[Call | CallResult]]
"""Function from the text of a turn to its calls in order. Text that looks like a call but is none gives a
`syntax_error`."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PROBE = Call("probe", (), {"count": 1, "text": "a b"})
_SCHEMA: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "description": "A number."},
                "text": {"type": "string", "description": "A text."},
            },
            "required": ["count", "text"],
        },
    },
}


def tagged(text: str) -> list[Call | CallResult]:
    """Return calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do."""
    return [_call(body, "arguments") for body in _TAGGED.findall(text)]


def bare_json(text: str) -> list[Call | CallResult]:
    """Return the call of a turn that is one `{"name": ..., "parameters": {...}}`, as Llama 3 models write it."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [_call(body, "parameters")] if body.startswith("{") and '"name"' in body else []


FORMATS: Mapping[str, ParseCalls] = MappingProxyType({"tagged": tagged, "bare_json": bare_json})


@dataclass(frozen=True, slots=True)
class Reader:
    """Parser of the calls in a turn."""

    origin: str
    """Source of the format: `model` (its tokenizer), `trl`, `user`, or one of `FORMATS`."""
    parse: ParseCalls

    @property
    def ours(self) -> bool:
        """True if it is one of our formats, since neither the model nor TRL describes one."""
        return self.origin in FORMATS


def detect(chat: ChatFormat) -> Reader:
    """Return a parser for the calls that the chat template writes: the model's own, TRL's, or one of our formats.

    Raises:
        ConfigError: no parser can read them.
    """
    asked: Message = {"role": "user", "content": "?"}
    before = chat.template.text([asked], False, [_SCHEMA])
    # Let the template write a call, then look for a parser that reads the same call.
    turn = calling([(_PROBE.name, _PROBE.kwargs)])
    written = chat.template.text([asked, turn], False, [_SCHEMA]).removeprefix(before).rstrip()
    # A parser gets the text of a turn without its end token.
    end = next((token for token in chat.ends if written.endswith(token)), "")
    written = written.removesuffix(end)
    for origin, tokenizer in _response_templates(chat.template.tokenizer):
        if list(_reading(tokenizer, "", end, [_SCHEMA])(written)) == [_PROBE]:
            return Reader(origin, _reading(tokenizer, chat.render([asked], True), end, chat.schemas))
    # The turn may have tags around the call. Only a format with one tag per call can be read inside other text.
    body = written[written.find("{") : written.rfind("}") + 1]
    for name, parse in FORMATS.items():
        if [_PROBE] in (list(parse(written)), list(parse(body))):
            return Reader(name, parse)
    raise ConfigError("tool calls of the chat template", written[:120], "give parse=, a function from text to calls")


def _response_templates(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    """Yield the origin of a response template, and a tokenizer that has it: those for this very template come first."""
    if getattr(tokenizer, "response_template", None) is not None:
        yield "model", tokenizer
    # Imported here: it imports datasets, which takes seconds.
    from trl.chat_template_utils import add_response_schema

    shipped = (
        file.read_text()
        for file in sorted((files("trl") / "chat_templates").iterdir(), key=str)
        if ".jinja" in file.name
    )
    known: list[object] = []
    # TRL finds a response template by the text of a chat template, so try those that it ships.
    for text in (tokenizer.chat_template, *shipped):
        other = copy(tokenizer)
        other.chat_template = text
        try:
            other = add_response_schema(other)
        # TRL does not know this chat template.
        except ValueError:
            continue
        if other.response_template not in known:
            known.append(other.response_template)
            yield "trl", other


def _reading(
    tokenizer: PreTrainedTokenizerBase, prefix: str, end: str, schemas: Sequence[Mapping[str, object]]
) -> ParseCalls:
    """Return a parser that uses the response template of `tokenizer`.

    Args:
        tokenizer: has such a template.
        prefix: a prompt, up to the policy's turn.
        end: end token of a turn with calls; some templates close a call with it.
        schemas: schemas of the tools, which give the types of arguments.
    """
    tools = [dict(schema) for schema in schemas]

    def parse(text: str) -> list[Call | CallResult]:
        told = ""
        # The end token may be part of a call, so try with it first.
        for turn in (text + end, text):
            try:
                found = tokenizer.parse_response(turn, prefix=prefix, tools=tools)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                # Report the first error.
                told = told or str(error).partition("\n")[0]
                continue
            calls = found.get("tool_calls") or []
            return [_function(each) for each in (calls if isinstance(calls, list) else [calls])]
        return [_no_call(f"the call cannot be read: {told}")]

    return parse


def _function(said: object) -> Call | CallResult:
    """Convert `{"function": {"name": ..., "arguments": {...}}}` to a call. Missing arguments mean none."""
    function = said.get("function", said) if isinstance(said, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = (function.get("arguments") or {}) if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return _no_call("write the name of the tool, and its arguments by name")
    return Call(name, (), arguments)


def _call(body: str, key: str) -> Call | CallResult:
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _no_call(f"the call is not JSON: {error}")
    name = record.get("name") if isinstance(record, dict) else None
    arguments = record.get(key, {}) if isinstance(record, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return _no_call(f'write {{"name": "...", "{key}": {{...}}}}')
    return Call(name, (), arguments)


def _no_call(message: str) -> CallResult:
    return CallResult(LineStatus.SYNTAX_ERROR, f"SyntaxError: {message}")
