"""Rollouts for synchronous code: the interface of trainer and evaluation, and its implementation in one process.

The trainer runs in its thread, and rollouts run in an event loop of another thread.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Generic, NamedTuple, Protocol, TypeVar

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import PreemptionStats, SupportsSleep
from repl_rl.rollout.concurrent_rollouts import Rollouts, open_task_group
from repl_rl.rollout.length_estimator import LengthEstimator
from repl_rl.rollout.prefetch_rollouts import (
    BusyTimer,
    GroupKey,
    Prefetched,
    StepRollouts,
    find_first_ended,
    sample_probe_line,
)
from repl_rl.rollout.retry import FaultRetries, get_fault_counts
from repl_rl.rollout.rollout_hooks import find_hook
from repl_rl.rollout.rollout_stats import (
    ProgressCounter,
    RolloutStats,
    RuntimeInfo,
    compute_step_metrics,
    get_preemptions,
)
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory

T = TypeVar("T")
_RELEASE_S = 10.0
"""Time for a cancelled coroutine to release its resources, seconds."""

OpenRollouts = Callable[[], AbstractAsyncContextManager[Rollouts]]
"""Function that opens engine, sandbox and the rollouts that use them: `RolloutConfig.open_rollouts`."""

ModifyRollouts = Callable[[Rollouts], Rollouts]
"""Function that derives other rollouts from those that are open, such as with other consoles. It is pickled by name."""


class RolloutClient(Protocol):
    """Source of rollouts: one process, or several workers with the same weights. It is the trainer's `RolloutSource`.

    The process that plays a rollout does not affect its id and its seed. The trajectory is the same too, if the engine
    seeds its sessions.
    """

    @property
    def tasks(self) -> Mapping[str, Task]:
        """Training tasks by id."""

    @property
    def runtime_info(self) -> RuntimeInfo:
        """Runtime information of the opened engine, sandbox and sampler."""

    @property
    def stats(self) -> RolloutStats:
        """Statistics of all rollouts since the run began."""

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that the policy never samples."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """Return one trajectory per task id, in order; a repeated id is a group."""

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: ModifyRollouts | None = None
    ) -> Sequence[Trajectory]:
        """Return one trajectory per task, at `temperature` (0 is greedy), outside training. `metrics` ignores them.

        `alter` derives, from the open `Rollouts`, the object that plays the tasks. None uses the open one unchanged.
        """

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the metrics of a step, in addition to those of its records."""

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Load the weights in `folder` into every engine. The folder stays unchanged until the next call."""

    def state_dict(self) -> str:
        """Return the state that is kept between steps, statistics only, as JSON."""

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""


@keeps_old_names
class SyncRollouts:
    """Context manager that opens and closes engine, sandbox and rollouts in one event loop thread.

    It implements the trainer's `RolloutSource`.
    """

    def __init__(self, opener: OpenRollouts, tasks: Mapping[str, Task]) -> None:
        self._opener = opener
        self.tasks = tasks
        """Tasks by id."""
        self.progress = ProgressCounter()
        """Counts of the rollouts, to which a display subscribes."""
        self._lengths = LengthEstimator()
        self._preempted = 0
        self._stack = AsyncExitStack()
        self._prefetched: dict[int, _PrefetchedStep] = {}
        self._busy = BusyTimer()

    def __enter__(self) -> "SyncRollouts":
        self._thread = EventLoopThread()
        try:
            opened = self._thread.run(self._stack.enter_async_context(self._opener()))
            self.rollouts = replace(opened, hooks=(*opened.hooks, self.progress))
            self._slots, self._changed = asyncio.Semaphore(opened.settings.concurrency), asyncio.Condition()
        except BaseException:
            # Python does not call `__exit__` if `__enter__` raises.
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.cancel_prefetched()
            self._thread.run(self._stack.aclose())
        finally:
            self._thread.close()

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that the policy never samples."""
        return self.rollouts.engine.forbidden_ids

    @property
    def runtime_info(self) -> RuntimeInfo:
        """Runtime information of the opened engine, sandbox and sampler."""
        return self.rollouts.runtime_info

    @property
    def stats(self) -> RolloutStats:
        """Statistics of all rollouts since the run began."""
        preemptions = get_preemptions(self.rollouts.engine)
        return RolloutStats(get_fault_counts(self.rollouts), preemptions, self.progress.counts)

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """Return one trajectory per task id, in order.

        The engine must hold the weights of `policy_step`. Prefetched rollouts of that step are awaited.
        """
        if policy_step in self._prefetched:
            # These rollouts were prefetched: wait for the rest of them, then update lengths and statistics.
            step, _, rollouts = self._prefetched.pop(policy_step)
            trajectories = rollouts.wait()
            # The start order of rollouts that start meanwhile does not depend on timing, and no rollout counts twice.
            self._lengths.update_all(step.tasks, trajectories)
            self._preempted = self._preemptions.subtract(step.preemptions).preempted
            return trajectories
        earlier, engine = self._preemptions, self.rollouts.engine
        tasks = [self.tasks[i] for i in task_ids]
        trajectories = self._thread.run(self._lengths.collect_longest_first(self.rollouts, tasks))
        self._preempted = self._preemptions.subtract(earlier).preempted
        # Let the engine free its memory while the policy is updated.
        if isinstance(engine, SupportsSleep):
            self._thread.run(engine.sleep())
        return trajectories

    def start_rollouts(
        self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory] = MappingProxyType({})
    ) -> None:
        """Start the rollouts of a later step, and return at once. `collect` returns them at `policy_step`.

        All prefetched rollouts share the slots of `RolloutConfig.concurrency`, in the order in which they start.

        Args:
            task_ids: one task id per rollout; a repeated id is a group.
            policy_step: step of the policy that will learn from them. New weights may be loaded in between; they take
                effect between two lines of a rollout.
            finished: rollouts that a resumed run has already played, by number.
        """
        tasks = [self.tasks[i] for i in task_ids]
        trajectories = {
            n: replace(t, workspace=tasks[n].workspace) for n, t in finished.items()
        }  # a record only names it
        step = StepRollouts(tasks, self._lengths.sort_longest_first(tasks), trajectories, self._preemptions)
        # One entry per group; all of them share the concurrency slots.
        groups = [
            Prefetched(policy_step, self._slots, dict(step.get_finished_before(numbers)))
            for _, numbers in step.group_indices
        ]
        self._prefetched[policy_step] = _PrefetchedStep(
            step, groups, self._thread.start_waitable(self._finish_step(step, groups))
        )

    @property
    def _preemptions(self) -> PreemptionStats:
        return get_preemptions(self.rollouts.engine) or PreemptionStats()

    async def _finish_step(self, step: StepRollouts, groups: Sequence[Prefetched]) -> list[Trajectory]:
        self._busy.begin()
        try:
            async with open_task_group() as playing:
                for number in range(len(groups)):
                    playing.create_task(self._run_group(step, number, groups[number]))
            return step.merge_results(
                [step.results[number] for number in range(len(groups))], self.rollouts.sandbox.name
            )
        finally:
            self._busy.end()
            # Do this after an error too, so that no caller waits forever.
            step.is_closed = True
            await self._notify()

    async def _run_group(self, step: StepRollouts, number: int, prefetched: Prefetched) -> None:
        task, numbers = step.group_indices[number]
        step.results[number] = await prefetched.collect_group(self.rollouts, task, len(numbers))
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def get_finished_rollouts(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step that ended without a failure, by number in the step."""
        step, groups, _ = self._prefetched[policy_step]
        finished = [dict(group.finished_rollouts) for group in groups]  # atomic copies: the other thread adds to them
        return {
            numbers[n]: t
            for (_, numbers), group in zip(step.group_indices, finished, strict=True)
            for n, t in group.items()
        }

    def wait_for_first_group(self, groups: Sequence[GroupKey]) -> int:
        """Wait until one of these prefetched groups has ended. Return the lowest index of a group that has ended."""
        return self._thread.run(self._wait_for_first_group(groups))

    async def _wait_for_first_group(self, groups: Sequence[GroupKey]) -> int:
        async with self._changed:
            while (number := find_first_ended(groups, lambda policy_step: self._prefetched[policy_step].step)) is None:
                await self._changed.wait()
        return number

    def get_ended_groups(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step whose groups have ended, by number in the step.

        They are the trajectories that `collect` will return.
        """
        return self._prefetched[policy_step].step.ended_rollouts

    def cancel_prefetched(self) -> None:
        """Cancel the rollouts of later steps."""
        for step in self._prefetched.values():
            step.rollouts.cancel()
        self._prefetched.clear()

    @property
    def rollout_busy_s(self) -> float:
        """Wall-clock time in which prefetched rollouts ran, seconds."""
        return self._busy.elapsed_s

    def sample_probe_lines(self, task_id: str) -> Sequence[Trajectory]:
        """Sample the first line of the current policy on a task, which is never trained on; see `sample_probe_line`."""
        return [self._thread.run(sample_probe_line(self.rollouts, self.tasks[task_id]))]

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: ModifyRollouts | None = None
    ) -> Sequence[Trajectory]:
        """Return one trajectory per task, at `temperature` (0 is greedy), outside training. `metrics` ignores them.

        `alter` derives the rollouts that play them; None means those of training.
        """
        rollouts = self.rollouts if alter is None else alter(self.rollouts)
        return self._thread.run(self._lengths.collect_longest_first(rollouts, tasks, temperature))

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """See `RolloutClient.metrics`. Those of hooks come last."""
        rollouts, stats = self.rollouts, self.stats
        preempted = None if stats.preemptions is None else self._preempted
        metrics = compute_step_metrics(rollouts.sampler, rollouts.limits, trajectories, preempted, stats.faults)
        for hook in rollouts.hooks:
            metrics |= hook.metrics(trajectories)
        return metrics

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run any coroutine in the rollouts' event loop."""
        return self._thread.run(coroutine)

    def state_dict(self) -> str:
        """Return the state that rollouts keep between steps, statistics only, as JSON."""
        return json.dumps({"lengths": self._lengths.state_dict(), "broken": dict(get_fault_counts(self.rollouts))})

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        state = json.loads(memory)
        self._lengths.load_state_dict(state["lengths"])
        retries = find_hook(self.rollouts.hooks, FaultRetries)
        if retries is not None:
            for name, value in state.get("broken", {}).items():  # older checkpoints lack this field
                setattr(retries.counts, name, value)

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Load the weights in `folder` into the engine."""
        self._thread.run(self.rollouts.engine.load_weights(folder, policy_step))


class BackgroundTask(Generic[T]):
    """Coroutine that runs in the event loop of another thread."""

    def __init__(self, coroutine: Coroutine[None, None, T], loop: asyncio.AbstractEventLoop) -> None:
        self._finished = threading.Event()
        self._future: Future[T] = asyncio.run_coroutine_threadsafe(self._run_tracked(coroutine), loop)

    async def _run_tracked(self, coroutine: Coroutine[None, None, T]) -> T:
        try:
            return await coroutine
        finally:
            self._finished.set()

    def wait(self) -> T:
        """Return the result. An interrupt during the wait, or an error of the coroutine, ends the coroutine first."""
        try:
            return self._future.result()
        except BaseException:
            # After an interrupt of this thread, the coroutine still runs. If it failed, nothing is left to cancel.
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the coroutine if it still runs, and let it release its resources."""
        if self._future.cancel():
            # The wait is bounded, because a coroutine may ignore its cancellation.
            self._finished.wait(_RELEASE_S)


class EventLoopThread:
    """Event loop in a daemon thread. `run` blocks; an interrupt while it blocks cancels the coroutine first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[None, None, T]) -> T:
        """Run a coroutine, and return its result."""
        return self.start_waitable(coroutine).wait()

    def start_waitable(self, coroutine: Coroutine[None, None, T]) -> BackgroundTask[T]:
        """Start a coroutine concurrently; the caller waits for it later, or ends it."""
        return BackgroundTask(coroutine, self._loop)

    def start_detached(self, coroutine: Coroutine[None, None, T]) -> Future[T]:
        """Start a coroutine concurrently; it ends by itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Schedule a call in the event loop."""
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Stop the event loop that runs the rollouts, and wait until its thread has ended."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _PrefetchedStep(NamedTuple):
    """Prefetched rollouts of a later step."""

    step: StepRollouts
    groups: Sequence[Prefetched]
    """Rollouts that have ended, per group."""
    rollouts: BackgroundTask[list[Trajectory]]
