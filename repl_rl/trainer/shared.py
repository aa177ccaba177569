"""One fleet for several processes that train together: the first one owns it, and all learn from what it plays."""

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
    """A trajectory for each of `task_ids`, of those that the first process plays for all. All processes call this.

    Args:
        task_ids: of this process; they may be none.
        play: called in the first process, with those of all, process by process: a group that straddles two is whole.
    """
    asked: list[Sequence[str]] = gather_object([list(task_ids)])
    me = PartialState()
    everything = play([id for part in asked for id in part]) if me.is_main_process else None
    (played,) = broadcast_object_list([everything])
    first = sum(len(part) for part in asked[: me.process_index])
    return list(played[first : first + len(task_ids)])


class LeadingFleet(NodeFleet):
    """The fleet in the process that owns it. Only `collect` is called together with the others."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        """See `Fleet.collect`."""
        return exchanged(task_ids, lambda everyone: super(LeadingFleet, self).collect(everyone, policy_step))


class FollowingFleet:
    """Context manager: the same fleet in another process, which starts nothing. It satisfies `Fleet`."""

    figures = Figures()
    """None: the first process tells of all."""

    def __init__(self, forbidden_ids: frozenset[int], tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self.facts = Facts(_ELSEWHERE, None, _ELSEWHERE, None, forbidden_ids)
        """Of what is open in this process, which is nothing."""

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
        """Raises InvariantError: the first process alone evaluates."""
        raise InvariantError("only the first process samples beside training")

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """None: see `figures`."""
        return {}

    def load_weights(self, folder: Path, policy_step: int) -> None:
        """The first process gives them to every node before it plays."""

    def memory(self) -> str:
        """As of a fleet that has played nothing: whoever goes on in other processes can read it."""
        return json.dumps({"lengths": Lengths().memory(), "broken": asdict(Broken())})

    def remember(self, memory: str) -> None:
        """Nothing: see `memory`."""


def _never(task_ids: Sequence[str]) -> Sequence[Trajectory]:
    raise InvariantError("only the first process plays")
