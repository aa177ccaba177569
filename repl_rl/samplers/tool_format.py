"""How models write tool calls inside a turn, and which of the ways a chat template uses.

TRL knows how the turns of well-known templates are read, and newer models say so themselves in `response_template` of
their tokenizer. Where neither is the case, one of two formats of ours may do.
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
"""A turn's text -> its calls in order. What looks like a call and is none is a `syntax_error`."""

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
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write calls."""
    return [_call(body, "arguments") for body in _TAGGED.findall(text)]


def bare_json(text: str) -> list[Call | CallResult]:
    """A turn that is one `{"name": ..., "parameters": {...}}`, as Llama 3 models write a call."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [_call(body, "parameters")] if body.startswith("{") and '"name"' in body else []


FORMATS: Mapping[str, ParseCalls] = MappingProxyType({"tagged": tagged, "bare_json": bare_json})


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads the calls of a turn."""

    origin: str
    """Who says how: `model` (its tokenizer), `trl`, `user`, or one of `FORMATS`."""
    parse: ParseCalls

    @property
    def ours(self) -> bool:
        """It is a format of ours: neither the model nor TRL says how its turns are read."""
        return self.origin in FORMATS


def detect(chat: ChatFormat) -> Reader:
    """What reads back the calls that the chat template itself writes: the model's own way, TRL's, or a format of ours.

    Raises:
        ConfigError: nothing does.
    """
    asked: Message = {"role": "user", "content": "?"}
    before = chat.template.text([asked], False, [_SCHEMA])
    turn = calling([(_PROBE.name, _PROBE.kwargs)])
    written = chat.template.text([asked, turn], False, [_SCHEMA]).removeprefix(before).rstrip()
    end = next((token for token in chat.ends if written.endswith(token)), "")
    written = written.removesuffix(end)
    for origin, tokenizer in _response_templates(chat.template.tokenizer):
        if list(_reading(tokenizer, "", end, [_SCHEMA])(written)) == [_PROBE]:
            return Reader(origin, _reading(tokenizer, chat.render([asked], True), end, chat.schemas))
    # The turn's own tags are around the call; only the format with one tag a call can be read in the middle.
    body = written[written.find("{") : written.rfind("}") + 1]
    for name, parse in FORMATS.items():
        if [_PROBE] in (list(parse(written)), list(parse(body))):
            return Reader(name, parse)
    raise ConfigError("tool calls of the chat template", written[:120], "give parse=, a function from text to calls")


def _response_templates(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    """Who says how a turn is read, and a tokenizer that can: for this very template first, then for others."""
    if getattr(tokenizer, "response_template", None) is not None:
        yield "model", tokenizer
    from trl.chat_template_utils import add_response_schema  # it imports datasets, which takes seconds

    shipped = (
        file.read_text()
        for file in sorted((files("trl") / "chat_templates").iterdir(), key=str)
        if ".jinja" in file.name
    )
    known: list[object] = []
    for text in (tokenizer.chat_template, *shipped):
        other = copy(tokenizer)
        other.chat_template = text
        try:
            other = add_response_schema(other)
        except ValueError:  # a template that it does not know
            continue
        if other.response_template not in known:
            known.append(other.response_template)
            yield "trl", other


def _reading(
    tokenizer: PreTrainedTokenizerBase, prefix: str, end: str, schemas: Sequence[Mapping[str, object]]
) -> ParseCalls:
    """Calls as the response template of `tokenizer` has them.

    Args:
        tokenizer: which has such a template.
        prefix: a prompt, up to the policy's turn.
        end: the end token of a turn with calls, which some templates close a call by.
        schemas: of the tools; they say of what type arguments are.
    """
    tools = [dict(schema) for schema in schemas]

    def parse(text: str) -> list[Call | CallResult]:
        told = ""
        for turn in (text + end, text):
            try:
                found = tokenizer.parse_response(turn, prefix=prefix, tools=tools)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                told = told or str(error).partition("\n")[0]
                continue
            calls = found.get("tool_calls") or []
            return [_function(each) for each in (calls if isinstance(calls, list) else [calls])]
        return [_no_call(f"the call cannot be read: {told}")]

    return parse


def _function(said: object) -> Call | CallResult:
    """A call as `{"function": {"name": ..., "arguments": {...}}}` says it; no arguments are none."""
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
