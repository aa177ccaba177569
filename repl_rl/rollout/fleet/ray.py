"""Nodes as actors of a Ray cluster. The owner places, starts and ends every actor itself and notices what dies."""

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
"""What is asked here is answered by a thread of its own."""


class RayNode:
    """An actor as its owner sees it."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.killed = False

    async def open(self, setting: Setting) -> Facts:
        """See `Node.open`."""
        facts: Facts = await answer(self._actor.open.remote(setting), NodeLost)
        return facts

    async def load(self, weights: Weights, files: object | None) -> str | None:
        """See `Node.load`. Ray fetches published files once a machine."""
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
    """Nodes that a machine has room for, and how many of its GPUs each takes.

    What else is on the cluster may have some of them: processes of Ray Train, other runs.

    Args:
        choice: of the user.
        started: the cluster is this run's own.
        machine: which.
        held: nodes of this run that are on it (>= 0), which count as well.
    """
    if choice.gpus and machine.gpus >= choice.gpus:
        return min(machine.gpus, machine.free + held * choice.gpus) // choice.gpus, choice.gpus
    # All nodes that were asked for, where there is no other machine.
    return (choice.nodes or 1, 0) if started and not choice.simulate else (1, 0)


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, choice: OnRay, started: bool, kind: type[RolloutNode] = RolloutNode) -> None:
        self._choice = choice
        self._started = started
        self._places: dict[str, tuple[str, int]] = {}
        """By seat: Ray's name of its machine, and the GPUs that a node takes there."""
        self._nodes: dict[str, RayNode] = {}
        """By seat, the last one that was started there."""
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
        try:
            await node.beat()
        except BaseException:
            node.kill()
            raise
        return node

    async def publish(self, files: Mapping[str, bytes]) -> object:
        """See `Cluster.publish`."""
        # Buffers lie in the store beside the pickle, and nodes read them there; of bytes each would make a copy.
        return await published({name: PickleBuffer(content) for name, content in files.items()}, NodeLost)


class Started(NamedTuple):
    """A cluster, and its machines where they were started here."""

    cluster: RayCluster
    machines: Machines | None


@contextmanager
def on_ray(choice: OnRay, kind: type[RolloutNode] = RolloutNode) -> Iterator[Started]:
    """The cluster that is chosen, for the length of a `with`; see `connected`.

    Raises:
        ConfigError: there is no such cluster, it cannot be started, or this process is on another one already; or nodes
            of it would be given the GPU on which this process trains.
    """
    simulated = choice.nodes if choice.simulate else 0
    with connected("fleet", choice.address, simulated, choice.patience_s) as here:
        if choice.address and choice.gpus:
            refuse_shared("fleet")
        yield Started(RayCluster(choice, here is not None, kind), here)
