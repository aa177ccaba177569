"""Console hosts as actors of a Ray cluster."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar

from repl_rl.machine import actors
from repl_rl.machine.cluster import shared
from repl_rl.sandbox.base import Births, Sandbox
from repl_rl.sandbox.nodes import INNER
from repl_rl.sandbox.nodes.host import ConsoleHost
from repl_rl.sandbox.nodes.hosts import Wanted
from repl_rl.sandbox.nodes.messages import Carried, HostLost, Offered, Turn
from repl_rl.sandbox.nodes.served import serve_on

log = logging.getLogger(__name__)
T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, "ray")
"""Thread that connects and disconnects. A cluster that is started here ends with the thread that started it."""
CONSOLES = 64
"""Maximum consoles per machine at a time, per process that plays rollouts. Further rollouts wait for a slot."""
_CALLS_A_CONSOLE = 8
"""Maximum concurrent calls per console: one line, and answers of host functions, which take no time."""


class RayHost:
    """Actor as its owner sees it; see `Hosting`."""

    def __init__(self, name: str, actor: actors.Actor) -> None:
        self.name = name
        self._actor = actor

    async def open(self, kind: str, births: Births) -> tuple[int, int, int]:
        """See `Hosting.open`."""
        version: tuple[int, int, int] = await _answer(self._actor.open.remote(kind, births))
        return version

    async def lease(self, number: int, setup: Carried | None) -> None:
        """See `Hosting.lease`."""
        await _answer(self._actor.lease.remote(number, setup))

    async def push(self, number: int, line: str, offered: Offered | None) -> Turn:
        """See `Hosting.push`."""
        turn: Turn = await _answer(self._actor.push.remote(number, line, offered))
        return turn

    async def turn(self, number: int) -> Turn:
        """See `Hosting.turn`."""
        turn: Turn = await _answer(self._actor.turn.remote(number))
        return turn

    async def reply(self, number: int, call: int, content: bytes) -> None:
        """See `Hosting.reply`."""
        await _answer(self._actor.reply.remote(number, call, content))

    async def close(self, number: int) -> None:
        """See `Hosting.close`."""
        await _answer(self._actor.close.remote(number))

    async def beat(self) -> None:
        """See `Hosting.beat`."""
        await _answer(self._actor.beat.remote())

    async def end(self) -> None:
        """See `Hosting.end`."""
        await _answer(self._actor.end.remote())

    def kill(self) -> None:
        """See `Hosting.kill`."""
        actors.end(self._actor)


async def _answer(reference: Awaitable[T]) -> T:
    return await actors.answer(reference, HostLost)


class RayMachines:
    """Machines of the cluster that this process is part of; see `Machines`."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        """Ray's id of each machine, by name."""

    async def names(self) -> Sequence[str]:
        """See `Machines.names`."""
        found = await actors.machines(HostLost)
        # On a machine with GPUs, the engine and its sampler need the cores.
        apart = [one for one in found if not one.gpus]
        if found and not apart and not self._ids:
            log.warning("every machine of the cluster has GPUs: consoles take cores beside engines")
        self._ids = {one.name: one.id for one in apart or found}
        return list(self._ids)

    async def start(self, name: str) -> RayHost:
        """See `Machines.start`."""
        if name not in self._ids:
            raise HostLost("there is no such machine any more")
        calls = _CALLS_A_CONSOLE * CONSOLES
        host = RayHost(name, actors.start(ConsoleHost, self._ids[name], calls=calls))
        try:
            await host.beat()
        except BaseException:
            host.kill()
            raise
        return host


@asynccontextmanager
async def serve(address: str, births: Births) -> AsyncIterator[Sandbox]:
    """Run consoles on the machines of a cluster, see `shared`, for the duration of the context.

    Raises:
        ConfigError: the cluster does not exist, or none can be started here.
        SandboxUnavailable: it has no machine for consoles, or none of its machines can hold one.
    """
    loop, stack = asyncio.get_running_loop(), ExitStack()
    on = shared("sandbox nodes", address, 1)
    try:
        await loop.run_in_executor(_THREAD, stack.enter_context, on)
        wanted = Wanted(INNER.kind, births, CONSOLES)
        async with serve_on(RayMachines(), wanted) as sandbox:
            yield sandbox
    finally:
        await loop.run_in_executor(_THREAD, stack.close)
