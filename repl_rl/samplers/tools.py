"""Functions of the user that a policy may call: lookup, binding of arguments, and calls with a timeout.

Every error in a call is reported to the policy that made it, and to nothing else: other rollouts continue.
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
"""Function of the user, plain or async. A plain one runs in a separate thread; an async one must not block."""

_HANGING = 16
"""Number of hanging threads that one function may have. Further calls are refused until some of them end."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call that the policy requests."""

    name: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of a call."""

    status: LineStatus
    """`ok`, `syntax_error` (not a call), `exception` or `timeout`."""
    text: str
    """Text for the policy: the result, or the class and message of the error."""
    elapsed_s: float = 0.0
    """Wall clock, seconds."""

    @property
    def ok(self) -> bool:
        return self.status is LineStatus.OK


RunCall = Callable[[Call | CallResult], Awaitable[CallResult]]
"""Function that runs a call, or returns the result of a text that is not a call. Errors of the called function do not
pass."""


def tool_figures(calls: Sequence[tuple[str, bool]], known: Collection[str], rollouts: int) -> dict[str, float]:
    """Return `tool/NAME/calls` and `tool/NAME/failures` per rollout, from pairs of name and success.

    Calls of unknown names count as `other`, since a policy can write any name.
    """
    figures: dict[str, float] = {}
    for name in known:
        # Every known tool has metrics, even without a call.
        figures |= {f"tool/{name}/calls": 0.0, f"tool/{name}/failures": 0.0}
    for name, answered in calls:
        kind = f"tool/{name if name in known else 'other'}"
        figures[f"{kind}/calls"] = figures.get(f"{kind}/calls", 0.0) + 1 / rollouts
        figures[f"{kind}/failures"] = figures.get(f"{kind}/failures", 0.0) + (not answered) / rollouts
    return figures


class Toolbox:
    """Functions by name, with a timeout per call."""

    def __init__(self, functions: Sequence[Function], timeout_s: float = 10.0) -> None:
        """Register `functions` under their own names.

        Raises:
            ConfigError: there are no functions, one has no name, two have the same name, or `timeout_s` is not above 0.
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
                # Some built-in functions have no signature, so calls could not be validated.
                inspect.signature(function)
            except ValueError as error:
                raise ConfigError("function of the sampler", name, f"wrap it in a def: {error}") from error
            if name in self.functions:
                raise ConfigError("function of the sampler", name, "give each function a name of its own")
            self.functions[name] = function
        self._left_behind: dict[str, set[InThread[object]]] = {}

    async def run(self, call: Call | CallResult) -> CallResult:
        """Run a call. Errors of the function become a result; a cancellation passes."""
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
            # Report wrong arguments as such, not as an error inside the function.
            inspect.signature(function).bind(*call.args, **call.kwargs)
        except TypeError as error:
            return LineStatus.EXCEPTION, f"TypeError: {call.name}() {error}"
        left_behind = self._left_behind.setdefault(call.name, set())
        # Forget threads that have ended meanwhile.
        left_behind -= {thread for thread in left_behind if not thread.is_alive()}
        if len(left_behind) >= _HANGING:
            return LineStatus.TIMEOUT, f"TimeoutError: {call.name} hangs in {_HANGING} other calls"
        if inspect.iscoroutinefunction(function):
            return await self._wait(function(*call.args, **call.kwargs), call.name)
        thread = InThread(partial(function, *call.args, **call.kwargs), f"tool {call.name}")
        try:
            return await self._wait(settled(thread), call.name)
        finally:
            # A thread cannot be stopped, only counted.
            if thread.is_alive():
                left_behind.add(thread)

    async def _wait(self, work: Awaitable[object], name: str) -> tuple[LineStatus, str]:
        """Return the outcome of `work`. After the timeout, `work` is abandoned, even if it ignores its cancellation."""
        task = asyncio.ensure_future(_text(work))
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


async def _text(work: Awaitable[object]) -> str:
    """Return the result as text. The result of a plain function may be awaitable."""
    try:
        value = await work
        return str(await value if inspect.isawaitable(value) else value)
    # SystemExit would end the event loop.
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error
