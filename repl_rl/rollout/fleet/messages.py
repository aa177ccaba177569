"""Messages between a worker and its owner, and the interfaces `Node` and `Cluster`."""

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
    """Everything that a worker needs to open rollouts as the owner's process would."""

    opener: bytes
    """Pickled function that opens rollouts, given the worker's number.

    The worker unpickles it after it has applied `folder` and `path`.
    """
    number: int
    """Number of the worker, >= 0. An engine that does not seed its sessions has one random stream per number."""
    folder: str
    """Working directory of the owner."""
    path: tuple[str, ...]
    """Module search path of the owner."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task, played together."""

    task: Task
    size: int
    temperature: float
    policy_step: int
    """Step of the policy that learns from them; it is part of their ids and seeds."""
    alter: Alter | None = None
    begin: int | None = None
    """Policy step of the oldest weights with which prefetched rollouts may start.

    Newer weights may follow between their lines. None means that they are sampled with the weights of `policy_step`
    alone.
    """
    finished: Mapping[int, Trajectory] = field(default_factory=dict)
    """Rollouts that ended before, by number in the group; they are not played again."""
    look: bool = False
    """True for a probe: one line is sampled, and no console runs it."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that every engine must have."""

    folder: str
    """Folder on the owner's machine."""
    policy_step: int
    checksum: str
    """Checksum of their files."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat: state of a live worker."""

    pid: int = 0
    behind_s: float = 0.0
    """Delay of the worker's event loop, seconds."""
    policy_step: int = 0
    rollouts: int = 0
    """Number of running rollouts."""
    played: int = 0
    """Number of rollouts played so far."""
    tokens: int = 0
    """Number of tokens sampled so far, by rollouts that have ended."""
    figures: Figures = field(default_factory=Figures)
    log: tuple[str, ...] = ()
    """Log lines since the last heartbeat."""


class Node(Protocol):
    """Worker as its owner sees it. Every call of a worker that is gone raises NodeLost."""

    async def open(self, setting: Setting) -> Facts:
        """Open engine, consoles and sampler. Their errors are raised unchanged."""

    async def load(self, weights: Weights, files: object | None) -> str | None:
        """Load weights into the engine, and return the checksum of the loaded files.

        Args:
            weights: weights to load.
            files: result of `Cluster.publish`; None means the folder of the weights.

        Returns:
            The checksum, or None if the worker cannot read the folder.
        """

    async def play(self, group: Group) -> Part:
        """Play the rollouts of a group, judges included."""

    async def beat(self) -> Beat:
        """Return a heartbeat. A busy worker answers too."""

    async def close(self) -> None:
        """Close engine, consoles and sampler."""

    def kill(self) -> None:
        """Kill the worker at once. A worker that is gone is ignored."""


class Cluster(Protocol):
    """Machines on which workers can run."""

    @property
    def name(self) -> str:
        """Name for messages."""

    async def seats(self) -> Sequence[str]:
        """Return the present slots for workers, used or not, in the order in which to use them."""

    async def start(self, seat: str) -> Node:
        """Start a worker in a slot, without opening it. Raises NodeLost if that is not possible."""

    async def publish(self, files: Mapping[str, bytes]) -> object:
        """Make files available to every machine, once. They are released together with the returned value.

        Raises:
            BrokenDown: the cluster has no room for them.
            NodeLost: the cluster cannot be reached.
        """
