"""Host end of a fork server: starts it, requests consoles and workspace processes, and pools workspaces.

`SpawnSocket` is the socket of a process that consoles are forked from: a fork server or a workspace process.
`ForkServer` is a running fork server, and restarts nothing. `ProcessLauncher` starts it as a child process of this
one. `WorkspacePool` keeps one workspace process per workspace, and evicts idle ones, oldest first.
"""

import asyncio
import itertools
import json
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import IO, Protocol, Self

import zmq

from repl_rl.errors import SandboxFault, SandboxLost, SandboxUnavailable, SetupError
from repl_rl.sandbox.base import INODES, OPEN_FILES, Limits
from repl_rl.sandbox.cgroup import CgroupUnavailable, ControlGroup, create_group
from repl_rl.sandbox.console_client import ConsoleDeath, ConsoleSession, SupervisorClient
from repl_rl.sandbox.line_status import replace_surrogates
from repl_rl.trajectory.trajectory import WorkspaceContent

BORN_WITHIN_S = 30.0
"""Time for a fork server to fork a process, seconds. One that takes longer counts as hung."""
_START_TIMEOUT_S = 120.0
"""Time for a fork server to import everything, seconds."""
_READY_TIMEOUT_S = 30.0
_NEWS_S = 2.0
"""Time for the report of a death after its first signs, seconds."""
_STOP_TIMEOUT_S = 10.0
"""Time for a process without namespaces to end after its consoles, seconds. After it, the process is killed."""
_PACKET_BYTES = 65_536
_SIGXCPU = 24
"""Signal at the limit of CPU time."""
_OWN_WORDS = "repl_kernel: "
"""Prefix of the fork server's own message about its end. Such a message includes the remedy."""
IDLE = 8
"""Maximum idle workspaces that are kept. A workspace can be idle between the rollouts of a group."""
_TRIES = 3
"""Maximum attempts to make a workspace, and to start a console from it."""
_FIRST_UID, _UIDS = 1_600_000_000, 1_000_000
"""First user id of consoles, and number of such ids."""
# Processes of one machine usually start at different user ids.
_uids = itertools.count(os.getpid() * 4096 % _UIDS)


class SpawnSocket:
    """Socket on which the host requests consoles. All methods run on the event loop that created it."""

    def __init__(
        self,
        connection: socket.socket,
        context: "zmq.Context[zmq.Socket[bytes]]",
        last_words: Callable[[], str],
        *,
        isolated: bool,
        born_within_s: float = BORN_WITHIN_S,
    ) -> None:
        """`last_words` returns the end of the fork server's log. For `isolated`, see `SupervisorClient`."""
        self.connection = connection
        self._born_within_s = born_within_s
        self.is_broken = False
        """True once the process behind the socket is gone or hung."""
        self._context = context
        self._last_words = last_words
        self._isolated = isolated
        self.is_lost: Callable[[], bool] = self.is_closed
        """Returns True if its consoles died together with the process behind the socket."""

    def is_closed(self) -> bool:
        """Return True if the process behind the socket is gone, as far as the system knows, or hung."""
        try:
            self.is_broken = self.is_broken or not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            # The process lives and sends nothing.
            pass
        except OSError:
            self.is_broken = True
        return self.is_broken

    async def open_console(self, limits: Limits, *, uid: int, decide: bool) -> ConsoleSession:
        """Return a fresh console, ready for its first line. `uid` is its user outside; 0 means that of the forking
        process.

        Raises:
            SandboxFault: the console died or was not ready in time.
        """
        key = secrets.token_hex(32)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Send the key on the console's own socket. Every later console can read the memory of the fork server.
        ours.send(key.encode())
        link = self._make_supervisor_client(ours, limits)
        try:
            with theirs:
                self._send_request(_encode_request(limits, uid), theirs)
            await self._wait_for_fork(link)
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await link.ready
            if link.exit_info is not None or self._context.closed:
                # The console died, or its fork server was stopped meanwhile.
                raise SandboxFault(f"a console died at birth: {self._last_words()}")
            return ConsoleSession(link, key, limits, self._context, decide=decide, lost=lambda: self.is_lost())
        except TimeoutError:
            link.close()
            raise SandboxFault(f"a console was not ready after {_READY_TIMEOUT_S:g} s") from None
        except OSError as error:
            link.close()
            raise SandboxFault(f"a console cannot be reached: {error}") from error
        except BaseException:
            link.close()
            raise

    async def prepare_workspace(self, setup: WorkspaceContent, limits: Limits, *, uid: int) -> "WorkspaceProcess":
        """Start a process, make a workspace in it, and return it as a source of consoles with that workspace.

        Raises:
            SetupError: the workspace cannot be made, within the limits of a console and `limits.cpu_s` of wall clock.
            SandboxFault: the process could not be isolated, or no reply came.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The workspace process takes its requests for consoles on this channel.
        channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        link = self._make_supervisor_client(ours, limits)
        try:
            with theirs, other, _open_memory_file(setup.content) as content:
                self._send_request(_encode_request(limits, uid, prepares=True), theirs, other, content)
            await self._wait_for_fork(link)
            said = await _receive_workspace_result(channel, link, limits)
            # Without a reply, the process has ended. A non-empty reply is a problem of the workspace.
            if said is None:
                raise self._make_workspace_error(setup, link.exit_info, limits)
            if said:
                raise _make_setup_error(
                    setup, said["place"], said["value"], f"{said['problem']}; correct the workspace"
                )
            door = SpawnSocket(
                channel,
                self._context,
                self._last_words,
                isolated=self._isolated,
                born_within_s=self._born_within_s,
            )
            return WorkspaceProcess(door, link)
        except BaseException:
            link.close()
            channel.close()
            raise

    async def _wait_for_fork(self, link: SupervisorClient) -> None:
        """Wait until the requested process is forked, or has died.

        Raises:
            SandboxFault: the fork server is hung.
        """
        try:
            async with asyncio.timeout(self._born_within_s):
                await link.forked
        except TimeoutError:
            self.is_broken = True
            raise SandboxFault(
                f"the fork server stands still: it forked nothing for {self._born_within_s:g} s"
            ) from None

    def _make_supervisor_client(self, connection: socket.socket, limits: Limits) -> SupervisorClient:
        return SupervisorClient(connection, isolated=self._isolated, max_text_bytes=2 * limits.output_bytes)

    def _send_request(self, request: bytes, *sockets: socket.socket | int) -> None:
        descriptors = [each if isinstance(each, int) else each.fileno() for each in sockets]
        try:
            socket.send_fds(self.connection, [request], descriptors)
        except BlockingIOError:
            # The fork server lives, but the queue of its socket is full.
            raise SandboxFault("the fork server takes no further request now") from None
        except OSError as error:
            self.is_broken = True
            raise SandboxFault(f"the fork server is gone: {error}") from error

    def _make_workspace_error(
        self, setup: WorkspaceContent, death: ConsoleDeath | None, limits: Limits
    ) -> SetupError | SandboxFault:
        """Return the error for a workspace process that ended without a reply."""
        if death is None or death.code is None:
            return SandboxFault(f"a workspace's process died at birth: {self._last_words()}")
        reason = f"it ended its process ({death.code}) while it was made"
        if death.code == -_SIGXCPU:
            reason = f"it takes more than {limits.cpu_s:g} s of CPU; make it smaller, or give a larger limits.cpu_s"
        elif death.code < 0:
            reason = f"it was killed by signal {-death.code} while it was made; it may take too much memory or time"
        return _make_setup_error(setup, "its end", replace_surrogates(death.text[-200:]), reason)


class WorkspaceProcess:
    """Workspace process: a process in which a workspace was made, and from which consoles are forked."""

    def __init__(self, door: SpawnSocket, link: SupervisorClient) -> None:
        self._door = door
        self._link = link
        self.on_close: Callable[[], None] = lambda: None
        """Called once, when it is released."""

    @property
    def is_alive(self) -> bool:
        """False once it has ended, together with its consoles."""
        return self._link.exit_info is None and not self._door.is_broken

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """As `SpawnSocket.open_console`. Consoles of one workspace share one user outside, and each has its own
        namespaces."""
        return await self._door.open_console(limits, uid=0, decide=decide)

    def close(self) -> None:
        """End it, and every console that it forked."""
        self._door.connection.close()
        self._link.close()
        on_close, self.on_close = self.on_close, lambda: None
        on_close()


def _encode_request(limits: Limits, uid: int, *, prepares: bool = False) -> bytes:
    names = ("cpu_s", "memory_mb", "output_bytes", "processes", "disk_mb")
    chosen = {name: getattr(limits, name) for name in names}
    fixed = {"open_files": OPEN_FILES, "inodes": INODES}
    return json.dumps({"uid": uid, "prepares": prepares, **chosen, **fixed}).encode()


@contextmanager
def _open_memory_file(content: bytes) -> Iterator[int]:
    """Yield a descriptor to read `content` from. `content` may exceed the size of a socket message."""
    descriptor = os.memfd_create("workspace")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


async def _receive_workspace_result(
    channel: socket.socket, link: SupervisorClient, limits: Limits
) -> Mapping[str, str] | None:
    """Return the problem of a workspace, or an empty mapping. None means that its process ended without a reply."""
    # Use one task for both periods: a packet that arrives while its reading is cancelled would be lost.
    reading = asyncio.create_task(_receive_packet(channel))
    try:
        done, _ = await asyncio.wait({reading}, timeout=limits.cpu_s)
        if not done:
            link.interrupt()
            done, _ = await asyncio.wait({reading}, timeout=limits.interrupt_grace_s)
        if not done:
            problem = f"it takes more than {limits.cpu_s:g} s"
            return {"place": "its end", "value": "deaf to interrupts", "problem": problem}
        packet = reading.result()
    finally:
        reading.cancel()
        await asyncio.wait({reading})
    if not packet:
        # Its supervisor reports the death a little later.
        async with asyncio.timeout(_NEWS_S):
            await link.ready
        return None
    try:
        said = json.loads(packet)
        return {name: replace_surrogates(str(said[name])) for name in ("place", "value", "problem")} if said else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"place": "its process", "value": replace_surrogates(repr(packet[:80])), "problem": "it sent nonsense"}


async def _receive_packet(channel: socket.socket) -> bytes:
    """Return the next packet. It is empty at the end of the stream."""
    try:
        return await asyncio.get_running_loop().sock_recv(channel, _PACKET_BYTES)
    except OSError:
        return b""


def _make_setup_error(setup: WorkspaceContent, place: str, value: str, remedy: str) -> SetupError:
    return SetupError(f"workspace {setup.digest[:12]}, {place}", value, remedy)


class RunningForkServer(Protocol):
    """Fork server that has been started."""

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""

    def get_log_tail(self) -> str:
        """Return the end of its log."""

    async def stop(self) -> None:
        """End it, and every console that it forked."""


class ForkServerLauncher(Protocol):
    """Launcher of a fork server."""

    @property
    def isolates_consoles(self) -> bool:
        """True if each console gets its own namespaces."""

    @property
    def uses_own_uids(self) -> bool:
        """True if the fork server may change its user, so that each console gets its own user id."""

    @property
    def find_remedy(self) -> Callable[[str], str]:
        """Function from an error message to a remedy."""

    async def start(self) -> tuple[socket.socket, RunningForkServer]:
        """Start a fork server. Also return the socket on which it takes requests.

        Raises:
            SandboxUnavailable: it cannot be started here.
        """


class ForkServer:
    """Running fork server."""

    def __init__(
        self,
        connection: socket.socket,
        running: RunningForkServer,
        launch: ForkServerLauncher,
        born_within_s: float = BORN_WITHIN_S,
    ) -> None:
        """`born_within_s`: seconds to fork a console, after which the fork server counts as hung."""
        self._connection = connection
        self._running = running
        self._launch = launch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 8192
        self._door = SpawnSocket(
            connection,
            self._context,
            running.get_log_tail,
            isolated=launch.isolates_consoles,
            born_within_s=born_within_s,
        )
        self._door.is_lost = lambda: not self.is_alive
        self.python_version = (0, 0, 0)

    @classmethod
    async def start(cls, launch: ForkServerLauncher, born_within_s: float = BORN_WITHIN_S) -> Self:
        """Start a fork server, and wait until it has imported everything.

        Raises:
            SandboxUnavailable: it ended at once or did not answer; the message contains the end of its log.
        """
        starting = asyncio.ensure_future(cls._start(launch, born_within_s))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # If bubblewrap is killed before it is up, it leaves a process behind that waits for ever. So wait for the
            # start first.
            await asyncio.wait({starting})
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop()
            raise

    @classmethod
    async def _start(cls, launch: ForkServerLauncher, born_within_s: float) -> Self:
        connection, running = await launch.start()
        server = cls(connection, running, launch, born_within_s)
        try:
            await server._receive_hello()
        except BaseException:
            await server.stop()
            raise
        return server

    async def _receive_hello(self) -> None:
        self._connection.setblocking(False)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                packet = await asyncio.get_running_loop().sock_recv(self._connection, 4096)
        except (TimeoutError, OSError):
            packet = b""
        if not packet:
            # The last line of a traceback is the exception.
            words = self._running.get_log_tail().splitlines()[-1]
            reason = words.removeprefix(_OWN_WORDS)
            # The fork server's own messages already include a remedy.
            remedy = "" if reason != words else f"; {self._launch.find_remedy(words)}"
            raise SandboxUnavailable(f"the sandbox did not start: {reason}{remedy}")
        major, minor, micro = json.loads(packet)["python"]
        self.python_version = (int(major), int(minor), int(micro))

    @property
    def is_alive(self) -> bool:
        """False once the process has ended or is hung."""
        return self._running.is_alive and not self._door.is_closed()

    def get_log_tail(self) -> str:
        """Return the end of its log."""
        return self._running.get_log_tail()

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """As `SpawnSocket.open_console`."""
        return await self._door.open_console(limits, uid=self._allocate_uid(), decide=decide)

    async def prepare_workspace(self, setup: WorkspaceContent, limits: Limits) -> WorkspaceProcess:
        """As `SpawnSocket.prepare_workspace`."""
        return await self._door.prepare_workspace(setup, limits, uid=self._allocate_uid())

    def _allocate_uid(self) -> int:
        return draw_uid() if self._launch.uses_own_uids else 0

    async def stop(self) -> None:
        """End it, and every console that it forked."""
        self._connection.close()
        try:
            await self._running.stop()
        finally:
            self._context.destroy(linger=0)


def draw_uid() -> int:
    """Return the next user id for a console that root starts. No account of the machine has such an id."""
    return _FIRST_UID + next(_uids) % _UIDS


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """Process of a fork server, and its log."""

    process: asyncio.subprocess.Process
    log: IO[bytes]
    isolates_consoles: bool
    control_group: ControlGroup | None = None

    @property
    def is_alive(self) -> bool:
        """False once it has ended."""
        return self.process.returncode is None

    def get_log_tail(self) -> str:
        """Return the end of its log."""
        if self.log.closed:
            return "it was ended"
        self.log.seek(0)
        return self.log.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"

    async def stop(self) -> None:
        """Kill the process. Without namespaces it ends without a signal, after its consoles have cleaned up."""
        if self.process.returncode is None and self.isolates_consoles:
            self.process.kill()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        finally:
            if self.control_group is not None:
                await self.control_group.remove()
        self.log.close()


@dataclass(frozen=True, slots=True)
class ProcessLauncher:
    """Launcher of a fork server as a process."""

    argv: Sequence[str]
    """Command. `{fd}` is replaced by the number of the inherited socket."""
    isolates_consoles: bool
    uses_own_uids: bool
    find_remedy: Callable[[str], str]
    """Function from an error message to a remedy."""
    uses_control_group: bool = False
    """True if the process starts in a control group, if one can be made."""

    async def start(self) -> tuple[socket.socket, RunningProcess]:
        """As `ForkServerLauncher.start`. Call it on a thread that lives as long as the sandbox."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        group = self._create_control_group()
        log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        try:
            with theirs:
                argv = [part.replace("{fd}", str(theirs.fileno())) for part in self.argv]
                # Join the group before the program starts, so that all of its children are in it.
                argv = group.wrap_command(argv) if group else argv
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except BaseException as error:
            # A cancelled start must leave nothing behind, either.
            ours.close()
            log.close()
            if group is not None:
                await group.remove()
            if isinstance(error, OSError):
                remedy = self.find_remedy(str(error))
                raise SandboxUnavailable(f"{self.argv[0]} cannot be started: {error}; {remedy}") from error
            raise
        return ours, RunningProcess(process, log, self.isolates_consoles, group)

    def _create_control_group(self) -> ControlGroup | None:
        """Return a new control group, or None if none can be made. `repl-rl doctor` reports the reason."""
        try:
            return create_group() if self.uses_control_group else None
        except CgroupUnavailable:
            return None


@dataclass(slots=True, eq=False)
class _PooledWorkspace:
    """Workspace that is made or being made."""

    prepare_task: "asyncio.Task[WorkspaceProcess]"
    user_count: int = 0
    """Consoles that began with it, and leases that wait for one."""

    @property
    def is_usable(self) -> bool:
        """False if it must be made again, after an internal failure or a death. A rejected workspace stays rejected."""
        if not self.prepare_task.done():
            return True
        if self.prepare_task.cancelled():
            return False
        error = self.prepare_task.exception()
        return isinstance(error, SetupError) if error is not None else self.prepare_task.result().is_alive

    def close(self) -> None:
        """End its process, and every console that it forked."""
        if not self.prepare_task.done():
            self.prepare_task.cancel()
        elif not self.prepare_task.cancelled() and self.prepare_task.exception() is None:
            self.prepare_task.result().close()


class WorkspacePool:
    """Pool that leases consoles with a workspace. A workspace is made once, when its first console is leased."""

    def __init__(
        self,
        prepare: Callable[[WorkspaceContent], Awaitable[WorkspaceProcess]],
        birth: Callable[[WorkspaceProcess], Awaitable[ConsoleSession]],
        *,
        starting: int,
        shared: bool,
    ) -> None:
        """`starting`: consoles that start at the same time; `shared`: a workspace has one process for all consoles."""
        self._prepare = prepare
        self._birth = birth
        self._places = asyncio.Semaphore(starting)
        self._shared = shared
        self._kept: dict[object, _PooledWorkspace] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def lease(self, setup: WorkspaceContent) -> AsyncIterator[ConsoleSession]:
        """Lease a fresh console that begins with the workspace `setup`.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: no console could be started, after several tries.
        """
        # Without sharing, each lease has its own workspace process.
        key = setup.digest if self._shared else object()
        kept = self._get_or_prepare(key, setup)
        kept.user_count += 1
        try:
            session = await self._open_console_with_retry(kept, setup)
            try:
                yield session
            finally:
                session.close()
        finally:
            kept.user_count -= 1
            self._evict_idle()

    def _get_or_prepare(self, key: object, setup: WorkspaceContent) -> _PooledWorkspace:
        kept = self._kept.pop(key, None) or _PooledWorkspace(self._start_preparing(setup))
        # The dict keeps the order of use, the latest last.
        self._kept[key] = kept
        self._replace_workspace(kept, setup)
        return kept

    def _start_preparing(self, setup: WorkspaceContent) -> "asyncio.Task[WorkspaceProcess]":
        making = asyncio.create_task(_prepare_with_retries(self._prepare, setup))
        making.add_done_callback(_consume_result)
        return making

    def _replace_workspace(self, kept: _PooledWorkspace, setup: WorkspaceContent) -> None:
        if not kept.is_usable:
            kept.close()
            kept.prepare_task = self._start_preparing(setup)

    async def _open_console_with_retry(self, kept: _PooledWorkspace, setup: WorkspaceContent) -> ConsoleSession:
        for _ in range(_TRIES - 1):
            try:
                return await self._try_open_console(kept)
            except SandboxLost:
                raise
            except SandboxFault:
                self._replace_workspace(kept, setup)
        return await self._try_open_console(kept)

    async def _try_open_console(self, kept: _PooledWorkspace) -> ConsoleSession:
        # Other leases may wait for the same workspace.
        station = await asyncio.shield(kept.prepare_task)
        async with self._places:
            return await self._birth(station)

    def _evict_idle(self) -> None:
        idle = [key for key, kept in self._kept.items() if kept.user_count == 0]
        for key in idle[: max(0, len(idle) - (IDLE if self._shared else 0))]:
            self._kept.pop(key).close()

    async def close(self) -> None:
        """End all workspace processes, and every console that they forked."""
        kept = list(self._kept.values())
        self._kept.clear()
        for each in kept:
            each.close()
        await asyncio.gather(*(each.prepare_task for each in kept), return_exceptions=True)


async def _prepare_with_retries(
    prepare: Callable[[WorkspaceContent], Awaitable[WorkspaceProcess]], setup: WorkspaceContent
) -> WorkspaceProcess:
    """Call `prepare`, and retry after an internal failure."""
    for _ in range(_TRIES - 1):
        try:
            return await prepare(setup)
        except SandboxLost:
            raise
        except SandboxFault:
            continue
    return await prepare(setup)


def _consume_result(making: "asyncio.Task[WorkspaceProcess]") -> None:
    """Retrieve the exception, because every waiting task may be gone."""
    if not making.cancelled():
        making.exception()
