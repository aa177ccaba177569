"""Nodes as actors of a Ray cluster. The owner places, starts and ends every actor itself and notices what dies."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from typing import NamedTuple

from repl_rl.errors import NodeLost
from repl_rl.machine.actors import Actor, answer, end, machines, published, start
from repl_rl.machine.cluster import connected
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
        end(self._actor)


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, choice: OnRay, started: bool, kind: type[RolloutNode] = RolloutNode) -> None:
        self._choice = choice
        self._started = started
        self._machines: dict[str, tuple[str, int]] = {}
        """By seat: Ray's name of its machine, and the GPUs that a node takes there."""
        self._kind = kind

    @property
    def name(self) -> str:
        """See `Cluster.name`."""
        return f"ray{'://' + self._choice.address if self._choice.address else ''}"

    async def seats(self) -> Sequence[str]:
        """See `Cluster.seats`."""
        found: dict[str, tuple[str, int]] = {}
        for machine in await machines(NodeLost):
            count, gpus = self._room(machine.gpus)
            found |= {f"{machine.name}/{number}": (machine.id, gpus) for number in range(count)}
        self._machines |= found
        return list(found)

    def _room(self, gpus: int) -> tuple[int, int]:
        """Nodes on a machine with so many GPUs, and how many of them each takes."""
        mine = self._choice.gpus
        if mine and gpus >= mine:
            return gpus // mine, mine
        # All nodes that were asked for, where there is no other machine.
        return (self._choice.nodes or 1, 0) if self._started and not self._choice.simulate else (1, 0)

    async def start(self, seat: str) -> RayNode:
        """See `Cluster.start`."""
        machine, gpus = self._machines[seat]
        node = RayNode(start(self._kind, machine, gpus=gpus, apart=_BEATS))
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
        ConfigError: there is no such cluster, it cannot be started, or this process is on another one already.
    """
    with connected("fleet", choice.address, choice.nodes if choice.simulate else 0) as here:
        yield Started(RayCluster(choice, here is not None, kind), here)
