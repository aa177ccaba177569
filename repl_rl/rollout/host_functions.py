"""Host functions: functions of the host that lines can call from the console.

    def search(query: str, hits: int = 3) -> list[str]:
        '''Find pages.

        Args:
            query: what to look for.
            hits: how many pages.
        '''

    RolloutConfig(host_functions={"my_tools:search": {}})

In the console it is a plain function: `search("prime numbers")` waits for the answer of the host. Arguments and answers
are JSON values. A call from a console is untrusted, so the host checks it against the function's signature.

The parts in order: description and limits of a function, records of calls, calls of one rollout, shipped functions (a
query of the policy, a rollout within a rollout), loading by name, metrics, the hook `HostFunctions`.
"""

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated

from transformers.utils import get_json_schema

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Engine, Sampling
from repl_rl.errors import ConfigError, SetupError
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.prompts import add_function_declarations
from repl_rl.rollout.rollout_hooks import RolloutContext, RolloutHook, find_hook
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.settings.component_registry import NameWithOptions, import_attribute
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields
from repl_rl.tasks import Task
from repl_rl.trajectory.console_text import clip_middle
from repl_rl.trajectory.trajectory import UNANSWERED, HostCall, LineEnd, Prompt, Sampled, Stop, Trajectory
from repl_rl.trajectory.trajectory_builder import RolloutSpec, derive_seed
from repl_rl.utils.timeouts import DaemonThread, wait_for_thread

MAX_BYTES = 1 << 20
"""Size limit of a call or an answer, bytes: the largest message on the socket of a console."""
HOST_ERROR_CHARS = 500
"""Length limit of an error that a console receives, characters."""

LIMIT_REACHED = "and has no more of them"
"""Last words of the error of a call that exceeds the limit of a rollout."""

_MAX_HANGING = 16
"""Limit of abandoned threads per function. Above it, calls are refused until some of these threads end."""
_MAX_INVALID = 64
"""Allowance for malformed calls and unknown names, per rollout. It is added to the sum of all `max_calls`."""

_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
"""Python types of each type of a JSON schema."""
_QUERY_STOPS = {LineEnd.EOS: Stop.EOS, LineEnd.LENGTH: Stop.LINE_TOO_LONG}
"""Stop of a query by the end of its line; any other end is `FINISHED`."""


@keeps_old_names
@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Limits of the calls of one function."""

    timeout_s: Annotated[float, Above(0)] = 30.0
    """Wall-clock time of one call on the host, seconds (> 0)."""
    max_calls: Annotated[int, AtLeast(1)] = 64
    """Calls per rollout (>= 1). A call that names no function does not count here."""
    max_argument_bytes: Annotated[int, Above(0, at_most=MAX_BYTES)] = 262_144
    """Size of a call as JSON, bytes (1 to 1,048,576)."""
    max_answer_bytes: Annotated[int, Above(0, at_most=MAX_BYTES)] = 65_536
    """Size of an answer as JSON, bytes (1 to 1,048,576)."""
    max_concurrent: Annotated[int, AtLeast(1)] = 4
    """Concurrent calls per rollout (>= 1); others wait."""
    max_concurrent_total: Annotated[int, AtLeast(1)] = 64
    """Concurrent calls over all rollouts (>= 1); others wait."""

    def __post_init__(self) -> None:
        check_fields(self, "limits of a host function")


@keeps_old_names
@dataclass(frozen=True, slots=True)
class HostFunction:
    """Function of the host, under the name that lines use."""

    name: str
    run: Callable[..., object] | None
    """Implementation, plain or async. A plain one runs in a separate thread; an async one must not block.

    A staged one, see `is_staged`, is async, takes a `HostCallContext` before its arguments and returns a
    `StagedResult`. None means that the function is known only from a stored trajectory, so its calls are refused.
    """
    signature: str
    """Signature as the policy sees it: `search(query: str, hits: int = 3) -> list[str]`."""
    description: str
    """Description in one line."""
    parameters: Mapping[str, object]
    """JSON schema of its arguments: an object with one property per argument, in positional order."""
    limits: HostLimits = field(default_factory=HostLimits)
    is_staged: bool = False
    """True if it samples a trajectory for each call, as the shipped functions do."""
    max_depth: int = 0
    """Nesting depth from which on rollouts are not offered the function; 0 means that every rollout is offered it."""
    model: str = ""
    """Model that it queries in place of the policy, named as in `RolloutConfig.model`; empty means none."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError("name of a host function", self.name, "give it a name that Python takes; use def")

    @property
    def declaration(self) -> str:
        """Declaration as the policy sees it."""
        return f"{self.signature}: {self.description}"

    def bind_arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of a call by name, checked against the schema.

        Raises:
            TypeError: they do not fit; the message is for the author of the call.
        """
        schemas = _as_table(self.parameters.get("properties"))
        if len(args) > len(schemas):
            raise TypeError(f"{self.name}() takes at most {len(schemas)} arguments, {len(args)} were given")
        # Bind positional arguments first, then keywords, then check for missing ones and for types.
        bound = dict(zip(schemas, args, strict=False))
        for key, value in kwargs.items():
            if key not in schemas:
                raise TypeError(f"{self.name}() has no argument {key!r}; it has {', '.join(schemas)}")
            if key in bound:
                raise TypeError(f"{self.name}() got two values for {key!r}")
            bound[key] = value
        required = self.parameters.get("required")
        missing = [key for key in (required if isinstance(required, list) else []) if key not in bound]
        if missing:
            raise TypeError(f"{self.name}() needs {', '.join(map(str, missing))}")
        for key, value in bound.items():
            if not matches_schema(value, _as_table(schemas[key])):
                raise TypeError(
                    f"{key} of {self.name}() is {_shorten(value)}; it must be {_describe_type(_as_table(schemas[key]))}"
                )
        return bound


def host_function(
    run: Callable[..., object], limits: HostLimits | None = None, name: str | None = None
) -> HostFunction:
    """Describe a function of the user by its type hints and its docstring, which documents each argument.

    Raises:
        ConfigError: the function has no name, an argument has no name, or its hints and docstring give no schema.
    """
    function_name = name or str(getattr(run, "__name__", ""))
    if not function_name.isidentifier():
        raise ConfigError("host function", run, "give it a __name__; use def, not lambda")
    try:
        schema = _as_table(get_json_schema(run)["function"])
        signature = inspect.signature(run)
    except Exception as error:  # transformers has a separate exception for each missing part
        remedy = f"write type hints, and a docstring with an Args section for each argument: {error}"
        raise ConfigError("host function", function_name, remedy) from error
    # Arguments of a call are bound by name, which `*args`, `**kwargs` and positional-only parameters do not allow.
    usual = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    unsupported = [p.name for p in signature.parameters.values() if p.kind not in usual]
    if unsupported:
        raise ConfigError(
            f"argument of host function {function_name}",
            unsupported[0],
            "use no *args, **kwargs or positional-only arguments",
        )
    description = str(schema["description"]).strip().partition("\n")[0]
    return HostFunction(
        function_name,
        run,
        f"{function_name}{signature}",
        description,
        _as_table(schema["parameters"]),
        limits or HostLimits(),
    )


def make_recorded_function(name: str) -> HostFunction:
    """Return a function that only a record names. It is offered, because lines may mention it."""
    return HostFunction(name, None, f"{name}(...)", "known from a record alone", {})


def matches_schema(value: object, schema: Mapping[str, object]) -> bool:
    """Return True if a JSON value matches a schema, as far as type hints go: types, unions, items, choices."""
    if value is None and schema.get("nullable") is True:
        return True
    union, choices, kind, items = (schema.get(key) for key in ("anyOf", "enum", "type", "items"))
    if isinstance(union, list):
        return any(matches_schema(value, _as_table(variant)) for variant in union)
    if isinstance(choices, list) and value not in choices:
        return False
    kinds = kind if isinstance(kind, list) else [kind]
    if not any(_matches_type(value, name) for name in kinds):
        return False
    return not isinstance(value, list) or items is None or all(matches_schema(item, _as_table(items)) for item in value)


def _matches_type(value: object, kind: object) -> bool:
    if not isinstance(kind, str) or kind not in _JSON_TYPES:
        return True  # the schema leaves the type open
    # A Python bool is also an int, but JSON keeps them apart.
    return isinstance(value, _JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _as_table(schema: object) -> Mapping[str, object]:
    return schema if isinstance(schema, Mapping) else {}


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _describe_type(schema: Mapping[str, object]) -> str:
    choices = schema.get("enum")
    return f"one of {choices}" if isinstance(choices, list) else f"of type {schema.get('type', 'as documented')}"


class HostCallRefused(Exception):
    """Refusal of a call. The console receives the message as its error."""


class RecordedHostCalls:
    """Answers to calls from a record, in any order. A call is found by its name and arguments."""

    def __init__(self, functions: Mapping[str, str]) -> None:
        self.functions = functions
        """See `HostCallHandler.functions`."""
        self.argument_bytes = MAX_BYTES
        """See `HostCallHandler.argument_bytes`."""
        self.unexpected_calls: list[str] = []
        """Calls that are not in the record."""
        self._expected: list[HostCall] = []
        self._answered: list[HostCall] = []

    def expect_calls(self, calls: Sequence[HostCall]) -> None:
        """Set the calls that the next lines are expected to make, in place of those expected before."""
        self._expected, self._answered, self.unexpected_calls = list(calls), [], []

    @property
    def difference(self) -> str:
        """Difference between the calls made and those expected; empty if they agree."""
        # A recorded call that never received an answer may be missing now.
        missing = [f"{call.name}({call.arguments})" for call in self._expected if call.error != UNANSWERED]
        not_called = [f"not called: {clip_middle(call, 80)}" for call in missing]
        return "; ".join([*(f"called: {clip_middle(call, 80)}" for call in self.unexpected_calls), *not_called])

    async def answer_call(self, call: bytes) -> bytes:
        """See `HostCallHandler.answer_call`."""
        try:
            request = read_call(call)
        except HostCallRefused:
            request = make_unread_call(call)
        # Each recorded call answers one call.
        for recorded in self._expected:
            if (recorded.name, recorded.arguments) == (request.name, request.arguments):
                self._expected.remove(recorded)
                self._answered.append(recorded)
                return encode_reply(recorded)
        for recorded in (*self._answered, *self._expected):
            # Of the calls beyond a limit only the first is recorded, so it answers those after it.
            if recorded.name in (request.name, "") and (recorded.error or "").endswith(LIMIT_REACHED):
                return encode_reply(recorded)
        self.unexpected_calls.append(f"{request.name}({request.arguments})")
        return encode_reply(
            replace(request, error=f"{request.name}() is answered from a record, which has no such call")
        )


def make_unread_call(call: bytes) -> HostCall:
    """Return the record of a call that is not parsed, or cannot be."""
    return HostCall(
        "", clip_middle(call[: 2 * HOST_ERROR_CHARS].decode("utf-8", "replace"), HOST_ERROR_CHARS), None, UNANSWERED
    )


def read_call(call: bytes) -> HostCall:
    """Parse a call to the record of a call that has no answer yet.

    Raises:
        HostCallRefused: the bytes are no call.
    """
    try:
        request = json.loads(call, parse_constant=_reject_constant)
        name, args, kwargs = request["name"], request["args"], request["kwargs"]
        if not (isinstance(name, str) and isinstance(args, list) and isinstance(kwargs, dict) and len(name) < 256):
            raise TypeError("a field has the wrong type")
        arguments = json.dumps({"args": args, "kwargs": kwargs}, sort_keys=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HostCallRefused(f"this is no call: {error}") from error
    return HostCall(name, arguments, None, UNANSWERED)


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def encode_reply(call: HostCall) -> bytes:
    """Return the reply that the console receives."""
    # A recorded answer is JSON already.
    if call.answer is not None:
        return b'{"answer": ' + call.answer.encode() + b"}"
    return json.dumps({"error": call.error}).encode()


@dataclass(frozen=True, slots=True)
class StagedResult:
    """Result of a staged function: its answer, and the trajectory sampled for it."""

    answer: object
    child: Trajectory
    is_trained: bool


@dataclass(frozen=True, slots=True)
class HostModel:
    """Model for queries."""

    engine: Engine
    renderer: Renderer


@dataclass(frozen=True, slots=True)
class HostCallContext:
    """Context of a call."""

    rollout: RolloutContext
    """Calling rollout."""
    models: Mapping[str, HostModel]
    """Models that were opened for host functions, by name."""
    number: int
    """Number of the call in its rollout, from 0. It is part of the id of everything sampled for the call."""

    @property
    def rollout_spec(self) -> RolloutSpec:
        """Spec of the calling rollout."""
        return self.rollout.spec

    @property
    def temperature(self) -> float:
        """Temperature of the calling rollout."""
        return self.rollout.temperature

    @property
    def depth(self) -> int:
        """Depth of the calling rollout: 0 is top-level, 1 was requested by a call at depth 0."""
        return self.rollout.depth

    def get_model(self, model: str) -> HostModel:
        """Return a model that was opened for host functions; an empty name means the policy."""
        rollouts = self.rollout.rollouts
        return self.models[model] if model else HostModel(rollouts.engine, rollouts.renderer)

    def make_nested_spec(self, task: Task, id: str) -> RolloutSpec:
        """Return the spec of a rollout with that id, nested in the calling one."""
        caller, rollouts = self.rollout.spec, self.rollout.rollouts
        prompt = rollouts.build_prompt(task, self.depth + 1)
        return RolloutSpec(id, task, prompt, derive_seed(f"{caller.seed}/{id}"), caller.policy_step)


@dataclass(slots=True)
class HostCallSlots:
    """Limits of concurrent calls over all rollouts.

    Each depth has separate limits. With shared limits, a nested call could deadlock with the outer call that awaits it.
    """

    _free: dict[tuple[str, int], asyncio.Semaphore] = field(default_factory=dict)
    hanging_threads: dict[str, set[DaemonThread[object]]] = field(default_factory=dict)
    """Abandoned threads, by function."""

    def get_semaphore(self, function: HostFunction, depth: int) -> asyncio.Semaphore:
        """Return the semaphore of a function at a depth."""
        limit = function.limits.max_concurrent_total
        return self._free.setdefault((function.name, depth), asyncio.Semaphore(limit))


class HostCallSession:
    """Handler of the host function calls of one rollout: they are counted, limited, executed and recorded.

    It can also answer them from a record. It implements `HostCallRecorder`.
    """

    def __init__(
        self,
        functions: Sequence[HostFunction] = (),
        slots: HostCallSlots | None = None,
        context: HostCallContext | None = None,
    ) -> None:
        """Set the functions of a rollout.

        Args:
            functions: functions that lines may call.
            slots: limits over all rollouts; None means limits of this rollout alone.
            context: context of staged functions, with call number 0; None means that none of them is staged.
        """
        self._functions = {function.name: function for function in functions}
        self._slots, self._context = slots or HostCallSlots(), context
        self._rollout_slots = {f.name: asyncio.Semaphore(f.limits.max_concurrent) for f in functions}
        self._counts: Counter[str] = Counter()
        self._max_calls = sum(function.limits.max_calls for function in functions) + _MAX_INVALID
        self._calls: list[HostCall] = []
        self._exceeded: set[str] = set()
        self._children: list[Trajectory] = []
        self._first_number = 0
        self._recall: RecordedHostCalls | None = None

    @property
    def functions(self) -> Mapping[str, str]:
        """See `HostCallHandler.functions`."""
        return {name: function.declaration for name, function in self._functions.items()}

    @property
    def argument_bytes(self) -> int:
        """See `HostCallHandler.argument_bytes`."""
        return max((function.limits.max_argument_bytes for function in self._functions.values()), default=1)

    def take_calls(self) -> tuple[HostCall, ...]:
        """Return the calls since the last `take_calls`. Of calls beyond a limit, only the first per function is
        included."""
        calls, self._calls, self._exceeded = tuple(self._calls), [], set()
        return calls

    def start_recall(self, calls: Sequence[HostCall]) -> None:
        """Answer calls from a record until `stop_recall`."""
        self._recall, self._first_number = RecordedHostCalls(self.functions), len(calls)
        self._recall.expect_calls(calls)

    def stop_recall(self) -> str:
        """Answer calls by the functions again. Return the difference between calls and record, empty if they agree."""
        recall, self._recall = self._recall, None
        return recall.difference if recall is not None else ""

    def add_to_trajectory(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the names of the offered functions and the trajectories sampled for calls."""
        return replace(trajectory, host_functions=tuple(self._functions), children=tuple(self._children))

    async def answer_call(self, call: bytes) -> bytes:
        """See `HostCallHandler.answer_call`.

        Raises:
            ReplRLError: the engine failed in a staged function.
        """
        if self._recall is not None:
            return await self._recall.answer_call(call)
        # Refuse a flood of calls, or a huge call, before it costs anything.
        total = sum(self._counts.values())
        if total >= self._max_calls or len(call) > MAX_BYTES:  # not worth parsing
            return encode_reply(
                self._refuse_call(
                    make_unread_call(call), f"a rollout may make {self._max_calls} calls in all, {LIMIT_REACHED}"
                )
            )
        request = self._read_and_count(call)
        if request.error != UNANSWERED:
            return encode_reply(self._refuse_call(request, request.error or ""))
        # From here on the function is known, and its own limit applies.
        function = self._functions[request.name]
        if self._counts[request.name] > function.limits.max_calls:
            return encode_reply(
                self._refuse_call(
                    request, f"{request.name}() was called {function.limits.max_calls} times, {LIMIT_REACHED}"
                )
            )
        return encode_reply(await self._make_call(function, request, self._first_number + total))

    def _read_and_count(self, call: bytes) -> HostCall:
        """Count a call, and return its record. The record's error is `UNANSWERED` if the call is valid."""
        try:
            request = read_call(call)
            function = self._functions.get(request.name)
            if function is None:
                raise HostCallRefused(
                    f"there is no host function {request.name!r}; there are {', '.join(self._functions)}"
                )
            self._counts[request.name] += 1
            if len(call) > function.limits.max_argument_bytes:
                limit = function.limits.max_argument_bytes
                raise HostCallRefused(
                    f"arguments of {request.name}() have {len(call)} bytes as JSON; at most {limit} are allowed"
                )
        except HostCallRefused as refusal:
            # Invalid calls count too, for the limit over all functions.
            self._counts[""] += 1
            return replace(make_unread_call(call), error=str(refusal))
        return request

    def _refuse_call(self, request: HostCall, reason: str) -> HostCall:
        """Record a refused call with its error, and return it.

        Of calls beyond a limit, only the first per function and line is recorded. A flood of calls must leave a small
        record.
        """
        refused = replace(request, error=clip_middle(reason, HOST_ERROR_CHARS))
        if not reason.endswith(LIMIT_REACHED) or request.name not in self._exceeded:
            self._calls.append(refused)
        if reason.endswith(LIMIT_REACHED):
            self._exceeded.add(request.name)
        return refused

    async def _make_call(self, function: HostFunction, request: HostCall, number: int) -> HostCall:
        """Make a call and record it, even if its line ends first."""
        index, start = len(self._calls), time.perf_counter()
        # Record the call before it runs, so that it remains as unanswered if its line ends first.
        self._calls.append(request)
        # `take_calls` replaces the list, so keep the one that holds this call.
        calls = self._calls
        try:
            result = await self._run_call(function, request, number)
        except HostCallRefused as refusal:
            result = replace(request, error=clip_middle(str(refusal), HOST_ERROR_CHARS))
        calls[index] = replace(result, elapsed_s=time.perf_counter() - start)
        return calls[index]

    async def _run_call(self, function: HostFunction, request: HostCall, number: int) -> HostCall:
        """Call a function, and return the call with its answer. Keep the trajectory that was sampled for it."""
        answer = await self._call_function(function, request, number)
        if not isinstance(answer, StagedResult):
            return replace(request, answer=_encode_answer(answer, function), error=None)
        # The trajectory was sampled, so it is kept even if the answer cannot be sent.
        self._children.append(answer.child)
        sampled = replace(request, child=answer.child.id, trained=answer.is_trained)
        try:
            return replace(sampled, answer=_encode_answer(answer.answer, function), error=None)
        except HostCallRefused as refusal:
            return replace(sampled, error=str(refusal))

    async def _call_function(self, function: HostFunction, request: HostCall, number: int) -> object:
        """Check the arguments of a call, wait for a free slot, and return what the function returns."""
        if function.run is None:
            raise HostCallRefused(f"{function.name}() is known from a record only; name it in host_functions")
        arguments = json.loads(request.arguments)
        try:
            bound = function.bind_arguments(arguments["args"], arguments["kwargs"])
        except (TypeError, RecursionError) as error:
            raise HostCallRefused(str(error)) from error
        depth = self._context.depth if self._context is not None else 0
        # Wait for both limits: that of this rollout, and that over all rollouts.
        async with self._rollout_slots[function.name], self._slots.get_semaphore(function, depth):
            if function.is_staged:
                assert self._context is not None
                context = replace(self._context, number=number)
                return await self._run_cancellable(function, partial(function.run, context, **bound))
            return await self._run_abandonable(function, partial(function.run, **bound))

    async def _run_cancellable(self, function: HostFunction, run: Callable[[], object]) -> object:
        """Run a shipped function, which can be cancelled."""
        work = run()
        assert isinstance(work, Awaitable)
        try:
            async with asyncio.timeout(function.limits.timeout_s):
                return await work
        except TimeoutError as error:
            raise HostCallRefused(_make_timeout_message(function)) from error

    async def _run_abandonable(self, function: HostFunction, run: Callable[[], object]) -> object:
        """Run a function of the user. One that hangs is abandoned, in its thread or despite its cancellation."""
        hanging = self._slots.hanging_threads.setdefault(function.name, set())
        hanging -= {thread for thread in hanging if not thread.is_alive()}
        if len(hanging) >= _MAX_HANGING:
            raise HostCallRefused(f"{function.name}() hangs in {_MAX_HANGING} other calls; it is not called again")
        task = asyncio.ensure_future(_run_function(run, function.name, hanging))
        task.add_done_callback(
            lambda finished: finished.cancelled() or finished.exception()
        )  # marks the error as retrieved
        try:
            await asyncio.wait({task}, timeout=function.limits.timeout_s)
        finally:
            if not task.done():
                task.cancel()
        # The cancellation above may be ignored, so do not wait for it.
        if not task.done():
            raise HostCallRefused(_make_timeout_message(function))
        error = task.exception() if not task.cancelled() else RuntimeError("it cancelled itself")
        if error is not None:
            raise HostCallRefused(f"{type(error).__name__}: {error}") from error
        return task.result()


async def _run_function(run: Callable[[], object], name: str, hanging: set[DaemonThread[object]]) -> object:
    """Return the result of a plain function in a thread, or of an async one on this loop."""
    if asyncio.iscoroutinefunction(getattr(run, "func", run)):
        work = run()
        assert isinstance(work, Awaitable)
        return await work
    thread = DaemonThread(run, f"host function {name}")
    try:
        return await wait_for_thread(thread)
    finally:
        # A thread cannot be stopped, only counted.
        if thread.is_alive():
            hanging.add(thread)


def _make_timeout_message(function: HostFunction) -> str:
    return f"{function.name}() took longer than {function.limits.timeout_s:g} s"


def _encode_answer(answer: object, function: HostFunction) -> str:
    """Return an answer as JSON, within the limit of its function."""
    try:
        text = json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise HostCallRefused(f"the result of {function.name}() is no JSON value: {error}") from error
    if len(text) > function.limits.max_answer_bytes:
        limit = function.limits.max_answer_bytes
        raise HostCallRefused(
            f"the result of {function.name}() has {len(text)} bytes as JSON; at most {limit} are allowed"
        )
    return text


def llm_query(
    *,
    train: bool = False,
    model: str = "",
    max_tokens: Annotated[int, AtLeast(1)] = 256,
    max_calls: Annotated[int, AtLeast(1)] = 64,
    timeout_s: Annotated[float, Above(0)] = 60.0,
    max_concurrent: Annotated[int, AtLeast(1)] = 4,
    max_concurrent_total: Annotated[int, AtLeast(1)] = 64,
) -> HostFunction:
    """Return `llm_query(prompt)`: the policy's answer to a prompt, in a separate context.

    The answer is sampled with the temperature of the rollout.

    Args:
        train: train its tokens, each with the advantage of the calling line; otherwise they are masked.
        model: another model to query, a folder or owner/name, on the transformers engine; "" means the policy.
        max_tokens: token budget of an answer (>= 1); a longer one is truncated.
        max_calls: calls per rollout (>= 1).
        timeout_s: wall-clock time of a call (> 0).
        max_concurrent: concurrent calls per rollout (>= 1).
        max_concurrent_total: concurrent calls over all rollouts (>= 1).

    Raises:
        ConfigError: `train` is set together with another model.
    """
    if train and model:
        raise ConfigError("train of llm_query", True, f"only the policy can be trained, not {model}; leave it out")

    # Its parameters are those of `_describe_llm_query`, which gives the schema.
    async def run_query(context: HostCallContext, prompt: str) -> StagedResult:
        child = await _sample_query(context, context.get_model(model), prompt, max_tokens)
        return StagedResult("".join(line.text for line in child.lines).removesuffix("\n"), child, train)

    limits = HostLimits(
        timeout_s=timeout_s,
        max_calls=max_calls,
        max_concurrent=max_concurrent,
        max_concurrent_total=max_concurrent_total,
    )
    function = host_function(_describe_llm_query, limits, "llm_query")
    return replace(function, run=run_query, is_staged=True, model=model)


# The docstring is part of the prompt: it describes `llm_query` to the policy.
def _describe_llm_query(prompt: str) -> str:
    """Ask a language model; it sees the prompt alone.

    Args:
        prompt: What it is told.
    """
    raise NotImplementedError


async def _sample_query(context: HostCallContext, model: HostModel, text: str, max_tokens: int) -> Trajectory:
    """Sample the answer to a prompt, and return it as a trajectory of one line."""
    engine, renderer, spec = model.engine, model.renderer, context.rollout_spec
    prompt = _build_query_prompt(renderer, text)
    tokens_left = engine.context_tokens - len(prompt.token_ids)
    if tokens_left < 1:
        raise HostCallRefused(
            f"the prompt has {len(prompt.token_ids)} tokens; the context holds {engine.context_tokens}"
        )
    # A chat model ends its answer itself. Another model writes one line, because nothing else would end it.
    stop_ids = renderer.eos_ids if renderer.chat_template.exists else renderer.stop_ids
    # Each call has its own seed; 31 bits, as for rollouts.
    seed = (spec.seed + 7919 * (context.number + 1)) & 0x7FFFFFFF
    start = time.monotonic()
    async with engine.session(prompt.token_ids, Sampling(context.temperature, seed, nested=True)) as session:
        chunk = await session.sample([], max_tokens=min(max_tokens, tokens_left), stop_ids=stop_ids)
    line = renderer.make_line(chunk, prompt)
    return Trajectory(
        id=f"{spec.id}/query-{context.number}",
        task_id=spec.task.id,
        prompt=prompt,
        segments=(Sampled((line,)),),
        stop=_QUERY_STOPS.get(line.end, Stop.FINISHED),
        policy_step=spec.policy_step,
        seed=seed,
        wall_s=time.monotonic() - start,
        parent=spec.id,
    )


def _build_query_prompt(renderer: Renderer, text: str) -> Prompt:
    if renderer.chat_template.exists:
        return renderer.build_question_prompt("", text)
    return renderer.build_plain_prompt(f"{text}\n")


def child_rollout(
    *,
    depth: Annotated[int, AtLeast(1)] = 1,
    train: bool = True,
    max_calls: Annotated[int, AtLeast(1)] = 4,
    timeout_s: Annotated[float, Above(0)] = 120.0,
    max_concurrent: Annotated[int, AtLeast(1)] = 2,
    max_concurrent_total: Annotated[int, AtLeast(1)] = 16,
) -> HostFunction:
    """Return `rollout(question)`: the answer of a nested rollout of the same policy and sampler, or None.

    The nested rollout has a separate console.

    Args:
        depth: levels of nested rollouts (>= 1); the innermost ones are not offered the function.
        train: train its tokens, each with the advantage of the calling line; otherwise they are masked.
        max_calls: calls per rollout (>= 1).
        timeout_s: wall-clock time of a call (> 0).
        max_concurrent: concurrent calls per rollout (>= 1).
        max_concurrent_total: concurrent calls over all rollouts, at each depth (>= 1).
    """

    # Its parameters are those of `_describe_child_rollout`, which gives the schema.
    async def run(context: HostCallContext, question: str) -> StagedResult:
        name = f"rollout-{context.number}"
        task = Task(f"{context.rollout_spec.task.id}/{name}", question, "")
        spec = context.make_nested_spec(task, f"{context.rollout_spec.id}/{name}")
        # A prompt that fills the context is an error of the call, not a failure of the rollout.
        rollouts = context.rollout.rollouts
        context_tokens = rollouts.engine.context_tokens
        if len(spec.prompt.token_ids) >= context_tokens:
            raise HostCallRefused(
                f"the question makes a prompt of {len(spec.prompt.token_ids)} tokens; the context has {context_tokens}"
            )
        child = await rollouts.run_nested(spec, context.temperature, context.depth + 1)
        child = replace(child, parent=context.rollout_spec.id)
        return StagedResult(child.answer, child, train and child.trainable)

    limits = HostLimits(
        timeout_s=timeout_s,
        max_calls=max_calls,
        max_concurrent=max_concurrent,
        max_concurrent_total=max_concurrent_total,
    )
    function = host_function(_describe_child_rollout, limits, "rollout")
    return replace(function, run=run, is_staged=True, max_depth=depth)


# The docstring is part of the prompt: it describes `rollout` to the policy.
def _describe_child_rollout(question: str) -> str | None:
    """Have a question solved in another console of this kind; None: it was not answered.

    Args:
        question: What is to be solved; nothing else is known there.
    """
    raise NotImplementedError


SHIPPED: dict[str, Callable[..., HostFunction]] = {"llm_query": llm_query, "rollout": child_rollout}
"""Shipped host functions by name."""


def load_host_functions(options: Mapping[str, Mapping[str, object]]) -> tuple[HostFunction, ...]:
    """Load host functions by name: shipped ones, or functions of the user as `module:name`.

    Args:
        options: options of each function by its name. Those of a user's function are the fields of `HostLimits`.

    Raises:
        ConfigError: a function or an option does not exist, a function cannot be described, or its name is not unique.
        UserCodeError: a module of the user raised.
    """
    functions = []
    for choice in [NameWithOptions(name, each) for name, each in options.items()]:
        if choice.name in SHIPPED:
            functions.append(choice.bind_options("host function", SHIPPED[choice.name])())
        elif ":" in choice.name:
            functions.append(load_user_function(choice))
        else:
            raise ConfigError("host function", choice.name, f"choose one of {', '.join(SHIPPED)}, or give module:name")
    validate_unique_names(functions)
    return tuple(functions)


def load_user_function(choice: NameWithOptions) -> HostFunction:
    """Load a function of the user by name; its options are the fields of `HostLimits`.

    Raises:
        ConfigError: the function or a limit does not exist, or the function cannot be described.
        UserCodeError: its module raised.
    """
    attribute = import_attribute("host function", choice.name)
    if isinstance(attribute, HostFunction):
        if choice.options:
            raise ConfigError("host function", choice.name, "it already has limits; leave the options out")
        return attribute
    if not callable(attribute):
        raise ConfigError("host function", choice.name, "name a function, or a HostFunction")
    return host_function(attribute, choice.bind_options("host function", HostLimits)())


def validate_unique_names(functions: Sequence[HostFunction]) -> None:
    """Refuse functions that share a name.

    Raises:
        ConfigError: a name is not unique, or it belongs to the console.
    """
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1 or name in ("submit_final_answer", "HostError"):
            raise ConfigError(
                "host function",
                name,
                "another function or the console has this name; give each function a different one",
            )


def validate_workspace_names(functions: Sequence[HostFunction], tasks: Iterable[Task]) -> None:
    """Refuse workspaces with a value named like a host function, because one of them would hide the other.

    Raises:
        SetupError: names the first such task and value.
    """
    names = {function.name for function in functions}
    for task in tasks:
        if task.workspace is not None and (shared := sorted(names & set(task.workspace.values))):
            remedy = "a host function has that name; give the value another one"
            raise SetupError(f"task {task.id}: workspace value", shared[0], remedy)


def count_nested_sessions(functions: tuple[HostFunction, ...]) -> int:
    """Return the largest number of engine sessions that calls may need, without those of the calling rollouts."""
    # The limit of concurrent calls holds at each depth at which a function is offered.
    levels = 1 + max((f.max_depth for f in functions), default=0)
    return sum(
        f.limits.max_concurrent_total * (f.max_depth or levels) for f in functions if f.is_staged and not f.model
    )


def compute_call_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of a batch: calls per rollout, share of failed calls, and tokens sampled for calls."""
    calls = [call for t in trajectories for run in t.executions for call in run.calls]
    children = [child for t in trajectories for child in t.children]
    return {
        "host_calls": len(calls) / max(len(trajectories), 1),
        "host_error_rate": sum(call.error is not None for call in calls) / max(len(calls), 1),
        "child_tokens": float(sum(map(_count_tokens, children))),
    }


def _count_tokens(trajectory: Trajectory) -> int:
    return trajectory.sampled_tokens + sum(map(_count_tokens, trajectory.children))


class HostFunctions(RolloutHook):
    """Hook that offers host functions to the lines of rollouts."""

    def __init__(
        self,
        functions: Sequence[HostFunction],
        models: Mapping[str, HostModel] = MappingProxyType({}),
        slots: HostCallSlots | None = None,
    ) -> None:
        """Set the functions.

        Args:
            functions: functions that lines may call.
            models: models that they query in place of the policy, by name.
            slots: limits of concurrent calls over all rollouts; None makes them.
        """
        self.functions = tuple(functions)
        """Functions that lines may call."""
        self.models = models
        """Models that functions query in place of the policy, by name."""
        self._slots = slots or HostCallSlots()

    def with_functions(self, *functions: HostFunction) -> "HostFunctions":
        """Return a hook with further functions, and the same models and limits."""
        return HostFunctions((*self.functions, *functions), self.models, self._slots)

    def _get_offered_functions(self, depth: int) -> Sequence[HostFunction]:
        return [function for function in self.functions if not function.max_depth or depth < function.max_depth]

    def declare(self, task: Task, depth: int) -> Task:
        """Add the declarations of the functions that the rollout can call to its question."""
        declarations = [function.declaration for function in self._get_offered_functions(depth)]
        return replace(task, question=add_function_declarations(task.question, declarations))

    def on_rollout_start(self, context: RolloutContext, episode: Episode) -> None:
        """Offer the functions to the console of the rollout."""
        call_context = HostCallContext(context, self.models, 0)
        functions = self._get_offered_functions(context.depth)
        episode.set_call_handler(HostCallSession(functions, self._slots, call_context))

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return `compute_call_metrics`."""
        return compute_call_metrics(trajectories)


def get_host_functions(hooks: Sequence[RolloutHook]) -> Sequence[HostFunction]:
    """Return the functions that the lines of rollouts with these hooks may call."""
    offered = find_hook(hooks, HostFunctions)
    return offered.functions if offered is not None else ()


def add_host_functions(hooks: Sequence[RolloutHook], functions: Sequence[HostFunction]) -> tuple[RolloutHook, ...]:
    """Return hooks that offer further functions."""
    offered = find_hook(hooks, HostFunctions)
    if offered is None:
        return (*hooks, HostFunctions(functions))
    extended = offered.with_functions(*functions)
    return tuple(extended if hook is offered else hook for hook in hooks)
