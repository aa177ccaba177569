"""Functions of the user that a policy may call: looked up, bound, run with a deadline, and never believed.

Whatever goes wrong in a call is told to the policy that made it, and to nobody else: other rollouts go on.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from repl_rl.errors import ConfigError
from repl_rl.machine.threads import InThread, settled
from repl_rl.record.trajectory import LineStatus

Function = Callable[..., object]
"""A function of the user, plain or async. A plain one runs in a thread of its own; an async one must not block."""

_HANGING = 16
"""Threads that one function may leave behind; after that its calls are refused until some of them end."""


@dataclass(frozen=True, slots=True)
class Call:
    """What the policy asked for."""

    name: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallResult:
    """What became of a call."""

    status: LineStatus
    """`ok`, `syntax_error` (it is no call), `exception` or `timeout`."""
    text: str
    """What the policy is told: the result, or the class and message of the error."""
    elapsed_s: float = 0.0
    """Wall clock, seconds."""

    @property
    def ok(self) -> bool:
        return self.status is LineStatus.OK


RunCall = Callable[[Call | CallResult], Awaitable[CallResult]]
"""Runs a call, or hands on what was no call. It raises nothing that the function raised."""


def tool_figures(calls: Sequence[tuple[str, bool]], known: Collection[str], rollouts: int) -> dict[str, float]:
    """`tool/NAME/calls` and `tool/NAME/failures`, a rollout, of (name, answered) pairs; a name that nobody offered is
    told as `other`, since a policy can write any."""
    figures: dict[str, float] = {}
    for name in known:
        figures |= {f"tool/{name}/calls": 0.0, f"tool/{name}/failures": 0.0}
    for name, answered in calls:
        kind = f"tool/{name if name in known else 'other'}"
        figures[f"{kind}/calls"] = figures.get(f"{kind}/calls", 0.0) + 1 / rollouts
        figures[f"{kind}/failures"] = figures.get(f"{kind}/failures", 0.0) + (not answered) / rollouts
    return figures


class Toolbox:
    """Functions by name, and how long each call may take."""

    def __init__(self, functions: Sequence[Function], timeout_s: float = 10.0) -> None:
        """Take `functions` under their own names.

        Raises:
            ConfigError: there is none, one has no name, two share a name, or `timeout_s` is not above 0.
        """
        if not functions:
            raise ConfigError("functions of the sampler", [], "give at least one")
        if not timeout_s > 0:
            raise ConfigError("timeout_s", timeout_s, "give a positive number of seconds")
        self.timeout_s = timeout_s
        self.functions: dict[str, Function] = {}
        for function in functions:
            name = getattr(function, "__name__", "")
            if not str(name).isidentifier():
                raise ConfigError("function of the sampler", function, "give it a __name__; use def, not lambda")
            try:
                inspect.signature(function)
            except ValueError as error:
                raise ConfigError("function of the sampler", name, f"wrap it in a def: {error}") from error
            if name in self.functions:
                raise ConfigError("function of the sampler", name, "give each function a name of its own")
            self.functions[name] = function
        self._left_behind: dict[str, set[InThread[object]]] = {}

    async def run(self, call: Call | CallResult) -> CallResult:
        """Run a call. It never raises for what the function does; cancellation passes."""
        if isinstance(call, CallResult):
            return call
        started = time.perf_counter()
        status, text = await self._run(call)
        return CallResult(status, text, time.perf_counter() - started)

    async def _run(self, call: Call) -> tuple[LineStatus, str]:
        function = self.functions.get(call.name)
        if function is None:
            return (
                LineStatus.EXCEPTION,
                f"NameError: there is no function {call.name!r}; use {', '.join(self.functions)}",
            )
        try:
            inspect.signature(function).bind(*call.args, **call.kwargs)
        except TypeError as error:
            return LineStatus.EXCEPTION, f"TypeError: {call.name}() {error}"
        left_behind = self._left_behind.setdefault(call.name, set())
        left_behind -= {thread for thread in left_behind if not thread.is_alive()}
        if len(left_behind) >= _HANGING:
            return LineStatus.TIMEOUT, f"TimeoutError: {call.name} hangs in {_HANGING} other calls"
        if inspect.iscoroutinefunction(function):
            return await self._wait(function(*call.args, **call.kwargs), call.name)
        thread = InThread(partial(function, *call.args, **call.kwargs), f"tool {call.name}")
        try:
            return await self._wait(settled(thread), call.name)
        finally:
            if thread.is_alive():
                left_behind.add(thread)

    async def _wait(self, work: Awaitable[object], name: str) -> tuple[LineStatus, str]:
        """The outcome of `work`, which is left behind when it takes too long, even where it ignores cancellation."""
        task = asyncio.ensure_future(_text(work))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask again
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


async def _text(work: Awaitable[object]) -> str:
    """The result as text; a plain function may have returned something to await."""
    try:
        value = await work
        return str(await value if inspect.isawaitable(value) else value)
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error
