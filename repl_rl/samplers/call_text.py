"""Parser of calls that a policy writes inside running text. It evaluates nothing, and reports text that is not a call.

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
    """Return the calls in `text`, in order, at least one.

    The text is a single call or a list of calls, as Python or JSON. An element of a list that is not a call becomes a
    `syntax_error` in its place. A text that cannot be read becomes a single `syntax_error`.
    """
    text = text.strip()
    if len(text) > _CALL_CHARS:
        return [_no_call(f"a call has at most {_CALL_CHARS} characters")]
    # Python calls start with a name, JSON calls with a brace; a list may surround both.
    if text.lstrip("[ \n\t").startswith("{"):
        return _of_json(text)
    try:
        # Parsed, never executed.
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
    """Return the call in a text of the form `name(literal, key=literal)`. Several calls are a `syntax_error`."""
    found = parse_calls(text)
    return found[0] if len(found) == 1 else _no_call("write one call")


def _of_python(node: ast.expr) -> Call | CallResult:
    try:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise ValueError(_HOW)
        names = [keyword.arg for keyword in node.keywords]
        # The parser accepts `**mapping`, whose name is None.
        if None in names or len(set(names)) < len(names):
            raise ValueError("** is not allowed in a call" if None in names else "keyword argument repeated")
        # Only literals are accepted. Any other expression raises ValueError.
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
    """Return a call written as `{"name": ..., "arguments": {...}}`.

    Llama 3 writes `parameters` instead of `arguments`; both are optional.
    """
    if not isinstance(said, Mapping):
        return _no_call(_HOW_JSON)
    name, arguments = said.get("name"), said.get("arguments", said.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return _no_call(_HOW_JSON)
    return Call(name, (), dict(arguments))


def _no_call(message: str) -> CallResult:
    return CallResult(LineStatus.SYNTAX_ERROR, f"SyntaxError: {message}")
