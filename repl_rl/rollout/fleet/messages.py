"""What a node and its owner say to each other, and the two seams between them: a node, and where nodes can be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts, Figures
from repl_rl.rollout.thread import Alter
from repl_rl.tasks import Task


@dataclass(frozen=True, slots=True)
class Setting:
    """How a node opens the world as the owner's process would."""

    opener: bytes
    """Pickled: called with the node's number, it opens rollouts. It is read once `folder` and `path` are taken over."""
    number: int
    """Of the node, >= 0: an engine that does not seed its sessions draws from a stream of its own."""
    folder: str
    """Where the owner works."""
    path: tuple[str, ...]
    """Where the owner finds modules."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task, played together."""

    task: Task
    size: int
    temperature: float
    policy_step: int
    """Of the policy that learns from them: part of their ids and seeds."""
    alter: Alter | None = None
    begin: int | None = None
    """Policy step of the weights that they begin with, or newer ones: they are of a step to come, and others may come
    between their lines. None: they are sampled from those of `policy_step`, and no others."""
    finished: Mapping[int, Trajectory] = field(default_factory=dict)
    """Those that have ended before, by their number; they are not played again."""
    look: bool = False
    """One line is written for somebody to look at, and no console runs it."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What every engine of a fleet has to have."""

    folder: str
    """Where they are on the owner's machine."""
    policy_step: int
    checksum: str
    """Of their files."""


@dataclass(frozen=True, slots=True)
class Beat:
    """That a node is alive, and what it does."""

    pid: int = 0
    behind_s: float = 0.0
    """How long its event loop has not turned."""
    policy_step: int = 0
    rollouts: int = 0
    """Under way."""
    played: int = 0
    """Rollouts so far."""
    tokens: int = 0
    """Sampled so far, of rollouts that have ended."""
    figures: Figures = field(default_factory=Figures)
    log: tuple[str, ...] = ()
    """Lines since the last beat."""


class Node(Protocol):
    """A node as its owner sees it. Whatever is asked of one that is gone raises NodeLost."""

    async def open(self, setting: Setting) -> Facts:
        """Open the world. Raises what that raises."""

    async def load(self, weights: Weights, files: object | None) -> str | None:
        """Give its engine weights, and return the checksum of what it was given.

        Args:
            weights: which.
            files: what `Cluster.publish` returned; None: take them from their folder. Returns None if it is not there.
        """

    async def play(self, group: Group) -> Part:
        """A group's rollouts, from their beginning to their judges."""

    async def beat(self) -> Beat:
        """It is answered whatever else the node does."""

    async def close(self) -> None:
        """Close the world."""

    def kill(self) -> None:
        """End it now, whatever it does; of one that is gone nothing is expected."""


class Cluster(Protocol):
    """Where nodes can be."""

    @property
    def name(self) -> str:
        """For messages."""

    async def seats(self) -> Sequence[str]:
        """Places for a node that are there now, taken or not, in the order in which they are to be taken."""

    async def start(self, seat: str) -> Node:
        """A node in that place, whose world is not open yet. Raises NodeLost where it cannot be had."""

    async def publish(self, files: Mapping[str, bytes]) -> object:
        """Have files where every machine can fetch them, once; they are gone with the returned value.

        Raises:
            BrokenDown: there is no room for them.
            NodeLost: the cluster cannot be reached.
        """
