"""Workers as actors of a Ray cluster. The owner places, starts and ends every actor itself, and notices its loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from typing import NamedTuple

from repl_rl.errors import NodeLost
from repl_rl.machine.actors import Actor, Machine, answer, end, machines, published, start
from repl_rl.machine.cluster import connected, refuse_shared
from repl_rl.machine.own_machines import Machines
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.messages import Beat, Group, Setting, Weights
from repl_rl.rollout.fleet.node import RolloutNode

_BEATS = "beats"
"""Concurrency group of heartbeats, which a separate thread answers."""


class RayNode:
    """Ray actor as its owner sees it. It implements `Node`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.killed = False

    async def open(self, setting: Setting) -> Facts:
        """See `Node.open`."""
        facts: Facts = await answer(self._actor.open.remote(setting), NodeLost)
        return facts

    async def load(self, weights: Weights, files: object | None) -> str | None:
        """See `Node.load`. Ray fetches published files once per machine."""
        arrived: str | None = await answer(self._actor.load.remote(weights, files), NodeLost)
        return arrived

    async def play(self, group: Group) -> Part:
        """See `Node.play`."""
        part: Part = await answer(self._actor.play.remote(group), NodeLost)
        return part

    async def beat(self) -> Beat:
        """See `Node.beat`."""
        beat: Beat = await answer(self._actor.beat.options(concurrency_group=_BEATS).remote(), NodeLost)
        return beat

    async def close(self) -> None:
        """See `Node.close`."""
        await answer(self._actor.close.remote(), NodeLost)

    def kill(self) -> None:
        """See `Node.kill`."""
        self.killed = True
        end(self._actor)


def room(choice: OnRay, started: bool, machine: Machine, held: int) -> tuple[int, int]:
    """Return the number of workers for which a machine has room, and the GPUs that each of them takes.

    Other users of the cluster may hold GPUs, such as Ray Train or other runs.

    Args:
        choice: options of the user.
        started: True if this run started the cluster.
        machine: machine of the cluster.
        held: workers of this run on the machine (>= 0), which count as well.
    """
    if choice.gpus and machine.gpus >= choice.gpus:
        return min(machine.gpus, machine.free + held * choice.gpus) // choice.gpus, choice.gpus
    # Without GPUs: one worker per machine, or all of them if the cluster is this machine alone.
    return (choice.nodes or 1, 0) if started and not choice.simulate else (1, 0)


class RayCluster:
    """Ray cluster that this process is connected to. It implements `Cluster`."""

    def __init__(self, choice: OnRay, started: bool, kind: type[RolloutNode] = RolloutNode) -> None:
        self._choice = choice
        self._started = started
        self._places: dict[str, tuple[str, int]] = {}
        """Ray's name of the machine, and the GPUs per worker, by slot."""
        self._nodes: dict[str, RayNode] = {}
        """Worker started last in each slot."""
        self._kind = kind

    @property
    def name(self) -> str:
        """See `Cluster.name`."""
        return f"ray{'://' + self._choice.address if self._choice.address else ''}"

    async def seats(self) -> Sequence[str]:
        """See `Cluster.seats`."""
        found: dict[str, tuple[str, int]] = {}
        for machine in await machines(NodeLost):
            names = [f"{machine.name}/{number}" for number in range(max(machine.gpus, self._choice.nodes, 1))]
            # Used slots come first, so that a machine with less room keeps them.
            held = [name for name in names if name in self._nodes and not self._nodes[name].killed]
            count, gpus = room(self._choice, self._started, machine, len(held))
            free = [name for name in names if name not in held]
            found |= dict.fromkeys([*held, *free][:count], (machine.id, gpus))
        self._places |= found
        return list(found)

    async def start(self, seat: str) -> RayNode:
        """See `Cluster.start`."""
        machine, gpus = self._places[seat]
        node = self._nodes[seat] = RayNode(start(self._kind, machine, gpus=gpus, apart=_BEATS))
        # Ray returns before the actor runs: its first heartbeat shows that it does.
        try:
            await node.beat()
        except BaseException:
            node.kill()
            raise
        return node

    async def publish(self, files: Mapping[str, bytes]) -> object:
        """See `Cluster.publish`."""
        # Workers read buffers in the object store, next to the pickle. Bytes would be copied for each of them.
        return await published({name: PickleBuffer(content) for name, content in files.items()}, NodeLost)


class Started(NamedTuple):
    """Ray cluster, with its machines if they were started here."""

    cluster: RayCluster
    machines: Machines | None


@contextmanager
def on_ray(choice: OnRay, kind: type[RolloutNode] = RolloutNode) -> Iterator[Started]:
    """Connect to the chosen cluster for the length of a `with`; see `connected`.

    Raises:
        ConfigError: the cluster does not exist, it cannot be started, or this process is on another one already. Or
            workers would get the GPU on which this process trains.
    """
    simulated = choice.nodes if choice.simulate else 0
    with connected("fleet", choice.address, simulated, choice.patience_s) as here:
        if choice.address and choice.gpus:
            refuse_shared("fleet")
        yield Started(RayCluster(choice, here is not None, kind), here)
