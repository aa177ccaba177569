"""Sandbox of fork servers and a console pool: the common part of `local`, `unsafe` and `docker`.

A `ConsolePool` starts consoles ahead of time, leases each one once to one rollout, and kills it at the end of the
lease. `SharedForkServer` is a source of consoles that come from one fork server. `ServerPerConsole` is a source with
one fork server per console. `open_fork_server_sandbox` combines a source with a pool.
"""

import asyncio
import logging
import resource
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

from repl_rl.errors import SandboxFault, SandboxLost, SandboxUnavailable
from repl_rl.sandbox.base import Limits, SandboxOptions
from repl_rl.sandbox.console_client import ConsoleSession
from repl_rl.sandbox.fork_server_client import ForkServer, ForkServerLauncher, WorkspacePool, WorkspaceProcess
from repl_rl.trajectory.trajectory import WorkspaceContent

log = logging.getLogger(__name__)

_TRIES = 3
"""Maximum attempts to start one console."""
PATIENCE_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Seconds between tries to start another fork server. A Docker daemon takes a while to restart."""
_FILES, _FILES_PER_CONSOLE = 128, 8
"""Open files of this process besides its consoles, and open files per console, both rounded up."""


class PooledConsole(Protocol):
    """Console, as its pool sees it."""

    @property
    def is_dead(self) -> bool:
        """True if the console died while it waited for its lease."""

    def close(self) -> None:
        """Kill the console and release its resources."""


_ConsoleT = TypeVar("_ConsoleT", bound=PooledConsole)


class ConsolePool(Generic[_ConsoleT]):
    """Console pool that keeps `warm` consoles alive, leased ones included, and starts at most `starting` at a time.

    A leased console is replaced when its lease ends, not when it begins. So the cores belong to the running rollouts,
    and consoles for the next ones start while the policy is updated. A lease beyond `warm` starts its own console.
    """

    def __init__(self, open_console: Callable[[], Awaitable[_ConsoleT]], *, warm: int, starting: int) -> None:
        self._open_console = open_console
        self._warm = warm
        self._max_starting = starting
        self._ready: deque[_ConsoleT] = deque()
        self._waiters: deque[asyncio.Future[_ConsoleT]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._leased: set[_ConsoleT] = set()
        self._closed = False

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[_ConsoleT]:
        """Lease a fresh console.

        Raises:
            SandboxFault: no console could be started, after several tries.
            SandboxLost: the process that starts consoles is gone.
        """
        session = await self._acquire()
        try:
            yield session
        finally:
            self._leased.discard(session)
            session.close()
            self.start_missing()

    async def _acquire(self) -> _ConsoleT:
        if self._closed:
            raise SandboxFault("the sandbox is closed")
        while self._ready:
            # Skip consoles that died while they waited.
            session = self._ready.popleft()
            if session.is_dead:
                session.close()
                continue
            self._leased.add(session)
            return session
        waiter: asyncio.Future[_ConsoleT] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.start_missing()
        try:
            return await waiter
        except asyncio.CancelledError:
            # The console was assigned just before the cancellation; end its lease.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._leased.discard(waiter.result())
                waiter.result().close()
                self.start_missing()
            raise

    def start_missing(self) -> None:
        """Start missing consoles in the background."""
        if self._closed:
            return
        # Start consoles for the reserve and for waiting leases, less those that start already.
        reserve = max(0, self._warm - len(self._leased) - len(self._ready))
        missing = reserve + len(self._waiters) - len(self._starting)
        for _ in range(min(missing, self._max_starting - len(self._starting))):
            task = asyncio.create_task(self._start_console())
            self._starting.add(task)
            task.add_done_callback(self._on_started)

    def _on_started(self, task: "asyncio.Task[None]") -> None:
        self._starting.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.start_missing()
        else:
            self._fail_waiters(error)

    async def _start_console(self) -> None:
        for attempt in range(_TRIES):
            try:
                session = await self._open_console()
            except SandboxLost:
                # The source has already retried for as long as it may.
                raise
            except SandboxFault:
                if attempt == _TRIES - 1:
                    raise
                continue
            self.add_console(session)
            return

    def add_console(self, session: _ConsoleT) -> None:
        """Add a fresh console. Waiting leases come before the reserve."""
        while self._waiters:
            # A lease that was cancelled while it waited is done; skip it.
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._leased.add(session)
                waiter.set_result(session)
                return
        if self._closed:
            session.close()
        else:
            self._ready.append(session)

    def _fail_waiters(self, error: BaseException) -> None:
        """Fail all waiting leases. The next lease tries again."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                fault = (SandboxLost if isinstance(error, SandboxLost) else SandboxFault)(str(error))
                fault.__cause__ = error
                waiter.set_exception(fault)

    async def close(self) -> None:
        """Kill all consoles, leased ones too."""
        self._closed = True
        self._fail_waiters(SandboxFault("the sandbox is closed"))
        starting = list(self._starting)
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for session in (*self._ready, *self._leased):
            session.close()
        self._ready.clear()


class ConsoleFactory(Protocol):
    """Source of consoles."""

    async def open_console(self) -> ConsoleSession:
        """Return a fresh console.

        Raises:
            SandboxFault: no console could be started.
        """

    async def prepare_workspace(self, setup: WorkspaceContent) -> WorkspaceProcess:
        """Return a process in which a workspace was made.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: the process could not be started.
        """

    async def open_workspace_console(self, workspace: WorkspaceProcess) -> ConsoleSession:
        """Return a fresh console that begins with this workspace.

        Raises:
            SandboxFault: no console could be started.
        """

    async def close(self) -> None:
        """End all processes that were started for consoles."""


class SharedForkServer:
    """Source of consoles from one fork server, which is replaced when it dies."""

    def __init__(
        self, launch: ForkServerLauncher, limits: Limits, server: ForkServer, patience_s: Sequence[float] = PATIENCE_S
    ) -> None:
        self._launch = launch
        self._limits = limits
        self._server = server
        self._patience_s = patience_s
        self._replacing: asyncio.Task[None] | None = None
        self._sessions: WeakSet[ConsoleSession] = WeakSet()
        # The host may decide whether a cell is complete only if the console runs the same Python.
        self._decide = server.python_version[:2] == sys.version_info[:2]

    async def open_console(self) -> ConsoleSession:
        """As `ConsoleFactory.open_console`."""
        server = await self._get_live_server()
        return self._register_session(await server.open_console(self._limits, decide=self._decide))

    async def prepare_workspace(self, setup: WorkspaceContent) -> WorkspaceProcess:
        """As `ConsoleFactory.prepare_workspace`."""
        server = await self._get_live_server()
        return await server.prepare_workspace(setup, self._limits)

    async def open_workspace_console(self, workspace: WorkspaceProcess) -> ConsoleSession:
        """As `ConsoleFactory.open_workspace_console`."""
        return self._register_session(await workspace.open_console(self._limits, decide=self._decide))

    def _register_session(self, session: ConsoleSession) -> ConsoleSession:
        self._sessions.add(session)
        return session

    async def _get_live_server(self) -> ForkServer:
        while not self._server.is_alive:
            if self._replacing is None or self._replacing.done():
                self._replacing = asyncio.create_task(self._replace_server())
                # Retrieve the exception even if every waiting caller is cancelled.
                self._replacing.add_done_callback(lambda done: done.cancelled() or done.exception())
            # All callers wait for the same replacement, and a cancelled caller must not cancel it for the others.
            await asyncio.shield(self._replacing)
        return self._server

    async def _replace_server(self) -> None:
        log.warning("the fork server is gone (%s); starting another one", self._server.get_log_tail())
        for session in list(self._sessions):
            session.mark_source_lost()
        self._sessions.clear()
        await self._server.stop()
        self._server = await _restart_fork_server(self._launch, self._patience_s)

    async def close(self) -> None:
        """As `ConsoleFactory.close`."""
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait({self._replacing})
        await self._server.stop()


class ServerPerConsole:
    """Source with one fork server per console, which ends with it, so that consoles share nothing."""

    def __init__(
        self, launch: ForkServerLauncher, limits: Limits, server: ForkServer, patience_s: Sequence[float] = PATIENCE_S
    ) -> None:
        self._launch = launch
        self._limits = limits
        self._patience_s = patience_s
        self._spare: ForkServer | None = server
        self._stopping: set[asyncio.Task[None]] = set()
        # As in `SharedForkServer`.
        self._decide = server.python_version[:2] == sys.version_info[:2]

    async def open_console(self) -> ConsoleSession:
        """As `ConsoleFactory.open_console`."""
        server, self._spare = self._spare or await self._get_new_server(), None
        try:
            session = await server.open_console(self._limits, decide=self._decide)
        except BaseException:
            await server.stop()
            raise
        session.on_close = lambda: self._stop_server(server)
        return session

    async def prepare_workspace(self, setup: WorkspaceContent) -> WorkspaceProcess:
        """As `ConsoleFactory.prepare_workspace`. The process serves a single console, and ends with it."""
        server, self._spare = self._spare or await self._get_new_server(), None
        try:
            workspace = await server.prepare_workspace(setup, self._limits)
        except BaseException:
            await server.stop()
            raise
        workspace.on_close = lambda: self._stop_server(server)
        return workspace

    async def open_workspace_console(self, workspace: WorkspaceProcess) -> ConsoleSession:
        """As `ConsoleFactory.open_workspace_console`."""
        return await workspace.open_console(self._limits, decide=self._decide)

    async def _get_new_server(self) -> ForkServer:
        return await _restart_fork_server(self._launch, self._patience_s)

    def _stop_server(self, server: ForkServer) -> None:
        task = asyncio.create_task(server.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        """As `ConsoleFactory.close`."""
        if self._spare is not None:
            self._stop_server(self._spare)
            self._spare = None
        await asyncio.gather(*self._stopping)


async def _restart_fork_server(launch: ForkServerLauncher, patience_s: Sequence[float]) -> ForkServer:
    """Start a fork server in place of a dead one. Retry after each pause in `patience_s`.

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


class ForkServerSandbox:
    """Sandbox that leases consoles from a pool."""

    def __init__(
        self,
        name: str,
        python_version: tuple[int, int, int],
        pool: ConsolePool[ConsoleSession],
        workspaces: WorkspacePool,
    ) -> None:
        self.name = name
        self.python_version = python_version
        self._pool = pool
        self._workspaces = workspaces

    def session(self) -> AbstractAsyncContextManager[ConsoleSession]:
        """As `Sandbox.session`."""
        return self._pool.lease()

    def open_workspace_session(self, setup: WorkspaceContent) -> AbstractAsyncContextManager[ConsoleSession]:
        """As `SupportsWorkspace.open_workspace_session`."""
        return self._workspaces.lease(setup)


@asynccontextmanager
async def open_fork_server_sandbox(
    name: str, launch: ForkServerLauncher, options: SandboxOptions, *, server_each: bool = False
) -> AsyncIterator[ForkServerSandbox]:
    """Run fork servers and their console pool for the duration of the context.

    Raises:
        SandboxUnavailable: the limit of open files is too low, no fork server starts, or the first console cannot be
            isolated.
    """
    raise_file_limit(options)
    server = await ForkServer.start(launch)
    source: ConsoleFactory = (ServerPerConsole if server_each else SharedForkServer)(launch, options.limits, server)
    pool = ConsolePool(source.open_console, warm=options.pool_size, starting=options.max_concurrent_starts)
    workspaces = WorkspacePool(
        source.prepare_workspace,
        source.open_workspace_console,
        starting=options.max_concurrent_starts,
        shared=not server_each,
    )
    try:
        try:
            # Open one console now, so that missing isolation is an error here and not in a rollout.
            console = await source.open_console()
            if options.pool_size:
                pool.add_console(console)
            else:
                console.close()
        except SandboxFault as fault:
            raise SandboxUnavailable(
                f"sandbox {name!r} cannot isolate a console here: {fault}; {launch.find_remedy(str(fault))}"
            ) from fault
        pool.start_missing()
        yield ForkServerSandbox(name, server.python_version, pool, workspaces)
    finally:
        # Consoles end before the fork servers that they come from.
        await workspaces.close()
        await pool.close()
        await source.close()


def raise_file_limit(options: SandboxOptions) -> None:
    """Raise this process's limit of open files to the number that the consoles need, up to the hard limit.

    At the limit, ZeroMQ ends the process without an exception.

    Raises:
        SandboxUnavailable: the hard limit is too low.
    """
    needed = _FILES + _FILES_PER_CONSOLE * (options.pool_size + options.max_concurrent_starts)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SandboxUnavailable(
            f"this process may open {hard} files, and its consoles need {needed}; raise the limit (ulimit -n {needed})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
