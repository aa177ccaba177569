"""Synchronous access to rollouts: the trainer runs in its thread, rollouts run in an event loop of another thread."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Generic, NamedTuple, TypeVar

from repl_rl.engine.base import Pressure, Resting
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.at_once import at_once
from repl_rl.rollout.early import Busy, Early
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.probe import probed
from repl_rl.rollout.runner import Rollouts
from repl_rl.rollout.step import Places, Step, first_ended
from repl_rl.tasks import Task

T = TypeVar("T")
_RELEASE_S = 10.0
Opener = Callable[[], AbstractAsyncContextManager[Rollouts]]
"""Function that opens engine, sandbox and the rollouts that use them: `World.rollouts`."""


Alter = Callable[[Rollouts], Rollouts]
"""Function that derives other rollouts from those that are open, such as with other consoles. It is pickled by name."""


class UnderWay(Generic[T]):
    """Coroutine that runs in the event loop of another thread."""

    def __init__(self, coroutine: Coroutine[None, None, T], loop: asyncio.AbstractEventLoop) -> None:
        self._finished = threading.Event()
        self._future: Future[T] = asyncio.run_coroutine_threadsafe(self._tracked(coroutine), loop)

    async def _tracked(self, coroutine: Coroutine[None, None, T]) -> T:
        try:
            return await coroutine
        finally:
            self._finished.set()

    def wait(self) -> T:
        """Return the result. An interrupt during the wait, or an error of the coroutine, ends the coroutine first."""
        try:
            return self._future.result()
        except BaseException:
            # An interrupt reached this thread, or the coroutine failed. After an interrupt, let it release its
            # resources.
            self.end()
            raise

    def end(self) -> None:
        """Cancel the coroutine if it still runs, and let it release its resources."""
        if self._future.cancel():
            # The wait is bounded, because a coroutine may ignore its cancellation.
            self._finished.wait(_RELEASE_S)


class LoopThread:
    """Event loop in a daemon thread. `run` blocks; an interrupt while it blocks cancels the coroutine first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        return self.begin(coroutine).wait()

    def begin(self, coroutine: Coroutine[None, None, T]) -> UnderWay[T]:
        """Start a coroutine concurrently; the caller waits for it later, or ends it."""
        return UnderWay(coroutine, self._loop)

    def start(self, coroutine: Coroutine[None, None, T]) -> Future[T]:
        """Start a coroutine concurrently; it ends by itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the event loop."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Begun(NamedTuple):
    """Prefetched rollouts of a later step."""

    step: Step
    groups: Sequence[Early]
    """Rollouts that have ended, per group."""
    rollouts: UnderWay[list[Trajectory]]


class RolloutThread:
    """Context manager that opens and closes engine, sandbox and rollouts in one event loop thread.

    It implements the trainer's `RolloutSource`.
    """

    def __init__(self, opener: Opener, tasks: Mapping[str, Task]) -> None:
        self._opener = opener
        self.tasks = tasks
        """Tasks by id."""
        self._stack = AsyncExitStack()
        self._early: dict[int, _Begun] = {}
        self._busy = Busy()

    def __enter__(self) -> "RolloutThread":
        self._thread = LoopThread()
        try:
            self.rollouts = self._thread.run(self._stack.enter_async_context(self._opener()))
            self._places, self._news = asyncio.Semaphore(self.rollouts.concurrency), asyncio.Condition()
        except BaseException:
            # Python does not call `__exit__` if `__enter__` raises.
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.forget()
            self._thread.run(self._stack.aclose())
        finally:
            self._thread.close()

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that the policy never samples."""
        return self.rollouts.engine.forbidden_ids

    @property
    def facts(self) -> Facts:
        """Runtime information of the opened engine, sandbox and sampler."""
        return self.rollouts.facts

    @property
    def figures(self) -> Figures:
        """Statistics of all rollouts since the run began."""
        return Figures(self.rollouts.faults, self.rollouts.pressure)

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """Return one trajectory per task id, in order.

        The engine must hold the weights of `policy_step`. Prefetched rollouts of that step are awaited.
        """
        if policy_step in self._early:
            # These rollouts were prefetched: wait for the rest of them, then update lengths and statistics.
            step, _, rollouts = self._early.pop(policy_step)
            played = rollouts.wait()
            self.rollouts.learn_lengths(step.tasks, played)
            self.rollouts.pressed.latest = self._pressure.since(step.pressure)
            return played
        trajectories = self._thread.run(self.rollouts.collect([self.tasks[i] for i in task_ids]))
        engine = self.rollouts.engine
        # Let the engine free its memory while the policy is updated.
        if isinstance(engine, Resting):
            self._thread.run(engine.rest())
        return trajectories

    def begin(
        self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory] = MappingProxyType({})
    ) -> None:
        """Start the rollouts of a later step, and return at once. `collect` returns them at `policy_step`.

        All prefetched rollouts share the slots of `World.concurrency`, in the order in which they start.

        Args:
            task_ids: one task id per rollout; a repeated id is a group.
            policy_step: step of the policy that will learn from them. New weights may be loaded in between; they take
                effect between two lines of a rollout.
            finished: rollouts that a resumed run has already played, by number.
        """
        tasks = [self.tasks[i] for i in task_ids]
        whole = {n: replace(t, workspace=tasks[n].workspace) for n, t in finished.items()}  # a record only names it
        step = Step(tasks, self.rollouts.lengths.longest_first(tasks), whole, self._pressure)
        groups = [Early(policy_step, self._places, dict(step.before(places))) for _, places in step.groups]
        self._early[policy_step] = _Begun(step, groups, self._thread.begin(self._played(step, groups)))

    @property
    def _pressure(self) -> Pressure:
        return self.rollouts.pressure or Pressure()

    async def _played(self, step: Step, groups: Sequence[Early]) -> list[Trajectory]:
        self._busy.begin()
        try:
            async with at_once() as playing:
                for number in range(len(groups)):
                    playing.create_task(self._group(step, number, groups[number]))
            return step.played([step.parts[number] for number in range(len(groups))], self.rollouts.sandbox.name)
        finally:
            self._busy.end()
            # Do this after an error too, so that no caller waits forever.
            step.over = True
            await self._tell()

    async def _group(self, step: Step, number: int, early: Early) -> None:
        task, places = step.groups[number]
        step.parts[number] = await self.rollouts.group(task, len(places), early=early)
        await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def finished(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step that ended without a failure, by number in the step."""
        step, groups, _ = self._early[policy_step]
        ended = [dict(early.finished) for early in groups]  # atomic copies: the other thread adds to them
        return {places[n]: t for (_, places), told in zip(step.groups, ended, strict=True) for n, t in told.items()}

    def first(self, groups: Sequence[Places]) -> int:
        """Wait until one of these groups of later steps has ended. Return the index of the first one that has."""
        return self._thread.run(self._first(groups))

    async def _first(self, groups: Sequence[Places]) -> int:
        async with self._news:
            while (number := first_ended(groups, lambda policy_step: self._early[policy_step].step)) is None:
                await self._news.wait()
        return number

    def ended(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step whose groups have ended, by number in the step.

        They are the trajectories that `collect` will return.
        """
        return self._early[policy_step].step.ended

    def forget(self) -> None:
        """Cancel the rollouts of later steps."""
        for begun in self._early.values():
            begun.rollouts.end()
        self._early.clear()

    @property
    def busy_s(self) -> float:
        """Wall-clock time in which prefetched rollouts ran, seconds."""
        return self._busy.elapsed_s

    def probe(self, task_id: str) -> Sequence[Trajectory]:
        """Sample the first line of the current policy on a task, which is never trained on; see `probed`."""
        return [self._thread.run(probed(self.rollouts, self.tasks[task_id]))]

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: Alter | None = None
    ) -> Sequence[Trajectory]:
        """Return one trajectory per task, at `temperature` (0 is greedy), outside training. `metrics` ignores them.

        `alter` derives the rollouts that play them; None means those of training.
        """
        pressed = self.rollouts.pressed
        # Keep the statistics of the training step.
        of_the_step = pressed.latest
        rollouts = self.rollouts if alter is None else alter(self.rollouts)
        try:
            return self._thread.run(rollouts.collect(tasks, temperature))
        finally:
            pressed.latest = of_the_step

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """See `Rollouts.metrics`."""
        return self.rollouts.metrics(trajectories)

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run any coroutine in the rollouts' event loop."""
        return self._thread.run(coroutine)

    def memory(self) -> str:
        """Return the state that rollouts keep between steps, statistics only, as JSON."""
        rollouts = self.rollouts
        return json.dumps({"lengths": rollouts.lengths.memory(), "broken": dict(rollouts.faults)})

    def remember(self, memory: str) -> None:
        """Restore the state that `memory` returned."""
        told = json.loads(memory)
        self.rollouts.lengths.remember(told["lengths"])
        for name, value in told.get("broken", {}).items():  # older checkpoints lack this field
            setattr(self.rollouts.broken, name, value)

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Load the weights in `folder` into the engine."""
        self._thread.run(self.rollouts.engine.load_weights(folder, policy_step))
