"""What plays the rollouts of a run: this process, or nodes elsewhere. Whoever trains or evaluates knows no more."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.thread import Alter
from repl_rl.tasks import Task


class Fleet(Protocol):
    """An open world, or several of them that hold the same weights. It is the trainer's `RolloutSource`.

    Where rollouts are played decides nothing about them: ids, seeds and, with an engine that seeds its sessions,
    trajectories are the same.
    """

    @property
    def tasks(self) -> Mapping[str, Task]:
        """Those that are trained on, by id."""

    @property
    def facts(self) -> Facts:
        """What was opened."""

    @property
    def figures(self) -> Figures:
        """Of all rollouts since the run began."""

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that the policy never samples."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """One trajectory a task id, in order; an id repeated is a group."""

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: Alter | None = None
    ) -> Sequence[Trajectory]:
        """One trajectory a task, at `temperature` (0: greedy), beside training: `metrics` tells nothing of them.

        `alter` makes the rollouts that play them of those that are open; None: those of training.
        """

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """A step's figures beside those of its records."""

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Give every engine the weights in `folder`, which stays as it is until the next call."""

    def memory(self) -> str:
        """What is kept from one step to the next, figures alone, as JSON."""

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
