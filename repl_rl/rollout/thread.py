"""A synchronous face for rollouts: the trainer runs in its thread, rollouts in an event loop of their own."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from repl_rl.engine.base import Resting
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.race import Raced
from repl_rl.rollout.runner import Rollouts
from repl_rl.tasks import Task

T = TypeVar("T")
_RELEASE_S = 10.0
Opener = Callable[[], AbstractAsyncContextManager[Rollouts]]
"""Opens engine and sandbox, and the rollouts that use them: `World.rollouts`."""


Alter = Callable[[Rollouts], Rollouts]
"""Makes other rollouts of those that are open, such as with other consoles. It is pickled by its name."""


class LoopThread:
    """An event loop in a daemon thread. `run` blocks; an interrupt while it blocks cancels the coroutine first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        finished = threading.Event()

        async def tracked() -> T:
            try:
                return await coroutine
            finally:
                finished.set()

        future: Future[T] = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt reached this thread, or the coroutine failed: in the first case let it release what it holds.
            future.cancel()
            finished.wait(_RELEASE_S)
            raise

    def start(self, coroutine: Coroutine[None, None, T]) -> Future[T]:
        """Run it beside whatever else runs; it ends by itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, call: Callable[[], None]) -> None:
        """Have `call` called there."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RolloutThread:
    """Context manager: engine, sandbox and rollouts, opened and closed in one event loop thread.

    It satisfies the trainer's `RolloutSource`.
    """

    def __init__(self, opener: Opener, tasks: Mapping[str, Task]) -> None:
        self._opener = opener
        self.tasks = tasks
        """By id."""
        self._stack = AsyncExitStack()

    def __enter__(self) -> "RolloutThread":
        self._thread = LoopThread()
        try:
            self.rollouts = self._thread.run(self._stack.enter_async_context(self._opener()))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._thread.run(self._stack.aclose())
        finally:
            self._thread.close()

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that the policy never samples."""
        return self.rollouts.engine.forbidden_ids

    @property
    def facts(self) -> Facts:
        """What was opened."""
        return self.rollouts.facts

    @property
    def figures(self) -> Figures:
        """Of all rollouts since the run began."""
        return Figures(self.rollouts.tally, self.rollouts.faults, self.rollouts.pressure)

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """One trajectory a task id, in order; the engine must hold the weights of `policy_step`."""
        trajectories = self._thread.run(self.rollouts.collect([self.tasks[i] for i in task_ids]))
        self._rest()
        return trajectories

    def race(self, groups: Sequence[Sequence[str]], keep: int, policy_step: int) -> Raced:
        """The first `keep` of these groups of task ids that are done: see `Rollouts.race`; else as `collect`."""
        raced = self._thread.run(self.rollouts.race([[self.tasks[i] for i in group] for group in groups], keep))
        self._rest()
        return raced

    def _rest(self) -> None:
        engine = self.rollouts.engine
        if isinstance(engine, Resting):
            self._thread.run(engine.rest())

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: Alter | None = None
    ) -> Sequence[Trajectory]:
        """One trajectory a task, at `temperature` (0: greedy), beside training: `metrics` tells nothing of them.

        `alter` makes the rollouts that play them; None: those of training.
        """
        pressed = self.rollouts.pressed
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
        """What rollouts keep from one step to the next, figures alone, as JSON."""
        rollouts = self.rollouts
        figures = {"tally": asdict(rollouts.tally), "broken": dict(rollouts.faults)}
        return json.dumps({"lengths": rollouts.lengths.memory(), **figures})

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        told = json.loads(memory)
        self.rollouts.lengths.remember(told["lengths"])
        for name, value in told["tally"].items():
            setattr(self.rollouts.tally, name, value)
        for name, value in told.get("broken", {}).items():  # states of before it was counted have none
            setattr(self.rollouts.broken, name, value)

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Give the engine the weights in `folder`."""
        self._thread.run(self.rollouts.engine.load_weights(folder, policy_step))
