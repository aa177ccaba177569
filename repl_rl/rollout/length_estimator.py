"""Start order of rollouts: the longest first, so that none of them runs alone at the end."""

import json
from collections.abc import Sequence
from dataclasses import replace

from repl_rl.rollout.concurrent_rollouts import Rollouts
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory

_NEWEST_WEIGHT = 0.2
"""Weight of the newest rollout in the mean of its family."""


class LengthEstimator:
    """Mean token count of the rollouts of each task family, for the start order. No trajectory depends on it."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def update(self, task: Task, trajectory: Trajectory) -> None:
        """Include one finished rollout."""
        tokens = len(trajectory.completion_ids)
        mean = self._mean.get(task.family, tokens)
        self._mean[task.family] = mean + _NEWEST_WEIGHT * (tokens - mean)

    def update_all(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> None:
        """Include finished rollouts, given one task each."""
        for task, trajectory in zip(tasks, trajectories, strict=True):
            self.update(task, trajectory)

    def state_dict(self) -> str:
        """Return the means as JSON."""
        return json.dumps(self._mean)

    def load_state_dict(self, memory: str) -> None:
        """Restore the state that `state_dict` returned."""
        self._mean = dict(json.loads(memory))

    def sort_longest_first(self, tasks: Sequence[Task]) -> list[int]:
        """Return the indices of `tasks`, those of the longest rollouts first.

        Unknown families come first, and rollouts of one task stay together.
        """
        expected = [self._mean.get(task.family, float("inf")) for task in tasks]
        first: dict[str, int] = {}
        for index, task in enumerate(tasks):
            first.setdefault(task.id, index)
        # Ties keep the order of the tasks, so that the start order is deterministic.
        return sorted(range(len(tasks)), key=lambda index: (-expected[index], first[tasks[index].id], index))

    async def collect_longest_first(
        self, rollouts: Rollouts, tasks: Sequence[Task], temperature: float = 1.0
    ) -> list[Trajectory]:
        """Do as `Rollouts.collect`, but start the longest rollouts first, and update the estimates."""
        specs = rollouts.make_specs(tasks, temperature, rollouts.engine.policy_step)
        order = self.sort_longest_first(tasks)
        batch = await rollouts.run_batch([specs[index] for index in order], temperature)
        by_index = dict(zip(order, batch.trajectories, strict=True))
        trajectories = tuple(by_index[index] for index in range(len(tasks)))
        self.update_all(tasks, trajectories)
        return await rollouts.finish_batch(tasks, replace(batch, trajectories=trajectories))
