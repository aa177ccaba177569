"""Interfaces of rollout sources, and the record of a step.

`RolloutSource` is required. The other protocols are optional abilities of a source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from repl_rl.credit.credited_trajectory import LineCredit
from repl_rl.trajectory.trajectory import Trajectory


class RolloutSource(Protocol):
    """Source of rollouts. It samples from its own copy of the policy, which `load_weights` replaces."""

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that are never sampled; the trainer gives them probability 0 too. Empty if all ids may be sampled."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """Return one finished trajectory per entry of `task_ids`, in that order; a repeated id is a group.

        All processes of a training call this at the same time, and a process may request none.

        `policy_step` is the number of optimizer steps applied to the policy to sample from. Each trajectory records it.
        """

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Replace the policy by the checkpoint in `folder`.

        The folder stays unchanged until the next call, because a restarted engine loads it again.
        """


@runtime_checkable
class HasMetrics(Protocol):
    """Source with additional metrics of a step's rollouts, such as those of a sampler."""

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return values by name, for `metrics.jsonl` and the trackers."""


@runtime_checkable
class HasTasks(Protocol):
    """Source that provides its tasks, for reward functions that take a task."""

    @property
    def tasks(self) -> Mapping[str, object]:
        """Tasks by id."""


@runtime_checkable
class AsyncRolloutSource(RolloutSource, Protocol):
    """Source of async rollouts: it plays later steps while the policy is updated, as `max_staleness_steps` requires.

    `load_weights` is then called while rollouts run. Calls of the engine end first, and each line records the weights
    that sampled it.
    """

    def start_rollouts(self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory]) -> None:
        """Start the rollouts that `collect` returns at `policy_step`, without waiting for them.

        `finished` holds the rollouts that a resumed run has already finished, by their number in the step.
        """

    def get_finished_rollouts(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step that have ended without a failure, by their number in it."""

    def sample_probe_lines(self, task_id: str) -> Sequence[Trajectory]:
        """Return a line on a task from the current weights, one per engine (>= 1); no line is trained on."""

    @property
    def rollout_busy_s(self) -> float:
        """Wall clock seconds in which async rollouts were in flight."""


@runtime_checkable
class WindowedRolloutSource(AsyncRolloutSource, Protocol):
    """Source that reports which groups of later steps have ended, as `group_sampling = "fifo_window"` requires."""

    def wait_for_first_group(self, groups: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Wait until one of these groups has ended, and return the index of the first of them that has ended.

        A group is a pair: the policy step that it was started for, and the numbers of its rollouts in that step. An
        error that ends all rollouts of a step ends its groups too; `collect` then raises it.
        """

    def get_ended_groups(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Return the rollouts of a later step whose groups have ended, as `collect` returns them, by their number."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of one step with all its updates, for people and files; training never reads it."""

    step: int
    """Number of steps done, counted from 1."""
    metrics: dict[str, float]
    """Metrics by their names in `metrics.jsonl`; names of seconds end in `_s`, log probability gaps are nats."""
    credit: tuple[tuple[LineCredit, ...], ...] = ()
    """Credit of each line, one entry per trajectory; empty for a trajectory that is not trained on."""


OnStep = Callable[[StepRecord, Sequence[Trajectory]], None]
"""Callback after each step, on the main process, with the record and the trajectories of all processes."""
