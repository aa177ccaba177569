"""Sandbox that consists of fork servers and a console pool: the common part of `local`, `unsafe` and `docker`."""

import asyncio
import logging
import resource
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol
from weakref import WeakSet

from repl_rl.errors import SandboxFault, SandboxLost, SandboxUnavailable
from repl_rl.record.setup import Setup
from repl_rl.sandbox.base import Births, Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.door import Station
from repl_rl.sandbox.forkserver import ForkServer, Launch
from repl_rl.sandbox.pool import Pool
from repl_rl.sandbox.stations import Stations

log = logging.getLogger(__name__)


class Source(Protocol):
    """Source of consoles."""

    async def open(self) -> ConsoleSession:
        """Return a fresh console.

        Raises:
            SandboxFault: no console could be started.
        """

    async def prepare(self, setup: Setup) -> Station:
        """Return a process in which a workspace was made.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: the process could not be started.
        """

    async def birth(self, station: Station) -> ConsoleSession:
        """Return a fresh console that begins with the workspace of `station`.

        Raises:
            SandboxFault: no console could be started.
        """

    async def close(self) -> None:
        """End all processes that were started for consoles."""


PATIENCE_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between tries to start another fork server. A Docker daemon takes a while to restart."""


async def _another(launch: Launch, patience_s: Sequence[float]) -> ForkServer:
    """Start a fork server in place of a dead one. Retry until it starts.

    Raises:
        SandboxLost: all tries failed.
    """
    for pause_s in patience_s:
        try:
            return await ForkServer.start(launch)
        except SandboxUnavailable as error:
            log.warning("no console can be started (%s); the next try is in %g s", error, pause_s)
            await asyncio.sleep(pause_s)
    try:
        return await ForkServer.start(launch)
    except SandboxUnavailable as error:
        raise SandboxLost(str(error)) from error


_FILES, _FILES_PER_CONSOLE = 128, 8
"""Open files of this process besides its consoles, and open files per console, both rounded up."""


def raise_file_limit(births: Births) -> None:
    """Raise this process's limit of open files to the number that the consoles need, up to the hard limit.

    At the limit, ZeroMQ ends the process without an exception.

    Raises:
        SandboxUnavailable: the hard limit is too low.
    """
    needed = _FILES + _FILES_PER_CONSOLE * (births.warm + births.starting)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SandboxUnavailable(
            f"this process may open {hard} files, and {births.warm + births.starting} consoles need {needed}; "
            f"raise the limit (ulimit -n {needed})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class SharedServer:
    """Source of consoles from one fork server, which is replaced when it dies."""

    def __init__(
        self, launch: Launch, limits: Limits, server: ForkServer, patience_s: Sequence[float] = PATIENCE_S
    ) -> None:
        self._launch = launch
        self._limits = limits
        self._server = server
        self._patience_s = patience_s
        self._replacing: asyncio.Task[None] | None = None
        self._sessions: WeakSet[ConsoleSession] = WeakSet()
        self._decide = server.python_version[:2] == sys.version_info[:2]

    async def open(self) -> ConsoleSession:
        """As `Source.open`."""
        server = await self._alive()
        return self._made(await server.open_console(self._limits, decide=self._decide))

    async def prepare(self, setup: Setup) -> Station:
        """As `Source.prepare`."""
        server = await self._alive()
        return await server.prepare(setup, self._limits)

    async def birth(self, station: Station) -> ConsoleSession:
        """As `Source.birth`."""
        return self._made(await station.open_console(self._limits, decide=self._decide))

    def _made(self, session: ConsoleSession) -> ConsoleSession:
        self._sessions.add(session)
        return session

    async def _alive(self) -> ForkServer:
        while not self._server.alive:
            if self._replacing is None or self._replacing.done():
                self._replacing = asyncio.create_task(self._replace())
                # Retrieve the exception even if every waiting caller is cancelled.
                self._replacing.add_done_callback(lambda done: done.cancelled() or done.exception())
            # All callers wait for the same replacement, and a cancelled caller must not cancel it for the others.
            await asyncio.shield(self._replacing)
        return self._server

    async def _replace(self) -> None:
        log.warning("what makes consoles is gone (%s); another one is started", self._server.last_words())
        for session in list(self._sessions):
            session.abandon()
        self._sessions.clear()
        await self._server.stop()
        self._server = await _another(self._launch, self._patience_s)

    async def close(self) -> None:
        """As `Source.close`."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        await self._server.stop()


class ServerEach:
    """Source with one fork server per console, which ends with it, so that consoles share nothing."""

    def __init__(
        self, launch: Launch, limits: Limits, first: ForkServer, patience_s: Sequence[float] = PATIENCE_S
    ) -> None:
        self._launch = launch
        self._limits = limits
        self._patience_s = patience_s
        self._spare: ForkServer | None = first
        self._stopping: set[asyncio.Task[None]] = set()
        self._decide = first.python_version[:2] == sys.version_info[:2]

    async def open(self) -> ConsoleSession:
        """As `Source.open`."""
        server, self._spare = self._spare or await self._new(), None
        try:
            session = await server.open_console(self._limits, decide=self._decide)
        except BaseException:
            await server.stop()
            raise
        session.on_close = lambda: self._stop(server)
        return session

    async def prepare(self, setup: Setup) -> Station:
        """As `Source.prepare`. The process serves a single console, and ends with it."""
        server, self._spare = self._spare or await self._new(), None
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

    async def _new(self) -> ForkServer:
        return await _another(self._launch, self._patience_s)

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
    """Sandbox that leases consoles from a pool."""

    def __init__(
        self, name: str, python_version: tuple[int, int, int], pool: Pool[ConsoleSession], stations: Stations
    ) -> None:
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
    """Run fork servers and their console pool for the duration of the context.

    Raises:
        SandboxUnavailable: the limit of open files is too low, no fork server starts, or the first console cannot be
            isolated.
    """
    raise_file_limit(births)
    server = await ForkServer.start(launch)
    source: Source = (ServerEach if server_each else SharedServer)(launch, births.limits, server)
    pool = Pool(source.open, warm=births.warm, starting=births.starting)
    stations = Stations(source.prepare, source.birth, starting=births.starting, shared=not server_each)
    try:
        try:
            # Open one console now, so that missing isolation is an error here and not in a rollout.
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
        # Consoles end before the fork servers that they come from.
        await stations.close()
        await pool.close()
        await source.close()
