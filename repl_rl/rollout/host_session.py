"""Host function calls of one rollout: counted, limited, executed and recorded, or answered from a record."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from repl_rl.engine.base import Engine
from repl_rl.machine.threads import InThread, settled
from repl_rl.record.clip import clip
from repl_rl.record.record import Origin
from repl_rl.record.trajectory import HostCall, Trajectory
from repl_rl.rollout.host import HOST_ERROR_CHARS, MOST_BYTES, HostFunction
from repl_rl.rollout.host_record import SPENT, UNDONE, Recall, Refused, read_call, reply_of, unread
from repl_rl.rollout.renderer import Renderer
from repl_rl.tasks import Task

_HANGING = 16
"""Limit of abandoned threads per function. Above it, calls are refused until some of these threads end."""
_STRAY = 64
"""Calls of a rollout that may be invalid (malformed, or without a known name), on top of the functions' limits."""


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a staged function: its answer, and the trajectory sampled for it."""

    answer: object
    child: Trajectory
    trained: bool


@dataclass(frozen=True, slots=True)
class Model:
    """Model for queries."""

    engine: Engine
    renderer: Renderer


class Player(Protocol):
    """Interface to play a rollout within another one."""

    def asked(self, model: str) -> Model:
        """Return a model that was opened for host functions; an empty name means the policy."""

    def begin(self, task: Task, id: str, asked_by: Origin, depth: int) -> Origin:
        """Return the origin of a nested rollout with that id, which a call of the rollout `asked_by` requests."""

    async def play(self, origin: Origin, temperature: float, depth: int) -> Trajectory:
        """Play the nested rollout in a separate console, without a grade."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Context of a call."""

    player: Player
    origin: Origin
    """Origin of the calling rollout."""
    temperature: float
    depth: int
    """Depth of the calling rollout: 0 is top-level, 1 was requested by a call at depth 0."""
    number: int
    """Number of the call in its rollout, from 0. It is part of the id of everything sampled for the call."""


@dataclass(slots=True)
class Places:
    """Limits of concurrent calls over all rollouts.

    Each depth has separate limits. With a common one, a nested call could wait for the call that waits for it.
    """

    _free: dict[tuple[str, int], asyncio.Semaphore] = field(default_factory=dict)
    hanging: dict[str, set[InThread[object]]] = field(default_factory=dict)
    """Abandoned threads, by function."""

    def of(self, function: HostFunction, depth: int) -> asyncio.Semaphore:
        """Return the semaphore of a function at a depth."""
        most = function.limits.at_once_in_all
        return self._free.setdefault((function.name, depth), asyncio.Semaphore(most))


class HostSession:
    """Handler of the host function calls of one rollout's console. It implements `Host`."""

    def __init__(
        self, functions: Sequence[HostFunction] = (), places: Places | None = None, stage: Stage | None = None
    ) -> None:
        """Set the functions of a rollout.

        Args:
            functions: functions that lines may call.
            places: limits over all rollouts; None means limits of this rollout alone.
            stage: context of staged functions, with call number 0; None means that none of them is staged.
        """
        self._functions = {function.name: function for function in functions}
        self._places, self._stage = places or Places(), stage
        self._here = {f.name: asyncio.Semaphore(f.limits.at_once) for f in functions}
        self._counts: Counter[str] = Counter()
        self._most = sum(function.limits.calls for function in functions) + _STRAY
        self._made: list[HostCall] = []
        self._spent: set[str] = set()
        self._children: list[Trajectory] = []
        self._first = 0
        self._recall: Recall | None = None

    @property
    def functions(self) -> Mapping[str, str]:
        """See `Host.functions`."""
        return {name: function.declared for name, function in self._functions.items()}

    @property
    def argument_bytes(self) -> int:
        """See `Host.argument_bytes`."""
        return max((function.limits.argument_bytes for function in self._functions.values()), default=1)

    def take(self) -> tuple[HostCall, ...]:
        """Return the calls since the last `take`. Of calls beyond a limit, only the first per function is included."""
        made, self._made, self._spent = tuple(self._made), [], set()
        return made

    def recall(self, calls: Sequence[HostCall]) -> None:
        """Answer calls from a record until `resume`."""
        self._recall, self._first = Recall(self.functions), len(calls)
        self._recall.expect(calls)

    def resume(self) -> str:
        """Answer calls by the functions again. Return the difference between calls and record, empty if they agree."""
        recall, self._recall = self._recall, None
        return recall.differs if recall is not None else ""

    def completed(self, trajectory: Trajectory) -> Trajectory:
        """Return a trajectory with the names of the offered functions and the trajectories sampled for calls."""
        return replace(trajectory, host_functions=tuple(self._functions), children=tuple(self._children))

    async def answer(self, call: bytes) -> bytes:
        """See `Host.answer`.

        Raises:
            ReplRLError: the engine failed in a staged function.
        """
        if self._recall is not None:
            return await self._recall.answer(call)
        # Refuse a flood of calls, or a huge call, before it costs anything.
        total = sum(self._counts.values())
        if total >= self._most or len(call) > MOST_BYTES:  # not worth parsing
            return reply_of(self._refused(unread(call), f"a rollout may make {self._most} calls in all, {SPENT}"))
        asked = self._read(call)
        if asked.error != UNDONE:
            return reply_of(self._refused(asked, asked.error or ""))
        # From here on the function is known, and its own limit applies.
        function = self._functions[asked.name]
        if self._counts[asked.name] > function.limits.calls:
            return reply_of(self._refused(asked, f"{asked.name}() was called {function.limits.calls} times, {SPENT}"))
        return reply_of(await self._made_of(function, asked, self._first + total))

    def _read(self, call: bytes) -> HostCall:
        """Parse and count a call. Its error is `UNDONE` if it can be made."""
        try:
            asked = read_call(call)
            function = self._functions.get(asked.name)
            if function is None:
                raise Refused(f"there is no host function {asked.name!r}; there are {', '.join(self._functions)}")
            self._counts[asked.name] += 1
            if len(call) > function.limits.argument_bytes:
                most = function.limits.argument_bytes
                raise Refused(f"arguments of {asked.name}() have {len(call)} bytes as JSON; at most {most} are allowed")
        except Refused as refused:
            # Invalid calls count too, for the limit over all functions.
            self._counts[""] += 1
            return replace(unread(call), error=str(refused))
        return asked

    def _refused(self, asked: HostCall, why: str) -> HostCall:
        """Record a refused call with its error, and return it.

        Of calls beyond a limit, only the first per function and line is recorded. A flood of calls must leave a small
        record.
        """
        done = replace(asked, error=clip(why, HOST_ERROR_CHARS))
        if not why.endswith(SPENT) or asked.name not in self._spent:
            self._made.append(done)
        if why.endswith(SPENT):
            self._spent.add(asked.name)
        return done

    async def _made_of(self, function: HostFunction, asked: HostCall, number: int) -> HostCall:
        """Make a call and record it, even if its line ends first."""
        at, started = len(self._made), time.perf_counter()
        # Record the call before it runs, so that it remains as unanswered if its line ends first.
        self._made.append(asked)
        # `take` replaces the list, so keep the one that holds this call.
        made = self._made
        try:
            done = await self._done(function, asked, number)
        except Refused as refused:
            done = replace(asked, error=clip(str(refused), HOST_ERROR_CHARS))
        made[at] = replace(done, elapsed_s=time.perf_counter() - started)
        return made[at]

    async def _done(self, function: HostFunction, asked: HostCall, number: int) -> HostCall:
        answer = await self._called(function, asked, number)
        if not isinstance(answer, Played):
            return replace(asked, answer=_as_json(answer, function), error=None)
        # The trajectory was sampled, so it is kept even if the answer cannot be sent.
        self._children.append(answer.child)
        sampled = replace(asked, child=answer.child.id, trained=answer.trained)
        try:
            return replace(sampled, answer=_as_json(answer.answer, function), error=None)
        except Refused as refused:
            return replace(sampled, error=str(refused))

    async def _called(self, function: HostFunction, asked: HostCall, number: int) -> object:
        if function.run is None:
            raise Refused(f"{function.name}() was recorded and is not there; name it in host_functions")
        told = json.loads(asked.arguments)
        try:
            bound = function.bound(told["args"], told["kwargs"])
        except (TypeError, RecursionError) as error:
            raise Refused(str(error)) from error
        depth = self._stage.depth if self._stage is not None else 0
        # Wait for both limits: that of this rollout, and that over all rollouts.
        async with self._here[function.name], self._places.of(function, depth):
            if function.staged:
                assert self._stage is not None
                stage = replace(self._stage, number=number)
                return await self._within(function, partial(function.run, stage, **bound))
            return await self._left_behind(function, partial(function.run, **bound))

    async def _within(self, function: HostFunction, run: Callable[[], object]) -> object:
        """Run a shipped function, which can be cancelled."""
        work = run()
        assert isinstance(work, Awaitable)
        try:
            async with asyncio.timeout(function.limits.seconds):
                return await work
        except TimeoutError as error:
            raise Refused(_late(function)) from error

    async def _left_behind(self, function: HostFunction, run: Callable[[], object]) -> object:
        """Run a function of the user. One that hangs is abandoned, in its thread or despite its cancellation."""
        hanging = self._places.hanging.setdefault(function.name, set())
        hanging -= {thread for thread in hanging if not thread.is_alive()}
        if len(hanging) >= _HANGING:
            raise Refused(f"{function.name}() hangs in {_HANGING} other calls; it is not called again")
        task = asyncio.ensure_future(_result(run, function.name, hanging))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the error as retrieved
        try:
            await asyncio.wait({task}, timeout=function.limits.seconds)
        finally:
            if not task.done():
                task.cancel()
        # The cancellation above may be ignored, so do not wait for it.
        if not task.done():
            raise Refused(_late(function))
        error = task.exception() if not task.cancelled() else RuntimeError("it cancelled itself")
        if error is not None:
            raise Refused(f"{type(error).__name__}: {error}") from error
        return task.result()


async def _result(run: Callable[[], object], name: str, hanging: set[InThread[object]]) -> object:
    """Return the result of a plain function in a thread, or of an async one on this loop."""
    if asyncio.iscoroutinefunction(getattr(run, "func", run)):
        work = run()
        assert isinstance(work, Awaitable)
        return await work
    thread = InThread(run, f"host function {name}")
    try:
        return await settled(thread)
    finally:
        # A thread cannot be stopped, only counted.
        if thread.is_alive():
            hanging.add(thread)


def _late(function: HostFunction) -> str:
    return f"{function.name}() took longer than {function.limits.seconds:g} s"


def _as_json(answer: object, function: HostFunction) -> str:
    try:
        text = json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"what {function.name}() gave is no JSON value: {error}") from error
    if len(text) > function.limits.answer_bytes:
        most = function.limits.answer_bytes
        raise Refused(f"what {function.name}() gave has {len(text)} bytes as JSON; at most {most} are allowed")
    return text
