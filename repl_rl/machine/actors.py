"""Actors on the Ray cluster that this process is on. No files but this, `cluster.py` and
`own_machines.py` import Ray.

Ray restarts nothing and repeats nothing: whoever owns an actor places, starts and ends it.
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

from repl_rl.errors import BrokenDown, ReplRLError, RolloutFailure
from repl_rl.machine.processes import end_with_parent

__all__ = ["Actor", "Machine", "answer", "brief", "end", "living", "machines", "published", "start"]

T = TypeVar("T")
Lost = Callable[[str], Exception]
"""What is raised where an actor or the cluster is gone, of what Ray says."""
_LONGEST = 400
"""Of what Ray says, characters."""
_CALLS = 1000
"""Of an actor at a time: Ray's own number for those that have an event loop."""


async def answer(reference: Awaitable[T], lost: Lost) -> T:
    """What an actor answers.

    Raises:
        Exception: what `lost` makes, where the actor is gone or cannot be reached.
        ReplRLError, RolloutFailure: what it raised.
    """
    try:
        return await reference
    except exceptions.RayTaskError as error:
        if isinstance(error.cause, ReplRLError | RolloutFailure):
            raise error.cause from error
        raise
    except exceptions.RayError as error:
        raise lost(brief(error)) from error


def brief(error: Exception) -> str:
    """What Ray says, in one line."""
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."


@dataclass(frozen=True, slots=True)
class Machine:
    """One that lives and has CPUs for actors."""

    id: str
    """Ray's name of it."""
    name: str
    """For people: its host, and as much of the id as tells it from others there."""
    gpus: int
    free: int
    """Of these, that no actor and no task has."""


async def machines(lost: Lost) -> list[Machine]:
    """Those of the cluster. Raises what `lost` makes: it is gone."""
    try:
        return await _aside(living)
    except exceptions.RayError as error:
        raise lost(brief(error)) from error


def living() -> list[Machine]:
    """As `machines`, for whoever may wait for the cluster. Raises Ray's own errors."""
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


def start(kind: type, machine: str, *, gpus: int = 0, apart: str = "", calls: int = _CALLS) -> Actor:
    """A new actor, which ends with this process and with its machine's part of Ray. It may not have started when this
    returns.

    Args:
        kind: its class, all of whose methods are coroutines.
        machine: Ray's name of where it lives.
        gpus: that are its own there (>= 0).
        apart: calls under this name are answered by a thread of their own; "": there is none.
        calls: that are answered at a time (>= 1), beside those.
    """
    groups = {apart: 1} if apart else {}
    made = ray.remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0, num_cpus=0)(_ending(kind))
    there = NodeAffinitySchedulingStrategy(machine, soft=False)
    return made.options(num_gpus=gpus, scheduling_strategy=there, max_concurrency=calls).remote()


def _ending(kind: type) -> type:
    """`kind` in a process that ends with the one that has started it, the raylet of its machine.

    Ray sees to that itself, but only once the raylet's parent has taken note of its death, or the actor has asked the
    raylet for something: one that is idle would stay, with its GPU and its consoles.
    """

    def made(cls: type) -> object:
        end_with_parent()
        return object.__new__(cls)

    return type(kind.__name__, (kind,), {"__new__": made})


def end(actor: Actor) -> None:
    """Kill an actor, wherever it is and whatever it does."""
    threading.Thread(target=_kill, args=(actor,), daemon=True, name="ray").start()  # a frozen head answers nobody


def _kill(actor: Actor) -> None:
    with suppress(exceptions.RayError, ValueError):
        ray.kill(actor, no_restart=True)


async def _aside(call: Callable[[], T]) -> T:
    """What a call returns, in a thread that no exit waits for: a cluster that is gone may never answer."""
    answered: Future[T] = Future()

    def work() -> None:
        answered.set_running_or_notify_cancel()  # from now on nobody takes the answer away
        try:
            answered.set_result(call())
        except Exception as error:
            answered.set_exception(error)

    threading.Thread(target=work, daemon=True, name="ray").start()
    return await asyncio.wrap_future(answered)


async def published(value: object, lost: Lost) -> object:
    """What actors are given in place of a large `value`: it is sent once a machine.

    Raises:
        Exception: what `lost` makes: the cluster is gone.
        BrokenDown: it has no room for the value.
    """
    try:
        reference: object = await _aside(lambda: ray.put(value))
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        remedy = "give it room: `ray start --object-store-memory`, and disk for what does not fit that"
        raise BrokenDown("object store of the Ray cluster", f"full ({brief(error)})", remedy) from error
    except exceptions.RayError as error:
        raise lost(brief(error)) from error
    return reference
