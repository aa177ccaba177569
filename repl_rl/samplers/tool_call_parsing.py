"""Tool calls of a policy: their formats in text, the validation of their arguments, and their execution.

Formats: TRL knows the format of well-known templates. Newer models describe theirs in `response_template` of their
tokenizer. For other models one of our two formats may fit.
Schemas: supported is the part of JSON Schema that describes a value: `type`, `enum`, `const`, `properties`, `required`,
`items`, `anyOf` and `nullable`. The policy sees the rest of a schema, but it is not validated.
Execution: functions of the user are called with a timeout. Every error in a call is reported to the policy that made
it, and to nothing else. Other rollouts continue.
"""

import asyncio
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from repl_rl.errors import ConfigError
from repl_rl.rollout.chat_template import Message
from repl_rl.samplers.chat_format import ChatFormat, make_tool_call_message
from repl_rl.trajectory.trajectory import LineStatus
from repl_rl.utils.timeouts import DaemonThread, wait_for_thread

ToolFunction = Callable[..., object]
"""Function of the user, plain or async. A plain one runs in a separate thread; an async one must not block."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call that the policy requests."""

    name: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call."""

    status: LineStatus
    """`ok`, `syntax_error` (not a call), `exception` or `timeout`."""
    text: str
    """Text for the policy: the result, or the class and message of the error."""
    elapsed_s: float = 0.0
    """Wall clock, seconds."""

    @property
    def is_ok(self) -> bool:
        return self.status is LineStatus.OK


RunToolCall = Callable[[ToolCall | ToolResult], Awaitable[ToolResult]]
"""Function that runs a `ToolCall`, and returns a `ToolResult` unchanged. Errors of the called function become a result,
and are not raised."""
ParseCallsFn = Callable[[str], Sequence[ToolCall | ToolResult]]
"""Function from the text of a turn to its calls in order. Text that looks like a call and is not one gives a
`syntax_error`."""
_TYPE_NAMES: Mapping[str, str] = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
"""Types of JSON Schema, and their names in errors for the policy."""
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PROBE = ToolCall("probe", (), {"count": 1, "text": "a b"})
"""Call by which a format is detected. It has a number and a text, so that a parser that loses types does not pass."""
_PROBE_SCHEMA: Mapping[str, object] = {
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
"""Schema of the tool that `_PROBE` calls."""
_MAX_HANGING_THREADS = 16
"""Number of hanging threads that one function may have. Further calls are refused until some of them end."""


def parse_tagged_calls(text: str) -> list[ToolCall | ToolResult]:
    """Return calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do."""
    return [_parse_call_body(body, "arguments") for body in _TAGGED_CALL.findall(text)]


def parse_bare_json_call(text: str) -> list[ToolCall | ToolResult]:
    """Return the call of a turn that is one `{"name": ..., "parameters": {...}}`, as Llama 3 models write it."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    return [_parse_call_body(body, "parameters")] if body.startswith("{") and '"name"' in body else []


FORMATS: Mapping[str, ParseCallsFn] = MappingProxyType(
    {"tagged": parse_tagged_calls, "bare_json": parse_bare_json_call}
)
"""Our own formats by name, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """Parser of the calls in a turn."""

    source: str
    """Source of the format: `model` (its tokenizer), `trl`, `user`, or one of `FORMATS`."""
    parse: ParseCallsFn

    @property
    def is_own_format(self) -> bool:
        """True if it is one of our formats, since neither the model nor TRL describes one."""
        return self.source in FORMATS


def detect_call_parser(chat: ChatFormat) -> ToolCallParser:
    """Return a parser for the calls that the chat template writes: the model's own, TRL's, or one of our formats.

    Raises:
        ConfigError: no parser can read them.
    """
    question: Message = {"role": "user", "content": "?"}
    prefix = chat.template.render_text([question], False, [_PROBE_SCHEMA])
    # Let the template write a call, then look for a parser that reads the same call.
    turn = make_tool_call_message([(_PROBE.name, _PROBE.kwargs)])
    call_text = chat.template.render_text([question, turn], False, [_PROBE_SCHEMA]).removeprefix(prefix).rstrip()
    # A parser gets the text of a turn without its end token.
    end = next((token for token in chat.end_tokens if call_text.endswith(token)), "")
    call_text = call_text.removesuffix(end)
    for origin, tokenizer in _iterate_response_templates(chat.template.tokenizer):
        if list(_make_template_parser(tokenizer, "", end, [_PROBE_SCHEMA])(call_text)) == [_PROBE]:
            return ToolCallParser(
                origin, _make_template_parser(tokenizer, chat.render([question], True), end, chat.schemas)
            )
    # The turn may have tags around the call. Only a format with one tag per call can be read inside other text.
    body = call_text[call_text.find("{") : call_text.rfind("}") + 1]
    for name, parse in FORMATS.items():
        if [_PROBE] in (list(parse(call_text)), list(parse(body))):
            return ToolCallParser(name, parse)
    raise ConfigError("tool calls of the chat template", call_text[:120], "give parse=, a function from text to calls")


def _iterate_response_templates(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    """Yield pairs of a response template's origin and a tokenizer with it. Those for this chat template come first."""
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
        variant = copy(tokenizer)
        variant.chat_template = text
        try:
            variant = add_response_schema(variant)
        # TRL does not know this chat template.
        except ValueError:
            continue
        if variant.response_template not in known:
            known.append(variant.response_template)
            yield "trl", variant


def _make_template_parser(
    tokenizer: PreTrainedTokenizerBase, prefix: str, end: str, schemas: Sequence[Mapping[str, object]]
) -> ParseCallsFn:
    """Return a parser that uses the response template of `tokenizer`.

    Args:
        tokenizer: has such a template.
        prefix: a prompt, up to the policy's turn.
        end: end token of a turn with calls; some templates close a call with it.
        schemas: schemas of the tools, which give the types of arguments.
    """
    tools = [dict(schema) for schema in schemas]

    def parse(text: str) -> list[ToolCall | ToolResult]:
        reason = ""
        # The end token may be part of a call, so try with it first.
        for turn in (text + end, text):
            try:
                message = tokenizer.parse_response(turn, prefix=prefix, tools=tools)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                # Report the first error.
                reason = reason or str(error).partition("\n")[0]
                continue
            calls = message.get("tool_calls") or []
            return [_parse_function_object(call) for call in (calls if isinstance(calls, list) else [calls])]
        return [make_syntax_error(f"the call cannot be read: {reason}")]

    return parse


def _parse_function_object(value: object) -> ToolCall | ToolResult:
    """Convert `{"function": {"name": ..., "arguments": {...}}}` to a call. Missing arguments mean none."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = (function.get("arguments") or {}) if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return make_syntax_error("write the name of the tool, and its arguments by name")
    return ToolCall(name, (), arguments)


def _parse_call_body(body: str, key: str) -> ToolCall | ToolResult:
    """Return a call in JSON. `key` is the name of the field with its arguments."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError) as error:
        return make_syntax_error(f"the call is not JSON: {error}")
    name = record.get("name") if isinstance(record, dict) else None
    arguments = record.get(key, {}) if isinstance(record, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return make_syntax_error(f'write {{"name": "...", "{key}": {{...}}}}')
    return ToolCall(name, (), arguments)


def make_syntax_error(message: str) -> ToolResult:
    """Return the result of a call that cannot be parsed."""
    return ToolResult(LineStatus.SYNTAX_ERROR, f"SyntaxError: {message}")


def validate_tool_schema(name: str, schema: Mapping[str, object]) -> None:
    """Reject a tool schema that is malformed or names an unknown type.

    Raises:
        ConfigError: the schema is invalid; the message names the tool, the field, and the expected content.
    """
    function = schema.get("function")
    if schema.get("type") != "function" or not isinstance(function, Mapping) or function.get("name") != name:
        raise ConfigError(f"schema of tool {name}", schema, 'give {"type": "function", "function": {"name": ...}}')
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        remedy = 'give {"type": "object", "properties": {...}}'
        raise ConfigError(f"schema of tool {name}, parameters", parameters, remedy)
    _validate_schema(f"schema of tool {name}, parameters", parameters)


def find_wrong_argument(schema: Mapping[str, object], arguments: Mapping[str, object]) -> str | None:
    """Return a short description of the first invalid argument, or None if all are valid.

    Args:
        schema: a schema that `validate_tool_schema` has accepted.
        arguments: values by name. The function itself rejects unknown and missing names.
    """
    function = schema["function"]
    assert isinstance(function, Mapping)
    properties = function.get("parameters", {}).get("properties", {})
    problems = (_find_problem(key, value, properties[key]) for key, value in arguments.items() if key in properties)
    return next((problem for problem in problems if problem is not None), None)


def _validate_schema(location: str, schema: object) -> None:
    """Reject a schema of a value. `location` names it in the error."""
    if not isinstance(schema, Mapping):
        raise ConfigError(location, schema, "give a JSON schema, an object")
    # Check this level, then the schemas inside it.
    for type_name in _list_types(schema.get("type", [])):
        if type_name not in _TYPE_NAMES:
            raise ConfigError(f"{location}, type", type_name, f"choose among {', '.join(_TYPE_NAMES)}")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise ConfigError(f"{location}, properties", properties, "give an object that maps each name to a schema")
    if not _is_list(required) or not set(map(str, required)) <= set(properties):
        raise ConfigError(f"{location}, required", required, f"list names of its properties: {', '.join(properties)}")
    for key, value in properties.items():
        _validate_schema(f"{location}, {key}", value)
    for keyword in ("enum", "anyOf"):
        if keyword in schema and not (_is_list(schema[keyword]) and schema[keyword]):
            raise ConfigError(f"{location}, {keyword}", schema[keyword], "give a list, not empty")
    if "items" in schema:
        _validate_schema(f"{location}, items", schema["items"])
    for number, value in enumerate(schema.get("anyOf", [])):
        _validate_schema(f"{location}, anyOf {number}", value)


def _find_problem(location: str, value: object, schema: Mapping[str, object]) -> str | None:
    """Return a short description of an invalid value, or None for a valid one."""
    if value is None and schema.get("nullable") is True:
        return None
    type_names = _list_types(schema.get("type", []))
    if type_names and not any(_matches_type(value, type_name) for type_name in type_names):
        return f"{location} is {value!r:.80}; give {' or '.join(_TYPE_NAMES[type_name] for type_name in type_names)}"
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    # Compare types too, because True equals 1 in Python.
    if isinstance(allowed, Sequence) and not any(type(option) is type(value) and option == value for option in allowed):
        return f"{location} is {value!r:.80}; give one of {', '.join(map(repr, allowed))}"
    # One fitting alternative suffices. Otherwise report the error of the first.
    alternatives = schema.get("anyOf")
    if (
        isinstance(alternatives, Sequence)
        and (problems := [_find_problem(location, value, alternative) for alternative in alternatives])
        and None not in problems
    ):
        return problems[0]
    return _find_inner_problem(location, value, schema)


def _find_inner_problem(location: str, value: object, schema: Mapping[str, object]) -> str | None:
    """Return a short description of the first invalid item or property in a value, or None."""
    parts: list[tuple[str, object, object]] = []
    if isinstance(value, list | tuple) and "items" in schema:
        parts = [(f"{location}[{number}]", item, schema["items"]) for number, item in enumerate(value)]
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(value, Mapping):
        missing = [key for key in (required if isinstance(required, Sequence) else []) if key not in value]
        if missing:
            return f"{location} has no {missing[0]!r}"
        if isinstance(properties, Mapping):
            parts = [(f"{location}.{key}", item, properties[key]) for key, item in value.items() if key in properties]
    problems = (
        _find_problem(item_location, item, inner) for item_location, item, inner in parts if isinstance(inner, Mapping)
    )
    return next((item for item in problems if item is not None), None)


def _matches_type(value: object, type_name: str) -> bool:
    """Return True if a value has a type of JSON Schema."""
    # bool is a subclass of int.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if type_name == "integer":
        # JSON Schema counts 1.0 as an integer.
        return (isinstance(value, int) and number) or (isinstance(value, float) and value.is_integer())
    types: Mapping[str, type | tuple[type, ...]] = {
        "string": str, "boolean": bool, "array": (list, tuple), "object": Mapping, "null": type(None),
    }  # fmt: skip
    return number if type_name == "number" else isinstance(value, types[type_name])


def _list_types(types: object) -> list[str]:
    """Return the types that a schema names, as a list. A schema may name a single type."""
    return [str(type_name) for type_name in types] if _is_list(types) and isinstance(types, Sequence) else [str(types)]


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


class Toolbox:
    """Functions by name, with a timeout per call."""

    def __init__(self, functions: Sequence[ToolFunction], timeout_s: float = 10.0) -> None:
        """Register `functions` under their own names.

        Raises:
            ConfigError: there are no functions, one has no name, two have the same name, or `timeout_s` is not above 0.
        """
        if not functions:
            raise ConfigError("functions of the sampler", [], "give at least one")
        if not timeout_s > 0:
            raise ConfigError("timeout_s", timeout_s, "give a positive number of seconds")
        self.timeout_s = timeout_s
        self.functions: dict[str, ToolFunction] = {}
        for function in functions:
            name = getattr(function, "__name__", "")
            if not str(name).isidentifier():
                raise ConfigError("function of the sampler", function, "give it a __name__; use def, not lambda")
            try:
                # Some built-in functions have no signature, so calls could not be validated.
                inspect.signature(function)
            except ValueError as error:
                raise ConfigError("function of the sampler", name, f"wrap it in a def: {error}") from error
            if name in self.functions:
                raise ConfigError("function of the sampler", name, "give each function a different name")
            self.functions[name] = function
        # Threads that still run after their timeout, by function.
        self._hanging_threads: dict[str, set[DaemonThread[object]]] = {}

    async def run(self, call: ToolCall | ToolResult) -> ToolResult:
        """Run a call. Errors of the function become a result; a cancellation passes."""
        if isinstance(call, ToolResult):
            return call
        started = time.perf_counter()
        status, text = await self._run(call)
        return ToolResult(status, text, time.perf_counter() - started)

    async def _run(self, call: ToolCall) -> tuple[LineStatus, str]:
        """Return status and text of a call: find the function, bind its arguments, and call it with the timeout."""
        function = self.functions.get(call.name)
        if function is None:
            return (
                LineStatus.EXCEPTION,
                f"NameError: there is no function {call.name!r}; use {', '.join(self.functions)}",
            )
        try:
            # Report wrong arguments as such, not as an error inside the function.
            inspect.signature(function).bind(*call.args, **call.kwargs)
        except TypeError as error:
            return LineStatus.EXCEPTION, f"TypeError: {call.name}() {error}"
        hanging_threads = self._hanging_threads.setdefault(call.name, set())
        # Forget threads that have ended meanwhile.
        hanging_threads -= {thread for thread in hanging_threads if not thread.is_alive()}
        if len(hanging_threads) >= _MAX_HANGING_THREADS:
            return LineStatus.TIMEOUT, f"TimeoutError: {call.name} hangs in {_MAX_HANGING_THREADS} other calls"
        if inspect.iscoroutinefunction(function):
            return await self._wait_with_timeout(function(*call.args, **call.kwargs), call.name)
        thread = DaemonThread(partial(function, *call.args, **call.kwargs), f"tool {call.name}")
        try:
            return await self._wait_with_timeout(wait_for_thread(thread), call.name)
        finally:
            # A thread cannot be stopped, only counted.
            if thread.is_alive():
                hanging_threads.add(thread)

    async def _wait_with_timeout(self, awaitable: Awaitable[object], name: str) -> tuple[LineStatus, str]:
        """Return status and text of `awaitable`. It is abandoned after the timeout, even if it ignores cancellation."""
        task = asyncio.ensure_future(_get_result_text(awaitable))
        # Retrieve the exception of abandoned work, so that asyncio does not log it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                task.cancel()
        if not task.done():
            return LineStatus.TIMEOUT, f"TimeoutError: {name} took longer than {self.timeout_s:g} s"
        if task.cancelled():
            return LineStatus.EXCEPTION, f"CancelledError: {name} cancelled itself"
        error = task.exception()
        if error is not None:
            return LineStatus.EXCEPTION, f"{type(error).__name__}: {error}"
        return LineStatus.OK, task.result()


async def _get_result_text(awaitable: Awaitable[object]) -> str:
    """Return the result as text. The result of a plain function may be awaitable."""
    try:
        value = await awaitable
        return str(await value if inspect.isawaitable(value) else value)
    # SystemExit would end the event loop.
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error


def compute_tool_metrics(calls: Sequence[tuple[str, bool]], known: Collection[str], rollouts: int) -> dict[str, float]:
    """Return `tool/NAME/calls` and `tool/NAME/failures` per rollout, from pairs of name and success.

    Calls of unknown names count as `other`, since a policy can write any name.
    """
    metrics: dict[str, float] = {}
    for name in known:
        # Every known tool has metrics, even without a call.
        metrics |= {f"tool/{name}/calls": 0.0, f"tool/{name}/failures": 0.0}
    for name, succeeded in calls:
        prefix = f"tool/{name if name in known else 'other'}"
        metrics[f"{prefix}/calls"] = metrics.get(f"{prefix}/calls", 0.0) + 1 / rollouts
        metrics[f"{prefix}/failures"] = metrics.get(f"{prefix}/failures", 0.0) + (not succeeded) / rollouts
    return metrics
