"""Actors on the Ray cluster that this process is connected to.

Only this module, `connect_cluster` and `start_local_cluster` import Ray. Ray restarts no actor and retries no call. The
owner of an actor places, starts and ends it.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import ray
from ray import exceptions
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle as Actor
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from repl_rl.errors import ReplRLError, RolloutFailure, UnrecoverableError
from repl_rl.utils.processes import exit_with_parent

__all__ = [
    "Actor",
    "Machine",
    "await_answer",
    "format_ray_error",
    "kill_actor",
    "list_live_machines",
    "list_machines",
    "publish_object",
    "start_actor",
]

T = TypeVar("T")
MakeLostError = Callable[[str], Exception]
"""Factory of the exception for a lost actor or cluster. Its argument is Ray's message."""

_LONGEST = 400
"""Longest message of Ray that is passed on, characters."""
_CALLS = 1000
"""Concurrent calls per actor, which is Ray's own default for actors with an event loop."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A live machine of the cluster that has CPUs for actors."""

    id: str
    """Ray's node id."""
    name: str
    """Host and the first digits of the id, for messages."""
    gpus: int
    free: int
    """GPUs that no actor and no task holds."""


async def list_machines(lost: MakeLostError) -> list[Machine]:
    """Return the live machines of the cluster. Raises the exception of `lost` if the cluster is gone."""
    try:
        return await _run_in_daemon_thread(list_live_machines)
    except exceptions.RayError as error:
        raise lost(format_ray_error(error)) from error


def list_live_machines() -> list[Machine]:
    """Return the live machines of the cluster. Blocks until the cluster answers. Raises Ray's own errors."""
    # Leave out dead machines, which Ray lists too, and machines without CPUs, such as a head.
    free = available_resources_per_node()
    return [
        Machine(
            one["NodeID"],
            f"{one['NodeManagerHostname']}-{one['NodeID'][:6]}",
            int(one["Resources"].get("GPU", 0)),
            int(free.get(one["NodeID"], {}).get("GPU", 0)),
        )
        for one in ray.nodes()
        if one["Alive"] and one.get("Resources", {}).get("CPU")
    ]


def start_actor(kind: type, machine: str, *, gpus: int = 0, apart: str = "", calls: int = _CALLS) -> Actor:
    """Start an actor, which ends with this process and with Ray on its machine.

    The actor may not be running yet when this returns.

    Args:
        kind: class of the actor; all its methods are coroutines.
        machine: Ray's node id of the machine to run on.
        gpus: GPUs reserved for the actor (>= 0).
        apart: name of a concurrency group whose calls run in a separate thread; "" makes no such group.
        calls: concurrent calls outside that group (>= 1).
    """
    # An actor takes no CPU in Ray's accounts, so that any number of them fits on a machine.
    groups = {apart: 1} if apart else {}
    made = ray.remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0, num_cpus=0)(
        _make_self_ending_class(kind)
    )
    # Not soft: the start fails without that machine, and never moves to another one.
    there = NodeAffinitySchedulingStrategy(machine, soft=False)
    return made.options(num_gpus=gpus, scheduling_strategy=there, max_concurrency=calls).remote()


async def await_answer(reference: Awaitable[T], lost: MakeLostError) -> T:
    """Return the result of a call to an actor.

    Raises:
        Exception: made by `lost`, if the actor is gone or cannot be reached.
        ReplRLError, RolloutFailure: raised by the actor's method.
    """
    try:
        return await reference
    except exceptions.RayTaskError as error:
        # Ray wraps errors of the method. Those of this package reach the caller as they were raised.
        if isinstance(error.cause, ReplRLError | RolloutFailure):
            raise error.cause from error
        raise
    except exceptions.RayError as error:
        raise lost(format_ray_error(error)) from error


def kill_actor(actor: Actor) -> None:
    """Kill an actor on any machine, even if it is busy."""
    # A frozen head never answers, so the call runs in a daemon thread.
    threading.Thread(target=_kill, args=(actor,), daemon=True, name="ray").start()


async def publish_object(value: object, lost: MakeLostError) -> object:
    """Put a large `value` into the object store and return its reference. Each machine receives the value once.

    Raises:
        Exception: made by `lost`, if the cluster is gone.
        UnrecoverableError: the object store or its disk is full.
    """
    try:
        reference: object = await _run_in_daemon_thread(lambda: ray.put(value))
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        remedy = "give it room: `ray start --object-store-memory`, and disk for what does not fit that"
        raise UnrecoverableError(
            "object store of the Ray cluster", f"full ({format_ray_error(error)})", remedy
        ) from error
    except exceptions.RayError as error:
        raise lost(format_ray_error(error)) from error
    return reference


def format_ray_error(error: Exception) -> str:
    """Return Ray's error message in one line, shortened to `_LONGEST` characters."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."


def _make_self_ending_class(kind: type) -> type:
    """Return a subclass of `kind` whose process ends with the raylet of its machine, which started it.

    Ray does this itself, but only after the raylet's parent notices the death or the actor makes a request to the
    raylet. An idle actor would stay, with its GPU and its consoles.
    """

    def create(cls: type) -> object:
        exit_with_parent()
        return object.__new__(cls)

    return type(kind.__name__, (kind,), {"__new__": create})


def _kill(actor: Actor) -> None:
    with suppress(exceptions.RayError, ValueError):
        ray.kill(actor, no_restart=True)


async def _run_in_daemon_thread(call: Callable[[], T]) -> T:
    """Return the result of `call`, which runs in a daemon thread, since a lost cluster may never answer."""
    answered: Future[T] = Future()

    def run() -> None:
        # A running future cannot be cancelled, so the result can always be set.
        answered.set_running_or_notify_cancel()
        try:
            answered.set_result(call())
        except Exception as error:
            answered.set_exception(error)

    threading.Thread(target=run, daemon=True, name="ray").start()
    return await asyncio.wrap_future(answered)
