"""Order in which rollouts start: the longest ones first, so that none of them runs alone at the end."""

import json
from collections.abc import Sequence

from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Task

_NEWEST = 0.2
"""Weight of the newest rollout in the mean of its family."""


class Lengths:
    """Mean token count of the rollouts of each task family. No trajectory depends on it."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def learn(self, task: Task, trajectory: Trajectory) -> None:
        """Include one finished rollout."""
        taken = len(trajectory.completion_ids)
        before = self._mean.get(task.family, taken)
        self._mean[task.family] = before + _NEWEST * (taken - before)

    def memory(self) -> str:
        """Return the means as JSON."""
        return json.dumps(self._mean)

    def remember(self, memory: str) -> None:
        """Restore the state that `memory` returned."""
        self._mean = dict(json.loads(memory))

    def longest_first(self, tasks: Sequence[Task]) -> list[int]:
        """Return the indices of `tasks`, those of the longest rollouts first.

        Unknown families come first, and rollouts of one task stay together.
        """
        expected = [self._mean.get(task.family, float("inf")) for task in tasks]
        first: dict[str, int] = {}
        for index, task in enumerate(tasks):
            first.setdefault(task.id, index)
        # Ties keep the order of the tasks, so that the start order is deterministic.
        return sorted(range(len(tasks)), key=lambda index: (-expected[index], first[tasks[index].id], index))
