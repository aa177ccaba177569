"""Interface through which trainer and evaluation get rollouts, from this process or from workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.thread import Alter
from repl_rl.tasks import Task


class Fleet(Protocol):
    """Source of rollouts: one process, or several workers with the same weights. It is the trainer's `RolloutSource`.

    The process that plays a rollout does not affect its id and its seed. The trajectory is the same too, if the engine
    seeds its sessions.
    """

    @property
    def tasks(self) -> Mapping[str, Task]:
        """Training tasks by id."""

    @property
    def facts(self) -> Facts:
        """Runtime information of the opened engine, sandbox and sampler."""

    @property
    def figures(self) -> Figures:
        """Statistics of all rollouts since the run began."""

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that the policy never samples."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """Return one trajectory per task id, in order; a repeated id is a group."""

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: Alter | None = None
    ) -> Sequence[Trajectory]:
        """Return one trajectory per task, at `temperature` (0 is greedy), outside training. `metrics` ignores them.

        `alter` derives the rollouts that play them from those that are open; None means those of training.
        """

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return the metrics of a step, in addition to those of its records."""

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Load the weights in `folder` into every engine. The folder stays unchanged until the next call."""

    def memory(self) -> str:
        """Return the state that is kept between steps, statistics only, as JSON."""

    def remember(self, memory: str) -> None:
        """Restore the state that `memory` returned."""
