"""Workers as actors of a Ray cluster. The owner places, starts and ends every actor itself, and notices its loss."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from typing import NamedTuple

from repl_rl.errors import WorkerLost
from repl_rl.ray.actor_calls import Actor, Machine, await_answer, kill_actor, list_machines, publish_object, start_actor
from repl_rl.ray.config import RayOptions
from repl_rl.ray.connect_cluster import connect_to_ray, validate_cluster_gpus
from repl_rl.ray.rollout_worker import GroupRequest, Heartbeat, RolloutWorker, WeightsRef, WorkerSetup
from repl_rl.ray.start_local_cluster import Machines
from repl_rl.rollout.concurrent_rollouts import BatchResult
from repl_rl.rollout.rollout_stats import RuntimeInfo

_BEATS = "beats"
"""Concurrency group of heartbeats, which a separate thread answers."""


class RayWorker:
    """Ray actor as its owner sees it. It implements `WorkerClient`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.was_killed = False

    async def open(self, setting: WorkerSetup) -> RuntimeInfo:
        """See `WorkerClient.open`."""
        facts: RuntimeInfo = await await_answer(self._actor.open.remote(setting), WorkerLost)
        return facts

    async def load_weights(self, weights: WeightsRef, files: object | None) -> str | None:
        """See `WorkerClient.load_weights`. Ray fetches published files once per machine."""
        arrived: str | None = await await_answer(self._actor.load_weights.remote(weights, files), WorkerLost)
        return arrived

    async def run_group(self, group: GroupRequest) -> BatchResult:
        """See `WorkerClient.run_group`."""
        part: BatchResult = await await_answer(self._actor.run_group.remote(group), WorkerLost)
        return part

    async def get_heartbeat(self) -> Heartbeat:
        """See `WorkerClient.get_heartbeat`."""
        heartbeat: Heartbeat = await await_answer(
            self._actor.get_heartbeat.options(concurrency_group=_BEATS).remote(), WorkerLost
        )
        return heartbeat

    async def close(self) -> None:
        """See `WorkerClient.close`."""
        await await_answer(self._actor.close.remote(), WorkerLost)

    def kill(self) -> None:
        """See `WorkerClient.kill`."""
        self.was_killed = True
        kill_actor(self._actor)


class RayWorkerCluster:
    """Ray cluster that this process is connected to. It implements `WorkerCluster`."""

    def __init__(self, choice: RayOptions, started: bool, kind: type[RolloutWorker] = RolloutWorker) -> None:
        self._choice = choice
        self._started = started
        self._machines_by_slot: dict[str, tuple[str, int]] = {}
        """Ray's name of the machine, and the GPUs per worker, by slot."""
        self._nodes: dict[str, RayWorker] = {}
        """Worker started last in each slot."""
        self._kind = kind

    @property
    def name(self) -> str:
        """See `WorkerCluster.name`."""
        return f"ray{'://' + self._choice.address if self._choice.address else ''}"

    async def list_slots(self) -> Sequence[str]:
        """See `WorkerCluster.list_slots`."""
        found: dict[str, tuple[str, int]] = {}
        for machine in await list_machines(WorkerLost):
            names = [f"{machine.name}/{number}" for number in range(max(machine.gpus, self._choice.max_workers, 1))]
            # Used slots come first, so that a machine with less room keeps them.
            used = [name for name in names if name in self._nodes and not self._nodes[name].was_killed]
            count, gpus = compute_worker_capacity(self._choice, self._started, machine, len(used))
            free = [name for name in names if name not in used]
            found |= dict.fromkeys([*used, *free][:count], (machine.id, gpus))
        self._machines_by_slot |= found
        return list(found)

    async def start_worker(self, slot: str) -> RayWorker:
        """See `WorkerCluster.start_worker`."""
        machine, gpus = self._machines_by_slot[slot]
        node = self._nodes[slot] = RayWorker(start_actor(self._kind, machine, gpus=gpus, apart=_BEATS))
        # Ray returns before the actor runs: its first heartbeat shows that it does.
        try:
            await node.get_heartbeat()
        except BaseException:
            node.kill()
            raise
        return node

    async def publish_files(self, files: Mapping[str, bytes]) -> object:
        """See `WorkerCluster.publish_files`."""
        # Workers read buffers in the object store, next to the pickle. Bytes would be copied for each of them.
        return await publish_object({name: PickleBuffer(content) for name, content in files.items()}, WorkerLost)


def compute_worker_capacity(choice: RayOptions, started: bool, machine: Machine, used: int) -> tuple[int, int]:
    """Return the number of workers for which a machine has room, and the GPUs that each of them takes.

    Other users of the cluster may hold GPUs, such as Ray Train or other runs.

    Args:
        choice: options of the user.
        started: True if this run started the cluster.
        machine: machine of the cluster.
        used: workers of this run on the machine (>= 0), which count as well.
    """
    if choice.gpus_per_worker and machine.gpus >= choice.gpus_per_worker:
        return min(
            machine.gpus, machine.free + used * choice.gpus_per_worker
        ) // choice.gpus_per_worker, choice.gpus_per_worker
    # Without GPUs: one worker per machine, or all of them if the cluster is this machine alone.
    return (choice.max_workers or 1, 0) if started and not choice.simulate_machines else (1, 0)


class StartedCluster(NamedTuple):
    """Ray cluster, with its machines if they were started here."""

    cluster: RayWorkerCluster
    machines: Machines | None


@contextmanager
def open_ray_cluster(choice: RayOptions, kind: type[RolloutWorker] = RolloutWorker) -> Iterator[StartedCluster]:
    """Connect to the chosen cluster for the length of a `with`; see `connect_to_ray`.

    Raises:
        ConfigError: the cluster does not exist, it cannot be started, or this process is on another one already. Or
            workers would get the GPU on which this process trains.
    """
    simulated = choice.max_workers if choice.simulate_machines else 0
    with connect_to_ray("workers", choice.address, simulated, choice.startup_timeout_s) as here:
        # Other programs may have started that cluster, with all GPUs of this machine.
        if choice.address and choice.gpus_per_worker:
            validate_cluster_gpus("workers")
        yield StartedCluster(RayWorkerCluster(choice, here is not None, kind), here)
