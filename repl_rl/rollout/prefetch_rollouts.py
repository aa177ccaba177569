"""Prefetched rollouts: they start before the step that learns from them, while the policy is updated.

- `Prefetched` plays one group of a later step
- `StepRollouts` are the rollouts of one step while they run, in groups, of which some may have ended earlier
- `sample_probe_line` shows the weights of the engine while no rollout can
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from repl_rl.engine.base import PreemptionStats, Sampling
from repl_rl.rollout.concurrent_rollouts import BatchResult, Rollouts, check_failures, open_task_group
from repl_rl.rollout.rollout_hooks import BatchNotes
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Stop, Trajectory
from repl_rl.trajectory.trajectory_builder import EpisodeRecorder, RolloutSpec


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Prefetched rollouts of one later step."""

    policy_step: int
    """Step of the policy that will learn from these rollouts: the number of its optimizer steps.

    It is part of the rollouts' ids and seeds, which therefore do not depend on the weights at the start.
    """
    slots: asyncio.Semaphore
    """Concurrency slots shared by all prefetched rollouts. Those of earlier steps asked first, and get a slot first."""
    finished_rollouts: dict[int, Trajectory] = field(default_factory=dict)
    """Rollouts that ended without a failure, by number in the group. Initial entries are not played."""

    async def collect_group(self, rollouts: Rollouts, task: Task, size: int, temperature: float = 1.0) -> BatchResult:
        """Do as `Rollouts.collect_group`, but for the later step, and without the rollouts that have ended."""
        tasks, earlier, notes = [task] * size, dict(self.finished_rollouts), BatchNotes()
        specs = rollouts.make_specs(tasks, temperature, self.policy_step)
        async with open_task_group() as group:
            running = {
                number: group.create_task(rollouts.run_rollout(spec, temperature, self.slots, notes))
                for number, spec in enumerate(specs)
                if number not in earlier
            }
            # Record each rollout as soon as it ends, so that a checkpoint taken meanwhile includes it.
            for number, rollout in running.items():
                rollout.add_done_callback(partial(self.record_result, number))
        played = tuple(earlier[n] if n in earlier else running[n].result() for n in range(size))
        return await rollouts.end_groups(tasks, BatchResult(played, notes))

    def record_result(self, number: int, rollout: "asyncio.Task[Trajectory]") -> None:
        """Record a rollout that has ended. A failed rollout is not kept, so a resumed run plays it again."""
        if not rollout.cancelled() and rollout.exception() is None and rollout.result().failure is None:
            self.finished_rollouts[number] = rollout.result()


GroupKey = tuple[int, Sequence[int]]
"""Group of rollouts: the policy step that it was started for, and the numbers of its rollouts in that step."""


class StepRollouts:
    """Rollouts of a step, one group per task.

    Numbers, ids and seeds are those that a single process would give.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Sequence[int],
        finished: Mapping[int, Trajectory] = MappingProxyType({}),
        preemptions: PreemptionStats = PreemptionStats(),  # noqa: B008
    ) -> None:
        """Group the rollouts by task.

        Args:
            tasks: one task per rollout.
            order: numbers of the rollouts; groups start in the order of their first rollout in it.
            finished: rollouts that ended earlier, by number.
            preemptions: preemption statistics of the engine at the start of the step.
        """
        self.tasks, self._finished_before, self.preemptions = tasks, finished, preemptions
        groups: dict[str, tuple[Task, list[int]]] = {}
        # The first loop fixes the order of the groups. The second one adds the rollouts in the order of the step.
        for number in order:
            groups.setdefault(tasks[number].id, (tasks[number], []))
        for number, task in enumerate(tasks):
            groups[task.id][1].append(number)
        self.group_indices = list(groups.values())
        """Task of each group, and the numbers of its rollouts in the step."""
        self.results: dict[int, BatchResult] = {}
        """Results of the groups that have ended, by index of the group."""
        self.is_closed = False
        """True once no further group will end: all have ended, or something failed."""

    def get_finished_before(self, numbers: Sequence[int]) -> Mapping[int, Trajectory]:
        """Return the rollouts of a group that ended earlier, by number in the group."""
        return {
            index: self._finished_before[number]
            for index, number in enumerate(numbers)
            if number in self._finished_before
        }

    @property
    def ended_rollouts(self) -> Mapping[int, Trajectory]:
        """Rollouts of groups that have ended as a whole, by number in the step.

        Failed ones are included. Group judges have already seen all of them.
        """
        results = list(self.results.items())  # a copy, because an event loop adds to it
        return {
            number: t
            for group, result in results
            for number, t in zip(self.group_indices[group][1], result.trajectories, strict=True)
        }

    def has_ended(self, numbers: Sequence[int]) -> bool:
        """Return True if a wait for these rollouts, numbered as in the step, is over.

        That is so once all of them have ended, or once no further group will end.
        """
        ended = self.ended_rollouts
        return self.is_closed or all(number in ended for number in numbers)

    @property
    def finished_rollouts(self) -> Mapping[int, Trajectory]:
        """Rollouts that ended without a failure, by number in the step, as they were before group judges."""
        ended = dict(self._finished_before)
        for number, result in list(self.results.items()):  # a copy, because the event loop adds to it
            ended |= dict(
                zip(self.group_indices[number][1], result.ungraded_trajectories or result.trajectories, strict=True)
            )
        return {number: t for number, t in ended.items() if t.failure is None}

    def merge_results(self, results: Sequence[BatchResult], sandbox: str) -> list[Trajectory]:
        """Return the rollouts of all groups in the order of the step. Raises the errors of `check_failures`."""
        # Sort by position in the step, so that the reported error does not depend on the start order.
        by_number = sorted(range(len(results)), key=lambda number: self.group_indices[number][1][0])
        check_failures(BatchResult.merge([results[number] for number in by_number]), sandbox)
        trajectories = {
            number: t
            for (_, numbers), result in zip(self.group_indices, results, strict=True)
            for number, t in zip(numbers, result.trajectories, strict=True)
        }
        return [trajectories[number] for number in range(len(self.tasks))]


def find_first_ended(groups: Sequence[GroupKey], step: Callable[[int], StepRollouts]) -> int | None:
    """Return the lowest index of a group that has ended, or None if none of these groups has ended.

    `step` is a function from a policy step to its `StepRollouts`.
    """
    return next((n for n, (policy_step, numbers) in enumerate(groups) if step(policy_step).has_ended(numbers)), None)


@dataclass(slots=True)
class BusyTimer:
    """Wall-clock timer that runs while at least one operation runs."""

    _started_s: float = 0.0
    _running: int = 0
    _earlier_s: float = 0.0

    def begin(self) -> None:
        """Count one more running operation."""
        if not self._running:
            self._started_s = time.perf_counter()
        self._running += 1

    def end(self) -> None:
        """Count one running operation fewer."""
        self._running -= 1
        if not self._running:
            self._earlier_s += time.perf_counter() - self._started_s

    @property
    def elapsed_s(self) -> float:
        """Time so far, seconds."""
        return self._earlier_s + (time.perf_counter() - self._started_s if self._running else 0.0)


async def sample_probe_line(rollouts: Rollouts, task: Task) -> Trajectory:
    """Sample the first line of the current policy on `task`, to check the engine's weights if no rollout allows that.

    No console runs the line, and it needs no concurrency slot.

    Raises:
        EngineError: as in the engine's session; the prompt fills the context.
    """
    engine, renderer = rollouts.engine, rollouts.renderer
    spec = RolloutSpec(
        f"{engine.policy_step}-{task.id}-probe", task, rollouts.build_prompt(task), 0, engine.policy_step
    )
    prompt, max_tokens = spec.prompt.token_ids, rollouts.limits.max_line_tokens
    # A nested session is admitted at once, however full the KV cache is.
    async with engine.session(prompt, Sampling(seed=spec.seed, nested=True)) as session:
        chunk = await session.sample((), max_tokens=max_tokens, stop_ids=renderer.stop_ids)
    record = EpisodeRecorder(spec)
    record.append_line(renderer.make_line(chunk, spec.prompt))
    return record.build_trajectory(Stop.FINISHED, 0.0, None, None)
