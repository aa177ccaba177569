"""A cluster in memory: nodes of this process that can be killed and frozen, and a world that they open."""

import asyncio
import os
import pickle
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from repl_rl.errors import BrokenDown, NodeLost
from repl_rl.rollout import RolloutThread
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.members import Waits
from repl_rl.rollout.fleet.messages import Beat, Group, Setting, Weights
from repl_rl.rollout.fleet.node import RolloutNode
from repl_rl.rollout.fleet.source import NodeFleet, Plan
from repl_rl.rollout.sampler import ReplSampler
from repl_rl.tasks import Task
from tests.fleet.scripted import LIMITS, opened

T = TypeVar("T")
QUICK = Waits(
    beat_s=0.02, lost_s=0.5, busy_s=0.5, start_s=20, open_s=60, load_s=20, look_s=0.02, pause_s=0.01, patience_s=0.5,
    close_s=5, silent_s=0.5,
)  # fmt: skip
TASKS = [Task(f"t{n}", f"What is {n} * 7?", str(7 * n), family=f"f{n % 3}") for n in range(8)]
IDS = [task.id for task in TASKS for _ in range(3)]


def here() -> RolloutThread:
    """What plays the same in this process."""
    return RolloutThread(opened, {task.id: task for task in TASKS})


class MemoryNode:
    """A node in this process."""

    def __init__(self, cluster: "MemoryCluster") -> None:
        self._cluster = cluster
        self._inner = cluster.kind()
        self._gone = asyncio.Event()
        self.frozen = False
        self.stuck = cluster.stuck
        """A call that is never answered."""
        self.calls: Counter[str] = Counter()
        """What crossed the wire, by name."""
        self.loads: list[tuple[int, bool]] = []
        """Policy steps of the weights that it was given, and whether their files were sent."""
        self.taken: list[int] = []
        """Policy steps of those that it has."""
        self.played: list[Group] = []
        self.loaded_before: list[int] = []
        """The policy step that its engine was at when it began each group."""

    async def _call(self, name: str, work: Awaitable[T]) -> T:
        self.calls[name] += 1
        call, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.frozen or name == self.stuck:
                await asyncio.Event().wait()
            if self._gone.is_set():
                raise NodeLost("it was killed by the test")
            return call.result()
        finally:
            call.cancel()
            gone.cancel()

    async def open(self, setting: Setting) -> Facts:
        return await self._call("open", self._inner.open(setting))

    async def load(self, weights: Weights, files: object | None) -> str | None:
        self.loads.append((weights.policy_step, files is not None))
        assert files is None or isinstance(files, Mapping)
        arrived = await self._call("load", self._inner.load(weights, files))
        self.taken.append(weights.policy_step)
        return "others" if weights.policy_step in self._cluster.garbled else arrived

    async def play(self, group: Group) -> Part:
        self.played.append(group)
        self._cluster.begun += 1
        self._cluster.strike(self._cluster.begun, self)
        return await self._call("play", self._inner.play(group))

    async def beat(self) -> Beat:
        return await self._call("beat", self._inner.beat())

    async def close(self) -> None:
        await self._call("close", self._inner.close())

    def kill(self) -> None:
        self._gone.set()

    async def reap(self) -> None:
        """What would be gone with the process of a node that was killed."""
        await self._inner.close()


def spare(number: int, node: MemoryNode) -> None:
    """Strike nobody."""


class MemoryCluster:
    """Seats that a test gives and takes."""

    name = "memory"

    def __init__(
        self,
        seats: int,
        strike: Callable[[int, MemoryNode], None] = spare,
        kind: type[RolloutNode] = RolloutNode,
    ) -> None:
        self.places = [f"seat {n}" for n in range(seats)]
        self.nodes: list[MemoryNode] = []
        self.strike = strike
        """Called with the number of a group's attempt, from 1, and its node, when it begins."""
        self.kind = kind
        self.begun = 0
        self.garbled: set[int] = set()
        """Policy steps of weights that do not arrive as they were."""
        self.refuses = False
        self.stuck = ""
        """A call to nodes that start from now on which is never answered."""
        self.silent = False
        """It answers nothing."""
        self.full = False
        """It has no room for files."""

    async def seats(self) -> Sequence[str]:
        if self.silent:
            raise NodeLost("the head is gone")
        return list(self.places)

    async def start(self, seat: str) -> MemoryNode:
        if self.refuses:
            raise NodeLost("the cluster has no room")
        self.nodes.append(MemoryNode(self))
        return self.nodes[-1]

    async def publish(self, files: Mapping[str, bytes]) -> object:
        if self.full:
            raise BrokenDown("object store of memory", "full", "give it room")
        return files


def hard_times() -> MemoryCluster:
    """Two nodes, of which a group's attempts kill two and freeze one, and one that comes late."""

    def strike(number: int, node: MemoryNode) -> None:
        if number in (2, 8):
            node.kill()
        if number == 5:
            node.frozen = True
        if number == 10:
            cluster.places.append("late")

    cluster = MemoryCluster(2, strike)
    return cluster


def setting(opener: Callable[[int], object]) -> Setting:
    """How a node opens a world of the tests."""
    return Setting(pickle.dumps(opener), 0, os.getcwd(), tuple(sys.path))


def fleet(
    cluster: MemoryCluster,
    waits: Waits = QUICK,
    nodes: int = 0,
    shared: bool = True,
    opener: Callable[[int], object] = opened,
    kind: type[NodeFleet] = NodeFleet,
) -> NodeFleet:
    """A fleet on that cluster."""
    plan = Plan(setting(opener), ReplSampler(), LIMITS, False, 6, nodes, waits, shared)
    return kind(nullcontext(cluster), plan, {task.id: task for task in TASKS})


def weights(folder: Path, content: bytes = b"weights") -> Path:
    """A folder of weights that nobody reads."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder
