"""Where rollouts come from, and what is told of a step that was made of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from repl_rl.credit.credited import LineCredit
from repl_rl.errors import InvariantError, WeightSyncError
from repl_rl.record.trajectory import Trajectory


class RolloutSource(Protocol):
    """Plays rollouts with its own copy of the policy."""

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """Ids that it never samples; the trainer gives them probability 0 as well. Empty: it samples any."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """One finished trajectory for each entry of `task_ids`, in that order; an id repeated is a group.

        Among several processes every one calls this at the same time, and may ask for none.

        `policy_step` is the number of optimizer steps behind the policy to sample from; each trajectory carries it.
        """

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Replace the policy by the checkpoint in `folder`, which stays as it is until the next call: an engine that
        dies is opened again with it."""


@runtime_checkable
class Counting(Protocol):
    """A source that has figures of its own about a step's rollouts, such as a sampler's."""

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Name to value, for `metrics.jsonl` and the sinks."""


@runtime_checkable
class Tasked(Protocol):
    """A source that knows its tasks, for reward functions that ask for them."""

    @property
    def tasks(self) -> Mapping[str, object]:
        """By id."""


@runtime_checkable
class AheadSource(RolloutSource, Protocol):
    """One that plays rollouts of later steps while the policy is updated: what `ahead` needs.

    `load_weights` is then called while rollouts are under way: calls of the engine end first, and each line names the
    weights that wrote it.
    """

    def begin(self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory]) -> None:
        """Begin the rollouts that `collect` is asked for at `policy_step`, and return at once. `finished` are those
        that a run which is gone on with has played, by their number."""

    def finished(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Those of a step to come that have ended well, by their number in it."""

    def probe(self, task_id: str) -> Sequence[Trajectory]:
        """A line that the policy of now writes on a task, for nobody to learn from: one of each engine (>= 1)."""

    @property
    def busy_s(self) -> float:
        """How long rollouts that were begun were under way, wall clock."""


@runtime_checkable
class WindowedSource(AheadSource, Protocol):
    """One that tells which groups of later steps have ended: what `groups = "window"` needs."""

    def first(self, groups: Sequence[tuple[int, Sequence[int]]]) -> int:
        """Wait until one of these groups has ended, and return the number of the first one that has.

        A group is the policy step that it was begun for, and the numbers of its rollouts in that step. It has ended,
        too, where something failed under all rollouts of that step: `collect` then raises it.
        """

    def ended(self, policy_step: int) -> Mapping[int, Trajectory]:
        """Those of a step to come whose groups have ended, as `collect` will give them, by their number in it."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did, with all its updates. For people and files: nothing in training reads it."""

    step: int
    """Steps done, counted from 1."""
    metrics: dict[str, float]
    """Names as in `metrics.jsonl`; seconds end in `_s`, log probability gaps are nats."""
    credit: tuple[tuple[LineCredit, ...], ...] = ()
    """What each line was worth, an entry a trajectory; empty for one that nothing is learned from."""


OnStep = Callable[[StepRecord, Sequence[Trajectory]], None]
"""Called after each step, on the main process, with its record and the trajectories of all processes."""


def check_rollouts(trajectories: Sequence[Trajectory], task_ids: Sequence[str], step: int) -> None:
    """Hold a rollout source to its contract.

    Raises:
        InvariantError: other tasks than asked for.
        WeightSyncError: a rollout of another policy step.
    """
    got = [t.task_id for t in trajectories]
    if got != list(task_ids):
        raise InvariantError(f"the rollout source gave tasks {got} for {list(task_ids)}; give one rollout an entry")
    for t in trajectories:
        if t.policy_step != step:
            raise WeightSyncError(
                f"rollout {t.id} is for policy step {t.policy_step} while the trainer is at {step}; the "
                "rollout source did not take the last weights"
            )
