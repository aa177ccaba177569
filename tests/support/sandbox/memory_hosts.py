"""Machines of a cluster that is this process: hosts with real consoles, which can be killed and frozen."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from repl_rl.errors import SandboxUnavailable
from repl_rl.ray.console_sandbox import ConsoleHost, ConsoleHostLost, HostFunctionOffer, LineProgress, WorkspacePayload
from repl_rl.sandbox.base import SandboxOptions

T = TypeVar("T")


class MemoryHost:
    """A host whose calls take no network; see `RemoteConsoleHost`."""

    def __init__(self, name: str, refuses: bool) -> None:
        self.name = name
        self.frozen = False
        self.pushes = 0
        self._refuses = refuses
        self._inside = ConsoleHost()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ending: asyncio.Task[None] | None = None

    async def _ask(self, asked: Coroutine[None, None, T]) -> T:
        work = asyncio.create_task(self._when_thawed(asked))
        try:
            both: set[asyncio.Future[T] | asyncio.Future[None]] = {work, self._gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():
                raise ConsoleHostLost("it was killed")
            return work.result()
        finally:
            if not work.done():
                work.cancel()

    async def _when_thawed(self, asked: Coroutine[None, None, T]) -> T:
        if self.frozen:
            asked.close()
            await asyncio.Event().wait()
        return await asked

    async def open(self, kind: str, births: SandboxOptions) -> tuple[int, int, int]:
        if self._refuses:
            raise SandboxUnavailable("sandbox 'local' needs the program bwrap; install bubblewrap")
        return await self._ask(self._inside.open(kind, births))

    async def lease(self, number: int, setup: WorkspacePayload | None) -> None:
        await self._ask(self._inside.lease(number, setup))

    async def push(self, number: int, line: str, offered: HostFunctionOffer | None) -> LineProgress:
        self.pushes += 1
        return await self._ask(self._inside.push(number, line, offered))

    async def wait_progress(self, number: int) -> LineProgress:
        return await self._ask(self._inside.wait_progress(number))

    async def reply_to_call(self, number: int, call: int, content: bytes) -> None:
        await self._ask(self._inside.reply_to_call(number, call, content))

    async def close(self, number: int) -> None:
        await self._ask(self._inside.close(number))

    async def check_alive(self) -> None:
        await self._ask(self._inside.check_alive())

    async def end(self) -> None:
        await self._ask(self._inside.end())

    def kill(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
            self.ending = asyncio.create_task(self._inside.end())


class MemoryMachines:
    """Machines that come and go as a test wants; see `HostMachines`."""

    def __init__(self, *names: str) -> None:
        self.living = list(names)
        self.bad: set[str] = set()
        """On which no sandbox can be opened."""
        self.hosts: list[MemoryHost] = []

    async def list_names(self) -> Sequence[str]:
        return list(self.living)

    async def start_host(self, name: str) -> MemoryHost:
        if name not in self.living:
            raise ConsoleHostLost("there is no such machine")
        self.hosts.append(MemoryHost(name, name in self.bad))
        return self.hosts[-1]

    def lose(self, name: str) -> None:
        """A machine goes, with what ran there."""
        self.living.remove(name)
        for host in self.hosts:
            if host.name == name:
                host.kill()

    async def settle(self) -> None:
        """Until the consoles of hosts that were killed have ended."""
        await asyncio.gather(*(host.ending for host in self.hosts if host.ending is not None))
