"""One fleet of workers for several training processes: the first process owns it and hands out the rollouts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from repl_rl.errors import InvariantError
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.again import Broken
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.fleet.source import NodeFleet
from repl_rl.rollout.lengths import Lengths
from repl_rl.rollout.thread import Alter
from repl_rl.tasks import Task

_ELSEWHERE = "in the first process"
Play = Callable[[Sequence[str]], Sequence[Trajectory]]


def exchanged(task_ids: Sequence[str], play: Play) -> list[Trajectory]:
    """Return one trajectory per entry of `task_ids`; the first process plays for all, and all call this together.

    Args:
        task_ids: task ids of this process; may be empty.
        play: called in the first process with the ids of all processes in order; groups across two processes are whole.
    """
    asked: list[Sequence[str]] = gather_object([list(task_ids)])
    # The first process plays; each process takes its part of all trajectories.
    me = PartialState()
    everything = play([id for part in asked for id in part]) if me.is_main_process else None
    (played,) = broadcast_object_list([everything])
    first = sum(len(part) for part in asked[: me.process_index])
    return list(played[first : first + len(task_ids)])


class LeadingFleet(NodeFleet):
    """Fleet in the process that owns it; only `collect` is called together with the other processes."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `Fleet.collect`."""
        return exchanged(task_ids, lambda everyone: super(LeadingFleet, self).collect(everyone, policy_step))


class FollowingFleet:
    """Context manager: the same fleet in another process, which starts no worker. It satisfies `Fleet`."""

    figures = Figures()
    """Empty figures, because the first process reports for all."""

    def __init__(self, forbidden_ids: frozenset[int], tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self.facts = Facts(_ELSEWHERE, None, _ELSEWHERE, None, forbidden_ids)
        """Facts without engine and sandbox, because this process opens neither."""

    def __enter__(self) -> "FollowingFleet":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    @property
    def forbidden_ids(self) -> frozenset[int]:
        """See `Fleet.forbidden_ids`."""
        return self.facts.forbidden_ids

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `Fleet.collect`."""
        return exchanged(task_ids, _never)

    def sample(
        self, tasks: Sequence[Task], temperature: float = 1.0, alter: Alter | None = None
    ) -> Sequence[Trajectory]:
        """Raise InvariantError, because only the first process evaluates."""
        raise InvariantError("only the first process samples beside training")

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return no metrics; see `figures`."""
        return {}

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """Do nothing, because the first process sends the weights to every worker before it plays."""

    def memory(self) -> str:
        """Return the state of a fleet that has played nothing, as JSON."""
        # A run that resumes with other processes can restore any fleet from it.
        return json.dumps({"lengths": Lengths().memory(), "broken": asdict(Broken())})

    def remember(self, memory: str) -> None:
        """Do nothing; see `memory`."""


def _never(task_ids: Sequence[str]) -> Sequence[Trajectory]:
    raise InvariantError("only the first process plays")
