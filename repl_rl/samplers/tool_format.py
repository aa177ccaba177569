"""How models write tool calls inside a turn, and which of the ways a chat template uses."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import LineStatus
from repl_rl.samplers.chat import ChatFormat
from repl_rl.samplers.tools import Call, CallResult

ParseCalls = Callable[[str], Sequence[Call | CallResult]]
"""A turn's text -> its calls in order. What looks like a call and is none is a `syntax_error`."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PROBE = Call("probe", (), {"x": 1})


def tagged(text: str) -> list[Call | CallResult]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write calls."""
    return [_call(body, "arguments") for body in _TAGGED.findall(text)]


def bare_json(text: str) -> list[Call | CallResult]:
    """A turn that is one `{"name": ..., "parameters": {...}}`, as Llama 3 models write a call."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [_call(body, "parameters")] if body.startswith("{") and '"name"' in body else []


FORMATS: Mapping[str, ParseCalls] = MappingProxyType({"tagged": tagged, "bare_json": bare_json})


def detect(chat: ChatFormat) -> ParseCalls:
    """The format that reads back what the chat template itself writes for a call.

    Raises:
        ConfigError: none of them does.
    """
    function = {"name": _PROBE.name, "arguments": dict(_PROBE.kwargs)}
    asked: Mapping[str, object] = {"role": "user", "content": "?"}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    before = chat.render([asked], False)
    written = chat.render([asked, calling], False).removeprefix(before)
    for parse in FORMATS.values():
        # The turn's own tags are around the call; only the format with one tag a call can be read in the middle.
        start, end = written.find("{"), written.rfind("}")
        if list(parse(written)) == [_PROBE] or list(parse(written[start : end + 1])) == [_PROBE]:
            return parse
    raise ConfigError("tool calls of the chat template", written[:120], "give parse=, a function from text to calls")


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
