"""In which order rollouts get a place: those that will take longest first, so that none is left alone at the end."""

import json
from collections.abc import Sequence

from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Task

_NEWEST = 0.2
"""Weight of the newest rollout in the mean of its kind."""


class Lengths:
    """Remembers how many tokens rollouts of each family of tasks took. Figures only: no record depends on them."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def learn(self, task: Task, trajectory: Trajectory) -> None:
        """Take one finished rollout into account."""
        taken = len(trajectory.completion_ids)
        before = self._mean.get(task.family, taken)
        self._mean[task.family] = before + _NEWEST * (taken - before)

    def memory(self) -> str:
        """What it remembers, as JSON."""
        return json.dumps(self._mean)

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        self._mean = dict(json.loads(memory))

    def longest_first(self, tasks: Sequence[Task]) -> list[int]:
        """Indices of `tasks`; families that nobody has seen come first, rollouts of one task stay together."""
        expected = [self._mean.get(task.family, float("inf")) for task in tasks]
        first: dict[str, int] = {}
        for index, task in enumerate(tasks):
            first.setdefault(task.id, index)
        return sorted(range(len(tasks)), key=lambda index: (-expected[index], first[tasks[index].id], index))
