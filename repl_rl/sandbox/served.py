"""A sandbox made of fork servers and a pool: what `local`, `unsafe` and `docker` have in common."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.forkserver import ForkServer, Launch
from repl_rl.sandbox.pool import Pool


class ServedSandbox:
    """Leases consoles that a fork server makes; a fork server that died is replaced."""

    def __init__(
        self, name: str, launch: Launch, limits: Limits, server: ForkServer, *, warm: int, starting: int
    ) -> None:
        self.name = name
        self.python_version = server.python_version
        self._launch = launch
        self._limits = limits
        self._server = server
        self._replacing = asyncio.Lock()
        self._same_python = self.python_version[:2] == sys.version_info[:2]
        self.pool = Pool(self._open_console, warm=warm, starting=starting)

    def session(self) -> AbstractAsyncContextManager[ConsoleSession]:
        """As `Sandbox.session`."""
        return self.pool.lease()

    async def _open_console(self) -> ConsoleSession:
        async with self._replacing:
            if not self._server.alive:
                await self._server.stop()
                self._server = await ForkServer.start(self._launch)
            server = self._server
        return await server.open_console(self._limits, decide=self._same_python)

    async def close(self) -> None:
        """Kill everything."""
        await self.pool.close()
        await self._server.stop()


@asynccontextmanager
async def serve(name: str, launch: Launch, limits: Limits, *, warm: int, starting: int) -> AsyncIterator[ServedSandbox]:
    """Run a fork server and its pool for the length of the context."""
    server = await ForkServer.start(launch)
    sandbox = ServedSandbox(name, launch, limits, server, warm=warm, starting=starting)
    try:
        sandbox.pool.fill()
        yield sandbox
    finally:
        await sandbox.close()
