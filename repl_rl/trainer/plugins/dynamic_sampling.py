"""Dynamic sampling: groups without a difference in reward are replaced (DAPO, arXiv 2503.14476)."""

import json
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object

from repl_rl.credit.stop_policy import StopPolicy
from repl_rl.tasks import Curriculum
from repl_rl.trainer.collect_groups import GroupSampler
from repl_rl.trainer.config import DynamicSamplingOptions
from repl_rl.trainer.rollout_source import RolloutSource
from repl_rl.trajectory.trajectory import Trajectory

SPREAD = 1e-9
"""Largest difference between outcomes that count as equal; advantages of such a group are rounding errors."""
_MAX_DRAWS_PER_TASK = 8
"""Draws from a curriculum per wanted task, because it may draw tasks that the step has already."""


def has_zero_variance(outcomes: Sequence[float | None]) -> bool:
    """Return True if no two outcomes of a group differ. None means that a rollout is not trained on."""
    graded = [outcome for outcome in outcomes if outcome is not None]
    return not graded or max(graded) - min(graded) <= SPREAD


class _RolloutSummary(NamedTuple):
    """Facts of a rollout that all processes know."""

    task_id: str
    outcome: float | None
    """None means that the rollout is not trained on."""
    solved: bool


@dataclass(frozen=True, slots=True)
class _DiscardedRollouts:
    """Rollouts of a step that this process discarded."""

    rollouts: list[Trajectory] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    """Indices of replaced groups in the whole step. A group that was replaced twice is listed twice."""


class TaskPool:
    """Tasks of the run, from which replacements are drawn at random."""

    def __init__(self, task_ids: Sequence[str], seed: int = 0) -> None:
        self._task_ids = tuple(task_ids)
        self._rng = random.Random(f"{seed}/groups")

    def draw(self, count: int, used: Set[str]) -> list[str]:
        """Draw `count` tasks that are not in `used`, or fewer if tasks run out."""
        unused = [task_id for task_id in self._task_ids if task_id not in used]
        return self._rng.sample(unused, min(count, len(unused)))

    def state_dict(self) -> str:
        """Return the state of the random generator, as JSON."""
        return json.dumps(self._rng.getstate())

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        version, words, gauss = json.loads(memory)
        self._rng.setstate((version, tuple(words), gauss))


class DynamicGroupSampler(GroupSampler):
    """Group sampler that replaces groups without a difference in reward by groups of other tasks."""

    def __init__(
        self,
        source: RolloutSource,
        size: int,
        accelerator: Accelerator,
        options: DynamicSamplingOptions,
        tasks: TaskPool,
        curriculum: Curriculum | None = None,
        stops: StopPolicy | None = None,
    ) -> None:
        """Set up groups of `size` rollouts; other arguments are as in `GroupSampler`.

        Args:
            source: rollout source.
            size: rollouts per group.
            accelerator: accelerator of this process.
            options: limit of the rounds.
            tasks: tasks of the replacements, without a curriculum.
            curriculum: chooses the tasks, those of replacements included.
            stops: masks or penalises rollouts by their stop, before the outcomes of a group are compared.
        """
        super().__init__(source, size, accelerator, curriculum)
        self._options = options
        self._tasks = tasks
        self._stops = stops or StopPolicy()

    def state_dict(self) -> str:
        """Return the state of the random generator that draws other tasks, as JSON."""
        return self._tasks.state_dict()

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        self._tasks.load_state_dict(memory)

    def collect(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """Return this process's rollouts of a step; see `GroupSampler.collect`."""
        rollouts = self._collect_checked(self._choose_tasks(slots), step)
        return self._resample_zero_variance(rollouts, self._options.max_rounds, step)

    def _resample_zero_variance(self, rollouts: list[Trajectory], max_rounds: int, step: int) -> tuple[Trajectory, ...]:
        """Replace groups without a difference in reward, in at most `max_rounds` rounds, and return all rollouts."""
        discarded = _DiscardedRollouts()
        # A group may span two processes, so each process gathers the facts of all rollouts.
        summaries: list[_RolloutSummary] = gather_object([self._summarize(t) for t in rollouts])
        used_tasks, all_summaries = {summary.task_id for summary in summaries}, list(summaries)
        first_index = self._accelerator.process_index * len(rollouts)
        for _ in range(max_rounds):
            # Choose another task for each such group; if tasks run out, the rest of the groups stay.
            groups = [summaries[start : start + self._size] for start in range(0, len(summaries), self._size)]
            zero_variance = [
                n for n, group in enumerate(groups) if has_zero_variance([summary.outcome for summary in group])
            ]
            replacements = dict(
                zip(zero_variance, self._draw_unused_tasks(len(zero_variance), used_tasks), strict=False)
            )
            if not replacements:
                break
            if self._curriculum is not None:
                # The trainer records only rollouts that it trains on, so discarded ones are recorded here.
                discarded_summaries = [
                    summary for n in replacements for summary in groups[n] if summary.outcome is not None
                ]
                self._curriculum.record((summary.task_id, float(summary.solved)) for summary in discarded_summaries)
            # Replace this process's part of those groups.
            used_tasks |= set(replacements.values())
            local = [i for i in range(len(rollouts)) if (first_index + i) // self._size in replacements]
            resampled = self._collect_checked([replacements[(first_index + i) // self._size] for i in local], step)
            for i, trajectory in zip(local, resampled, strict=True):
                discarded.rollouts.append(rollouts[i])
                rollouts[i] = trajectory
            discarded.groups.extend(replacements)
            # Gather again, for the next round and for metrics over all rollouts that were played.
            summaries = gather_object([self._summarize(t) for t in rollouts])
            all_summaries += [
                summary for n in replacements for summary in summaries[n * self._size : (n + 1) * self._size]
            ]
        # The solve rate counts discarded rollouts too, so that the choice of groups does not change it.
        solved = [summary.solved for summary in all_summaries if summary.outcome is not None]
        tokens = sum(len(t.completion_ids) for t in discarded.rollouts)
        counts: list[tuple[int, int]] = gather_object([(len(discarded.rollouts), tokens)])
        self.metrics = {
            "groups_refilled": float(len(discarded.groups)),
            "rollouts_cut": float(sum(count for count, _ in counts)),
            "tokens_cut": float(sum(count for _, count in counts)),
            "solve_rate_played": sum(solved) / max(len(solved), 1),
        }
        return tuple(rollouts)

    def _summarize(self, trajectory: Trajectory) -> _RolloutSummary:
        """Return the outcome after the stop policy, as the trainer will see it."""
        trained = self._stops.apply(trajectory)
        return _RolloutSummary(trajectory.task_id, trained.outcome if trained.trainable else None, trajectory.solved)

    def _draw_unused_tasks(self, count: int, used: Set[str]) -> list[str]:
        """Draw `count` tasks that this step has not used, or fewer if tasks run out."""
        # Without a curriculum, any unused task may be drawn; a curriculum may repeat itself, so tries are limited.
        if self._curriculum is None:
            return self._tasks.draw(count, used)
        drawn: list[str] = []
        for _ in range(_MAX_DRAWS_PER_TASK * count):
            if len(drawn) == count:
                break
            (task,) = self._curriculum.draw(1)
            if task.id not in used and task.id not in drawn:
                drawn.append(task.id)
        return drawn
