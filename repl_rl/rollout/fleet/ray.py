"""Nodes as actors of a Ray cluster. No other file imports Ray.

The owner places, starts and ends every actor itself and notices what dies: Ray restarts nothing and repeats nothing.
"""

import asyncio
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import ray
from ray import exceptions
from ray._private import ray_constants as constants
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._raylet import AuthenticationTokenLoader, Config
from ray.cluster_utils import Cluster as Machines
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from repl_rl.errors import ConfigError, NodeLost, ReplRLError
from repl_rl.machine.folders import private_folder
from repl_rl.machine.inherited import variables
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.messages import Beat, Group, Setting, Weights
from repl_rl.rollout.fleet.node import RolloutNode

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_STORE_BYTES = 256 << 20
"""Of each machine that is started here: its nodes read weights from the owner's folder, so little goes that way."""
_TRIES = 4
"""Starts of a machine: a busy one misses a limit of Ray's own, 15 s, that nothing moves."""
_BEATS = "beats"
"""What is asked here is answered by a thread of its own."""
_LONGEST = 400
"""Of what Ray says, characters."""


class RayNode:
    """An actor as its owner sees it."""

    def __init__(self, actor: "ray.actor.ActorHandle") -> None:
        self._actor = actor

    async def open(self, setting: Setting) -> Facts:
        """See `Node.open`."""
        facts: Facts = await answer(self._actor.open.remote(setting))
        return facts

    async def load(self, weights: Weights, files: object | None) -> str | None:
        """See `Node.load`. Ray fetches published files once a machine."""
        arrived: str | None = await answer(self._actor.load.remote(weights, files))
        return arrived

    async def play(self, group: Group) -> Part:
        """See `Node.play`."""
        part: Part = await answer(self._actor.play.remote(group))
        return part

    async def beat(self) -> Beat:
        """See `Node.beat`."""
        beat: Beat = await answer(self._actor.beat.options(concurrency_group=_BEATS).remote())
        return beat

    async def close(self) -> None:
        """See `Node.close`."""
        await answer(self._actor.close.remote())

    def kill(self) -> None:
        """See `Node.kill`."""
        with suppress(exceptions.RayError, ValueError):
            ray.kill(self._actor, no_restart=True)


async def answer(reference: Awaitable[T]) -> T:
    """What an actor answers.

    Raises:
        NodeLost: it is gone, or cannot be reached.
        ReplRLError: what it raised.
    """
    try:
        return await reference
    except exceptions.RayTaskError as error:
        if isinstance(error.cause, ReplRLError):
            raise error.cause from error
        raise
    except exceptions.RayError as error:
        raise NodeLost(brief(error)) from error


def brief(error: Exception) -> str:
    """What Ray says, in one line."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, choice: OnRay, started: bool, kind: type[RolloutNode] = RolloutNode) -> None:
        self._choice = choice
        self._started = started
        self._machines: dict[str, tuple[str, int]] = {}
        """By seat: Ray's name of its machine, and the GPUs that a node takes there."""
        groups = {_BEATS: 1}
        self._kind = ray.remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0, num_cpus=0)(kind)

    @property
    def name(self) -> str:
        """See `Cluster.name`."""
        return f"ray{'://' + self._choice.address if self._choice.address else ''}"

    async def seats(self) -> Sequence[str]:
        """See `Cluster.seats`."""
        try:
            machines = await asyncio.to_thread(ray.nodes)
        except exceptions.RayError as error:
            raise NodeLost(brief(error)) from error
        found: dict[str, tuple[str, int]] = {}
        for machine in machines:
            resources = machine.get("Resources", {})
            if machine["Alive"] and resources.get("CPU"):
                count, gpus = self._room(int(resources.get("GPU", 0)))
                where = f"{machine['NodeManagerHostname']}-{machine['NodeID'][:6]}"
                found |= {f"{where}/{number}": (machine["NodeID"], gpus) for number in range(count)}
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
        there = NodeAffinitySchedulingStrategy(machine, soft=False)
        node = RayNode(self._kind.options(num_gpus=gpus, scheduling_strategy=there).remote())
        try:
            await node.beat()
        except BaseException:
            node.kill()
            raise
        return node

    async def publish(self, files: Mapping[str, bytes]) -> object:
        """See `Cluster.publish`."""
        try:
            reference: object = await asyncio.to_thread(ray.put, dict(files))
        except exceptions.RayError as error:
            raise NodeLost(brief(error)) from error
        return reference


class Started(NamedTuple):
    """A cluster, and its machines where they were started here."""

    cluster: RayCluster
    machines: Machines | None


@contextmanager
def on_ray(choice: OnRay, kind: type[RolloutNode] = RolloutNode) -> Iterator[Started]:
    """Connect this process to a cluster, which is started here and ended again where no address is given.

    One that is started here listens on the loopback address alone and asks everybody for a token that only processes of
    this user can read. Ctrl-C and SIGTERM stay what they are.

    Raises:
        ConfigError: there is no such cluster, it cannot be started, or this process is connected to one already.
    """
    if ray.is_initialized():
        raise ConfigError("fleet", "ray", "this process is connected to a cluster already; end that first")
    with ExitStack() as stack:
        machines = None
        if not choice.address:
            stack.enter_context(_alone())
            folder = stack.enter_context(private_folder(Path(tempfile.gettempdir()), "repl_rl-ray-"))
            machines = stack.enter_context(_machines(choice, folder))
        address = choice.address or str(machines.address if machines else "")
        with _signals_kept():
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
                remedy = f"Ray does not answer there: {brief(error)}; run this on a machine of that cluster"
                raise ConfigError("fleet", f"ray://{address}", remedy) from error
        stack.callback(_leave)
        if choice.address and os.environ.get("RAY_AUTH_MODE") != "token":
            log.warning("cluster %s asks nobody for a token: whoever reaches it runs programs there", address)
        yield Started(RayCluster(choice, machines is not None, kind), machines)


def _leave() -> None:
    with _signals_kept():
        ray.shutdown()


@contextmanager
def _machines(choice: OnRay, folder: Path) -> Iterator[Machines]:
    """Machines on this one: one that holds everything, or a head and one for each node."""
    machines = Machines(shutdown_at_exit=True)
    head: dict[str, object] = {"num_cpus": 0 if choice.simulate else 1, "temp_dir": str(folder)}
    if not choice.simulate:
        head["num_gpus"] = None  # as many as Ray finds
    try:
        with variables(_others()):
            add_machine(machines, **head, include_dashboard=False)
            for _ in range(choice.nodes if choice.simulate else 0):
                add_machine(machines, num_cpus=1)
        yield machines
    finally:
        with _signals_kept():
            machines.shutdown()


def add_machine(machines: Machines, **options: object) -> object:
    """Start one more machine here, on the loopback address, and again where it did not come up.

    Raises:
        ConfigError: it does not come up.
    """
    for left in reversed(range(_TRIES)):
        before, head, workers = _children(), machines.head_node, set(machines.worker_nodes)
        try:
            with _signals_kept():
                return machines.add_node(node_ip_address=_LOOPBACK, object_store_memory=_STORE_BYTES, **options)
        except Exception as error:  # Ray has no kind of its own for this
            for pid in _children() - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            machines.head_node, machines.worker_nodes = head, workers
            log.warning("a machine of the Ray cluster did not come up: %s", brief(error))
            if not left:
                remedy = f"its cluster does not start: {brief(error)}; free cores for it, or give the address of one"
                raise ConfigError("fleet", "ray", remedy) from error
    raise AssertionError("it was started or refused")


def _children() -> set[int]:
    """The processes that this one has started."""
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@contextmanager
def _alone() -> Iterator[None]:
    """Whatever of Ray starts meanwhile is this run's alone."""
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # Ray calls it so: every address is the loopback one
    }
    clusters = constants.ENABLE_RAY_CLUSTER
    try:
        with variables(ours):
            constants.ENABLE_RAY_CLUSTER = False
            _read_again()
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
        _read_again()


def _others() -> Mapping[str, str]:
    """Where there are several GPUs the first one is left to the trainer."""
    count = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    ids = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids() or list(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids[1:])} if len(ids) > 1 else {}


def _read_again() -> None:
    """Ray has read its variables when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes signals for itself; afterwards they are whose they were."""
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
