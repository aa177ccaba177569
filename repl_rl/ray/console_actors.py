"""Console hosts as actors of a Ray cluster. `console_sandbox` defines their interfaces and uses them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar

from repl_rl.ray import actor_calls as actors
from repl_rl.ray.config import INNER
from repl_rl.ray.connect_cluster import connect_shared
from repl_rl.ray.console_sandbox import (
    ConsoleHost,
    ConsoleHostLost,
    HostFunctionOffer,
    HostSpec,
    LineProgress,
    WorkspacePayload,
    open_hosted_sandbox,
)
from repl_rl.sandbox.base import Sandbox, SandboxOptions

T = TypeVar("T")

log = logging.getLogger(__name__)

_THREAD = ThreadPoolExecutor(1, "ray")
"""Thread that connects and disconnects. A cluster that is started here ends with the thread that started it."""
CONSOLES = 64
"""Maximum consoles per machine at a time, per process that plays rollouts. Further rollouts wait for a slot."""
_CALLS_A_CONSOLE = 8
"""Maximum concurrent calls per console: one line, and answers of host functions, which take no time."""


class RayConsoleHost:
    """Actor as its owner sees it. It implements `RemoteConsoleHost`."""

    def __init__(self, name: str, actor: actors.Actor) -> None:
        self.name = name
        self._actor = actor

    async def open(self, kind: str, births: SandboxOptions) -> tuple[int, int, int]:
        """See `RemoteConsoleHost.open`."""
        version: tuple[int, int, int] = await _await_answer(self._actor.open.remote(kind, births))
        return version

    async def lease(self, number: int, setup: WorkspacePayload | None) -> None:
        """See `RemoteConsoleHost.lease`."""
        await _await_answer(self._actor.lease.remote(number, setup))

    async def push(self, number: int, line: str, offered: HostFunctionOffer | None) -> LineProgress:
        """See `RemoteConsoleHost.push`."""
        turn: LineProgress = await _await_answer(self._actor.push.remote(number, line, offered))
        return turn

    async def wait_progress(self, number: int) -> LineProgress:
        """See `RemoteConsoleHost.wait_progress`."""
        turn: LineProgress = await _await_answer(self._actor.wait_progress.remote(number))
        return turn

    async def reply_to_call(self, number: int, call: int, content: bytes) -> None:
        """See `RemoteConsoleHost.reply_to_call`."""
        await _await_answer(self._actor.reply_to_call.remote(number, call, content))

    async def close(self, number: int) -> None:
        """See `RemoteConsoleHost.close`."""
        await _await_answer(self._actor.close.remote(number))

    async def check_alive(self) -> None:
        """See `RemoteConsoleHost.check_alive`."""
        await _await_answer(self._actor.check_alive.remote())

    async def end(self) -> None:
        """See `RemoteConsoleHost.end`."""
        await _await_answer(self._actor.end.remote())

    def kill(self) -> None:
        """See `RemoteConsoleHost.kill`."""
        actors.kill_actor(self._actor)


class RayHostMachines:
    """Machines of the cluster that this process is part of. It implements `HostMachines`."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        """Ray's id of each machine, by name."""

    async def list_names(self) -> Sequence[str]:
        """See `HostMachines.list_names`."""
        found = await actors.list_machines(ConsoleHostLost)
        # On a machine with GPUs, the engine and its sampler need the cores.
        apart = [one for one in found if not one.gpus]
        if found and not apart and not self._ids:
            log.warning("every machine of the cluster has GPUs: consoles take cores beside engines")
        self._ids = {one.name: one.id for one in apart or found}
        return list(self._ids)

    async def start_host(self, name: str) -> RayConsoleHost:
        """See `HostMachines.start_host`."""
        if name not in self._ids:
            raise ConsoleHostLost("there is no such machine any more")
        calls = _CALLS_A_CONSOLE * CONSOLES
        host = RayConsoleHost(name, actors.start_actor(ConsoleHost, self._ids[name], calls=calls))
        # Ray returns before the actor runs: its first heartbeat shows that it does.
        try:
            await host.check_alive()
        except BaseException:
            host.kill()
            raise
        return host


@asynccontextmanager
async def open_ray_consoles(address: str, births: SandboxOptions) -> AsyncIterator[Sandbox]:
    """Run consoles on the machines of a cluster, see `connect_shared`, for the duration of the context.

    Raises:
        ConfigError: the cluster does not exist, or none can be started here.
        SandboxUnavailable: it has no machine for consoles, or none of its machines can hold one.
    """
    # One thread connects and disconnects, and the event loop runs on meanwhile.
    loop, stack = asyncio.get_running_loop(), ExitStack()
    on = connect_shared("sandbox nodes", address, 1)
    try:
        await loop.run_in_executor(_THREAD, stack.enter_context, on)
        wanted = HostSpec(INNER.kind, births, CONSOLES)
        async with open_hosted_sandbox(RayHostMachines(), wanted) as sandbox:
            yield sandbox
    finally:
        await loop.run_in_executor(_THREAD, stack.close)


async def _await_answer(reference: Awaitable[T]) -> T:
    return await actors.await_answer(reference, ConsoleHostLost)
