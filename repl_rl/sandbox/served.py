"""A sandbox made of fork servers and a pool: what `local`, `unsafe` and `docker` have in common."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from repl_rl.errors import SandboxFault, SandboxUnavailable
from repl_rl.record.setup import Setup
from repl_rl.sandbox.base import Births, Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.door import Station
from repl_rl.sandbox.forkserver import ForkServer, Launch
from repl_rl.sandbox.pool import Pool
from repl_rl.sandbox.stations import Stations


class Source(Protocol):
    """Where consoles come from."""

    async def open(self) -> ConsoleSession:
        """A fresh console.

        Raises:
            SandboxFault: none could be started.
        """

    async def prepare(self, setup: Setup) -> Station:
        """A process in which a workspace was made.

        Raises:
            SetupError: it cannot be made.
            SandboxFault: no such process could be started.
        """

    async def birth(self, station: Station) -> ConsoleSession:
        """A fresh console that begins with the workspace of `station`.

        Raises:
            SandboxFault: none could be started.
        """

    async def close(self) -> None:
        """End everything that was started for consoles."""


async def _another(launch: Launch) -> ForkServer:
    """A fork server where one could be started before: that it cannot be now is a fault, and the next try may do."""
    try:
        return await ForkServer.start(launch)
    except SandboxUnavailable as error:
        raise SandboxFault(str(error)) from error


class SharedServer:
    """All consoles from one fork server; one that died is replaced."""

    def __init__(self, launch: Launch, limits: Limits, server: ForkServer) -> None:
        self._launch = launch
        self._limits = limits
        self._server = server
        self._replacing = asyncio.Lock()
        self._decide = server.python_version[:2] == sys.version_info[:2]

    async def open(self) -> ConsoleSession:
        """As `Source.open`."""
        server = await self._alive()
        return await server.open_console(self._limits, decide=self._decide)

    async def prepare(self, setup: Setup) -> Station:
        """As `Source.prepare`."""
        server = await self._alive()
        return await server.prepare(setup, self._limits)

    async def birth(self, station: Station) -> ConsoleSession:
        """As `Source.birth`."""
        return await station.open_console(self._limits, decide=self._decide)

    async def _alive(self) -> ForkServer:
        async with self._replacing:
            if not self._server.alive:
                await self._server.stop()
                self._server = await _another(self._launch)
            return self._server

    async def close(self) -> None:
        """As `Source.close`."""
        await self._server.stop()


class ServerEach:
    """A fork server for each console, which ends with it: nothing is shared with a sibling."""

    def __init__(self, launch: Launch, limits: Limits, first: ForkServer) -> None:
        self._launch = launch
        self._limits = limits
        self._spare: ForkServer | None = first
        self._stopping: set[asyncio.Task[None]] = set()
        self._decide = first.python_version[:2] == sys.version_info[:2]

    async def open(self) -> ConsoleSession:
        """As `Source.open`."""
        server, self._spare = self._spare or await _another(self._launch), None
        try:
            session = await server.open_console(self._limits, decide=self._decide)
        except BaseException:
            await server.stop()
            raise
        session.on_close = lambda: self._stop(server)
        return session

    async def prepare(self, setup: Setup) -> Station:
        """As `Source.prepare`: one for a single console, which ends with it."""
        server, self._spare = self._spare or await _another(self._launch), None
        try:
            station = await server.prepare(setup, self._limits)
        except BaseException:
            await server.stop()
            raise
        station.on_close = lambda: self._stop(server)
        return station

    async def birth(self, station: Station) -> ConsoleSession:
        """As `Source.birth`."""
        return await station.open_console(self._limits, decide=self._decide)

    def _stop(self, server: ForkServer) -> None:
        task = asyncio.create_task(server.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """As `Source.close`."""
        if self._spare is not None:
            self._stop(self._spare)
            self._spare = None
        await asyncio.gather(*self._stopping)


class ServedSandbox:
    """Leases consoles from a pool."""

    def __init__(self, name: str, python_version: tuple[int, int, int], pool: Pool, stations: Stations) -> None:
        self.name = name
        self.python_version = python_version
        self._pool = pool
        self._stations = stations

    def session(self) -> AbstractAsyncContextManager[ConsoleSession]:
        """As `Sandbox.session`."""
        return self._pool.lease()

    def prepared(self, setup: Setup) -> AbstractAsyncContextManager[ConsoleSession]:
        """As `Preparing.prepared`."""
        return self._stations.lease(setup)


@asynccontextmanager
async def serve(
    name: str, launch: Launch, births: Births, *, server_each: bool = False
) -> AsyncIterator[ServedSandbox]:
    """Run fork servers and their pool for the length of the context.

    Raises:
        SandboxUnavailable: no fork server starts, or the first console cannot be isolated as promised.
    """
    server = await ForkServer.start(launch)
    source: Source = (ServerEach if server_each else SharedServer)(launch, births.limits, server)
    pool = Pool(source.open, warm=births.warm, starting=births.starting)
    stations = Stations(source.prepare, source.birth, starting=births.starting, shared=not server_each)
    try:
        try:
            first = await source.open()
            if births.warm:
                pool.offer(first)
            else:
                first.close()
        except SandboxFault as fault:
            raise SandboxUnavailable(
                f"sandbox {name!r} cannot isolate a console here: {fault}; {launch.remedy_for(str(fault))}"
            ) from fault
        pool.fill()
        yield ServedSandbox(name, server.python_version, pool, stations)
    finally:
        await stations.close()
        await pool.close()
        await source.close()
