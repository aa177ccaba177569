"""Group sampling: the rollouts of each step, and dynamic sampling of groups without a difference in reward."""

import json
import random
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object

from repl_rl.credit.stop_policy import StopPolicy
from repl_rl.tasks import Curriculum, assign_tasks
from repl_rl.trainer.config import DynamicSamplingOptions, GroupSamplingOptions
from repl_rl.trainer.rollout_source import RolloutSource, validate_rollouts
from repl_rl.trajectory.trajectory import Trajectory

SPREAD = 1e-9
"""Largest difference between outcomes that count as equal; advantages of such a group are rounding errors."""
_TRIES = 8
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
    """Groups of the whole step that were replaced, once per replacement."""


class GroupSampler:
    """Group sampler: collects the rollouts of a step as whole groups, on any number of processes.

    The rollouts of all processes form one list, process by process, and a group may span two processes. Every process
    decides and draws for the whole step from the same data, so all processes agree.
    """

    def __init__(
        self,
        source: RolloutSource,
        task_ids: Sequence[str],
        size: int,
        accelerator: Accelerator,
        plan: GroupSamplingOptions | None = None,
        curriculum: Curriculum | None = None,
        stops: StopPolicy | None = None,
        seed: int = 0,
    ) -> None:
        """Set up groups of `size` rollouts. Without a `plan`, each group is sampled once and waited for."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step over all processes, by their names in `metrics.jsonl`; empty without
        `DynamicSamplingOptions`."""
        self._source = source
        self._task_ids = tuple(task_ids)
        self._size = size
        self._accelerator = accelerator
        self._plan = plan
        self._curriculum = curriculum
        self._stops = stops or StopPolicy()
        self._rng = random.Random(f"{seed}/groups")

    def state_dict(self) -> str:
        """Return the state of the random generator that draws other tasks, as JSON."""
        return json.dumps(self._rng.getstate())

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        version, words, gauss = json.loads(memory)
        self._rng.setstate((version, tuple(words), gauss))

    @property
    def max_staleness(self) -> int:
        """Largest staleness of a line that is trained on, in steps; 0, since all rollouts are fresh."""
        return 0

    def collect(self, slots: Sequence[str], step: int) -> tuple[Trajectory, ...]:
        """Return this process's rollouts of a step, one per task id in `slots`; a curriculum may replace the tasks.

        Raises:
            InvariantError, WeightSyncError: the rollout source breaks its contract.
        """
        if self._curriculum is not None:
            place = self._accelerator.process_index, self._accelerator.num_processes
            slots = assign_tasks(self._curriculum, slots, self._size, *place)
        played = self._collect_checked(slots, step)
        return (
            self._resample_zero_variance(played, self._plan.max_rounds, step)
            if isinstance(self._plan, DynamicSamplingOptions)
            else tuple(played)
        )

    def _collect_checked(self, task_ids: Sequence[str], step: int) -> list[Trajectory]:
        """Collect rollouts from the source, and check their tasks and policy steps."""
        # With several processes, `collect` is a joint call, even for a process that needs no rollouts.
        joins = task_ids or self._accelerator.num_processes > 1
        played = list(self._source.collect(task_ids, step)) if joins else []
        validate_rollouts(played, task_ids, step)
        return played

    def _resample_zero_variance(self, played: list[Trajectory], most: int, step: int) -> tuple[Trajectory, ...]:
        """Replace groups without a difference in reward, in at most `most` rounds, and return all rollouts."""
        discarded = _DiscardedRollouts()
        # A group may span two processes, so each process gathers the facts of all rollouts.
        summaries: list[_RolloutSummary] = gather_object([self._summarize(t) for t in played])
        used, seen = {one.task_id for one in summaries}, list(summaries)
        first = self._accelerator.process_index * len(played)
        for _ in range(most):
            # Choose another task for each such group; if tasks run out, the rest of the groups stay.
            groups = [summaries[at : at + self._size] for at in range(0, len(summaries), self._size)]
            dull = [n for n, group in enumerate(groups) if has_zero_variance([one.outcome for one in group])]
            others = dict(zip(dull, self._draw_unused_tasks(len(dull), used), strict=False))
            if not others:
                break
            if self._curriculum is not None:
                # The trainer records only rollouts that it trains on, so discarded ones are recorded here.
                dropped = [one for n in others for one in groups[n] if one.outcome is not None]
                self._curriculum.record((one.task_id, float(one.solved)) for one in dropped)
            # Replace this process's part of those groups.
            used |= set(others.values())
            mine = [i for i in range(len(played)) if (first + i) // self._size in others]
            again = self._collect_checked([others[(first + i) // self._size] for i in mine], step)
            for i, trajectory in zip(mine, again, strict=True):
                discarded.rollouts.append(played[i])
                played[i] = trajectory
            discarded.groups.extend(others)
            # Gather again, for the next round and for metrics over all rollouts that were played.
            summaries = gather_object([self._summarize(t) for t in played])
            seen += [one for n in others for one in summaries[n * self._size : (n + 1) * self._size]]
        # The solve rate counts discarded rollouts too, so that the choice of groups does not change it.
        graded = [one.solved for one in seen if one.outcome is not None]
        tokens = sum(len(t.completion_ids) for t in discarded.rollouts)
        counts: list[tuple[int, int]] = gather_object([(len(discarded.rollouts), tokens)])
        self.metrics = {
            "groups_refilled": float(len(discarded.groups)),
            "rollouts_cut": float(sum(count for count, _ in counts)),
            "tokens_cut": float(sum(count for _, count in counts)),
            "solve_rate_played": sum(graded) / max(len(graded), 1),
        }
        return tuple(played)

    def _summarize(self, trajectory: Trajectory) -> _RolloutSummary:
        """Return the outcome after the stop policy, as the trainer will see it."""
        learned = self._stops.apply(trajectory)
        return _RolloutSummary(trajectory.task_id, learned.outcome if learned.trainable else None, trajectory.solved)

    def _draw_unused_tasks(self, count: int, used: Set[str]) -> list[str]:
        """Draw `count` tasks that this step has not used, or fewer if tasks run out."""
        # Without a curriculum, any unused task may be drawn; a curriculum may repeat itself, so tries are limited.
        if self._curriculum is None:
            left = [task_id for task_id in self._task_ids if task_id not in used]
            return self._rng.sample(left, min(count, len(left)))
        found: list[str] = []
        for _ in range(_TRIES * count):
            if len(found) == count:
                break
            (task,) = self._curriculum.draw(1)
            if task.id not in used and task.id not in found:
                found.append(task.id)
        return found
