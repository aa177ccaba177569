"""Calls as a policy writes them inside running text. Nothing is evaluated; what is no call is told so.

weather("Seattle, WA")                                   [weather(place="Seattle, WA"), ask("Really?")]
{"name": "weather", "arguments": {"place": "Seattle"}}   [{"name": "weather", "parameters": {}}, ...]
"""

import ast
import json
from collections.abc import Mapping

from repl_rl.record.trajectory import LineStatus
from repl_rl.samplers.tools import Call, CallResult

_CALL_CHARS = 8_192
_HOW = 'write a call such as name("text", key=1)'
_HOW_JSON = 'write {"name": "...", "arguments": {...}}'


def parse_calls(text: str) -> list[Call | CallResult]:
    """The calls in `text`, in order, at least one: one alone, or several in a list, written as Python or as JSON.

    One that is no call among several is a `syntax_error` in its place; a text that cannot be read at all is one.
    """
    text = text.strip()
    if len(text) > _CALL_CHARS:
        return [_no_call(f"a call has at most {_CALL_CHARS} characters")]
    if text.lstrip("[ \n\t").startswith("{"):
        return _of_json(text)
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        return [_no_call(error.msg)]
    except ValueError as error:
        return [_no_call(str(error))]
    except (RecursionError, MemoryError):
        return [_no_call("the call is nested too deeply")]
    many = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [_of_python(each) for each in many] or [_no_call(_HOW)]


def parse_call(text: str) -> Call | CallResult:
    """Read one `name(literal, key=literal)`; several are a `syntax_error`."""
    found = parse_calls(text)
    return found[0] if len(found) == 1 else _no_call("write one call")


def _of_python(node: ast.expr) -> Call | CallResult:
    try:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError(_HOW)
        names = [keyword.arg for keyword in node.keywords]
        if None in names or len(set(names)) < len(names):
            raise ValueError("** is not allowed in a call" if None in names else "keyword argument repeated")
        args = tuple(ast.literal_eval(argument) for argument in node.args)
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError) as error:
        return _no_call("arguments must be literals" if "malformed node" in str(error) else str(error))
    except (RecursionError, MemoryError):
        return _no_call("the call is nested too deeply")
    return Call(node.func.id, args, kwargs)


def _of_json(text: str) -> list[Call | CallResult]:
    try:
        said: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [_no_call(f"the call is not JSON: {error}")]
    return [_record(each) for each in (said if isinstance(said, list) else [said])]


def _record(said: object) -> Call | CallResult:
    """A call as `{"name": ..., "arguments": {...}}`, or with `parameters`, as Llama 3 writes it, or with neither."""
    if not isinstance(said, Mapping):
        return _no_call(_HOW_JSON)
    name, arguments = said.get("name"), said.get("arguments", said.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return _no_call(_HOW_JSON)
    return Call(name, (), dict(arguments))


def _no_call(message: str) -> CallResult:
    return CallResult(LineStatus.SYNTAX_ERROR, f"SyntaxError: {message}")
