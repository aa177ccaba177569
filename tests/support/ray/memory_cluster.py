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

from repl_rl.errors import UnrecoverableError, WorkerLost
from repl_rl.ray.remote_rollouts import RolloutWorkers, WorkerPlan
from repl_rl.ray.rollout_worker import GroupRequest, Heartbeat, RolloutWorker, WeightsRef, WorkerSetup
from repl_rl.ray.worker_pool import WorkerTimeouts
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout.concurrent_rollouts import BatchResult
from repl_rl.rollout.rollout_stats import RuntimeInfo
from repl_rl.rollout.sampler_base import ReplSampler
from repl_rl.tasks import Task
from tests.support.ray.scripted_workers import LIMITS, opened

T = TypeVar("T")
QUICK = WorkerTimeouts(
    heartbeat_interval_s=0.02, heartbeat_timeout_s=0.5, opening_heartbeat_timeout_s=0.5, start_timeout_s=20,
    open_timeout_s=60, load_timeout_s=20, poll_interval_s=0.02, retry_backoff_s=0.01, no_worker_timeout_s=0.5,
    close_timeout_s=5, cluster_timeout_s=0.5,
)  # fmt: skip
TASKS = [Task(f"t{n}", f"What is {n} * 7?", str(7 * n), family=f"f{n % 3}") for n in range(8)]
IDS = [task.id for task in TASKS for _ in range(3)]


def here() -> SyncRollouts:
    """What plays the same in this process."""
    return SyncRollouts(opened, {task.id: task for task in TASKS})


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
        self.played: list[GroupRequest] = []
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
                raise WorkerLost("it was killed by the test")
            return call.result()
        finally:
            call.cancel()
            gone.cancel()

    async def open(self, setting: WorkerSetup) -> RuntimeInfo:
        return await self._call("open", self._inner.open(setting))

    async def load_weights(self, weights: WeightsRef, files: object | None) -> str | None:
        self.loads.append((weights.policy_step, files is not None))
        assert files is None or isinstance(files, Mapping)
        arrived = await self._call("load", self._inner.load_weights(weights, files))
        self.taken.append(weights.policy_step)
        return "others" if weights.policy_step in self._cluster.garbled else arrived

    async def run_group(self, group: GroupRequest) -> BatchResult:
        self.played.append(group)
        self._cluster.begun += 1
        self._cluster.strike(self._cluster.begun, self)
        return await self._call("play", self._inner.run_group(group))

    async def get_heartbeat(self) -> Heartbeat:
        return await self._call("beat", self._inner.get_heartbeat())

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
        kind: type[RolloutWorker] = RolloutWorker,
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

    async def list_slots(self) -> Sequence[str]:
        if self.silent:
            raise WorkerLost("the head is gone")
        return list(self.places)

    async def start_worker(self, seat: str) -> MemoryNode:
        if self.refuses:
            raise WorkerLost("the cluster has no room")
        self.nodes.append(MemoryNode(self))
        return self.nodes[-1]

    async def publish_files(self, files: Mapping[str, bytes]) -> object:
        if self.full:
            raise UnrecoverableError("object store of memory", "full", "give it room")
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


def setting(opener: Callable[[int], object]) -> WorkerSetup:
    """How a node opens a world of the tests."""
    return WorkerSetup(pickle.dumps(opener), 0, os.getcwd(), tuple(sys.path))


def fleet(
    cluster: MemoryCluster,
    waits: WorkerTimeouts = QUICK,
    nodes: int = 0,
    shared: bool = True,
    opener: Callable[[int], object] = opened,
    kind: type[RolloutWorkers] = RolloutWorkers,
) -> RolloutWorkers:
    """A fleet on that cluster."""
    plan = WorkerPlan(setting(opener), ReplSampler(), LIMITS, False, 6, nodes, waits, shared)
    return kind(nullcontext(cluster), plan, {task.id: task for task in TASKS})


def weights(folder: Path, content: bytes = b"weights") -> Path:
    """A folder of weights that nobody reads."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder
