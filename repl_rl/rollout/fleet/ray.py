"""Nodes as actors of a Ray cluster. Only this file and `machines` import Ray.

The owner places, starts and ends every actor itself and notices what dies: Ray restarts nothing and repeats nothing.
"""

import asyncio
import atexit
import concurrent.futures
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple, TypeVar

import ray
from ray import exceptions
from ray.cluster_utils import Cluster as Machines
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from repl_rl.errors import BrokenDown, ConfigError, NodeLost, ReplRLError
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.machines import brief, machines_here, signals_kept
from repl_rl.rollout.fleet.messages import Beat, Group, Setting, Weights
from repl_rl.rollout.fleet.node import RolloutNode

log = logging.getLogger(__name__)
T = TypeVar("T")

_LEAVE_S = 20.0
"""For Ray to let go of a cluster."""
_BEATS = "beats"
"""What is asked here is answered by a thread of its own."""


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
        threading.Thread(target=self._kill, daemon=True, name="ray").start()  # a head that is frozen answers nobody

    def _kill(self) -> None:
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


async def _aside(call: Callable[[], T]) -> T:
    """What a call returns, in a thread that no exit waits for: a cluster that is gone may never answer."""
    answered: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            answered.set_result(call())
        except Exception as error:
            answered.set_exception(error)

    threading.Thread(target=work, daemon=True, name="ray").start()
    return await asyncio.wrap_future(answered)


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
            machines = await _aside(ray.nodes)
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
            reference: object = await _aside(lambda: ray.put(dict(files)))
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            remedy = "give it room: `ray start --object-store-memory`, and disk for what does not fit that"
            raise BrokenDown(f"object store of {self.name}", f"full ({brief(error)})", remedy) from error
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
            machines = stack.enter_context(machines_here(choice))
        address = choice.address or str(machines.address if machines else "")
        with signals_kept():
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
    with signals_kept():
        leaving = threading.Thread(target=ray.shutdown, daemon=True, name="ray")
        leaving.start()
        leaving.join(_LEAVE_S)
        if leaving.is_alive():
            log.warning("the cluster does not answer, and is left as it is")
            atexit.unregister(ray.shutdown)  # it would wait for an answer when this process exits
