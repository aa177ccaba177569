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
from repl_rl.sandbox.jupyter_wire import replace_surrogates
from repl_rl.trajectory.trajectory import WorkspaceContent

FORK_TIMEOUT_S = 30.0
"""Time for a fork server to fork a process, seconds. One that takes longer counts as hung."""
_START_TIMEOUT_S = 120.0
"""Time for a fork server to import everything, seconds."""
_READY_TIMEOUT_S = 30.0
_DEATH_REPORT_S = 2.0
"""Time for the supervisor to report the death of a workspace process whose socket is closed, seconds."""
_STOP_TIMEOUT_S = 10.0
"""Time for a process without namespaces to end after its consoles, seconds. After it, the process is killed."""
_PACKET_BYTES = 65_536
_SIGXCPU = 24
"""Signal at the limit of CPU time."""
_MESSAGE_PREFIX = "repl_kernel: "
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
        get_log_tail: Callable[[], str],
        *,
        isolated: bool,
        fork_timeout_s: float = FORK_TIMEOUT_S,
    ) -> None:
        """`get_log_tail` returns the end of the fork server's log. For `isolated`, see `SupervisorClient`."""
        self.connection = connection
        self._fork_timeout_s = fork_timeout_s
        self.is_broken = False
        """True once the process behind the socket is gone or hung."""
        self._context = context
        self._get_log_tail = get_log_tail
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
        """Return a fresh console, ready for its first line.

        `uid` is the console's user id outside of its namespaces; 0 means the user id of the forking process.

        Raises:
            SandboxFault: the console died or was not ready in time.
        """
        key = secrets.token_hex(32)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Send the key on the console's own socket. Every later console can read the memory of the fork server.
        ours.send(key.encode())
        supervisor = self._make_supervisor_client(ours, limits)
        try:
            with theirs:
                self._send_request(_encode_request(limits, uid), theirs)
            await self._wait_for_fork(supervisor)
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await supervisor.ready
            if supervisor.exit_info is not None or self._context.closed:
                # The console died, or its fork server was stopped meanwhile.
                raise SandboxFault(f"a console died at its start: {self._get_log_tail()}")
            return ConsoleSession(
                supervisor, key, limits, self._context, decide=decide, is_source_lost=lambda: self.is_lost()
            )
        except TimeoutError:
            supervisor.close()
            raise SandboxFault(f"a console was not ready after {_READY_TIMEOUT_S:g} s") from None
        except OSError as error:
            supervisor.close()
            raise SandboxFault(f"a console cannot be reached: {error}") from error
        except BaseException:
            supervisor.close()
            raise

    async def prepare_workspace(self, setup: WorkspaceContent, limits: Limits, *, uid: int) -> "WorkspaceProcess":
        """Start a process, make a workspace in it, and return it as a source of consoles with that workspace.

        Raises:
            SetupError: the workspace cannot be made, within the limits of a console and `limits.cpu_s` of wall clock.
            SandboxFault: the process could not be isolated, or no reply came.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The workspace process takes its requests for consoles on this channel.
        channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        supervisor = self._make_supervisor_client(ours, limits)
        try:
            with theirs, their_channel, _open_memory_file(setup.content) as content:
                self._send_request(_encode_request(limits, uid, prepares=True), theirs, their_channel, content)
            await self._wait_for_fork(supervisor)
            result = await _receive_workspace_result(channel, supervisor, limits)
            # Without a reply, the process has ended. A non-empty reply is a problem of the workspace.
            if result is None:
                raise self._make_workspace_error(setup, supervisor.exit_info, limits)
            if result:
                raise _make_setup_error(
                    setup, result["place"], result["value"], f"{result['problem']}; correct the workspace"
                )
            spawn_socket = SpawnSocket(
                channel,
                self._context,
                self._get_log_tail,
                isolated=self._isolated,
                fork_timeout_s=self._fork_timeout_s,
            )
            return WorkspaceProcess(spawn_socket, supervisor)
        except BaseException:
            supervisor.close()
            channel.close()
            raise

    async def _wait_for_fork(self, supervisor: SupervisorClient) -> None:
        """Wait until the requested process is forked, or has died.

        Raises:
            SandboxFault: the fork server is hung.
        """
        try:
            async with asyncio.timeout(self._fork_timeout_s):
                await supervisor.forked
        except TimeoutError:
            self.is_broken = True
            raise SandboxFault(f"the fork server hangs: it forked no process for {self._fork_timeout_s:g} s") from None

    def _make_supervisor_client(self, connection: socket.socket, limits: Limits) -> SupervisorClient:
        return SupervisorClient(connection, isolated=self._isolated, max_text_bytes=2 * limits.output_bytes)

    def _send_request(self, request: bytes, *sockets: socket.socket | int) -> None:
        descriptors = [item if isinstance(item, int) else item.fileno() for item in sockets]
        try:
            socket.send_fds(self.connection, [request], descriptors)
        except BlockingIOError:
            # The fork server lives, but the queue of its socket is full.
            raise SandboxFault("the queue of the fork server is full") from None
        except OSError as error:
            self.is_broken = True
            raise SandboxFault(f"the fork server is gone: {error}") from error

    def _make_workspace_error(
        self, setup: WorkspaceContent, death: ConsoleDeath | None, limits: Limits
    ) -> SetupError | SandboxFault:
        """Return the error for a workspace process that ended without a reply."""
        if death is None or death.code is None:
            return SandboxFault(f"a workspace's process died at its start: {self._get_log_tail()}")
        reason = f"it ended its process ({death.code}) while it was made"
        if death.code == -_SIGXCPU:
            reason = f"it takes more than {limits.cpu_s:g} s of CPU; make it smaller, or give a larger limits.cpu_s"
        elif death.code < 0:
            reason = f"it was killed by signal {-death.code} while it was made; it may take too much memory or time"
        return _make_setup_error(setup, "its end", replace_surrogates(death.text[-200:]), reason)


class WorkspaceProcess:
    """Workspace process: a process in which a workspace was made, and from which consoles are forked."""

    def __init__(self, spawn_socket: SpawnSocket, supervisor: SupervisorClient) -> None:
        self._spawn_socket = spawn_socket
        self._supervisor = supervisor
        self.on_close: Callable[[], None] = lambda: None
        """Called once, when it is released."""

    @property
    def is_alive(self) -> bool:
        """False once the process of this workspace has ended, together with its consoles, or hangs."""
        return self._supervisor.exit_info is None and not self._spawn_socket.is_broken

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """As `SpawnSocket.open_console`. Consoles of one workspace have separate namespaces, and the same user id
        outside of them."""
        return await self._spawn_socket.open_console(limits, uid=0, decide=decide)

    def close(self) -> None:
        """End it, and every console that it forked."""
        self._spawn_socket.connection.close()
        self._supervisor.close()
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
    channel: socket.socket, supervisor: SupervisorClient, limits: Limits
) -> Mapping[str, str] | None:
    """Return the problem of a workspace, or an empty mapping. None means that its process ended without a reply."""
    # Use one task for both periods: a packet that arrives while its reading is cancelled would be lost.
    receive_task = asyncio.create_task(_receive_packet(channel))
    try:
        done, _ = await asyncio.wait({receive_task}, timeout=limits.cpu_s)
        if not done:
            supervisor.interrupt()
            done, _ = await asyncio.wait({receive_task}, timeout=limits.interrupt_grace_s)
        if not done:
            problem = f"it takes more than {limits.cpu_s:g} s"
            return {"place": "its end", "value": "ignores interrupts", "problem": problem}
        packet = receive_task.result()
    finally:
        receive_task.cancel()
        await asyncio.wait({receive_task})
    if not packet:
        # Its supervisor reports the death a little later.
        async with asyncio.timeout(_DEATH_REPORT_S):
            await supervisor.ready
        return None
    try:
        result = json.loads(packet)
        return {name: replace_surrogates(str(result[name])) for name in ("place", "value", "problem")} if result else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {
            "place": "its process",
            "value": replace_surrogates(repr(packet[:80])),
            "problem": "it sent an invalid reply",
        }


async def _receive_packet(channel: socket.socket) -> bytes:
    """Return the next packet. It is empty at the end of the stream."""
    try:
        return await asyncio.get_running_loop().sock_recv(channel, _PACKET_BYTES)
    except OSError:
        return b""


def _make_setup_error(setup: WorkspaceContent, location: str, value: str, remedy: str) -> SetupError:
    return SetupError(f"workspace {setup.digest[:12]}, {location}", value, remedy)


class RunningForkServer(Protocol):
    """Fork server that has been started."""

    @property
    def is_alive(self) -> bool:
        """False once the fork server has ended."""

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
        handle: RunningForkServer,
        launch: ForkServerLauncher,
        fork_timeout_s: float = FORK_TIMEOUT_S,
    ) -> None:
        """`fork_timeout_s`: seconds to fork a console, after which the fork server counts as hung."""
        self._connection = connection
        self._handle = handle
        self._launch = launch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 8192
        self._spawn_socket = SpawnSocket(
            connection,
            self._context,
            handle.get_log_tail,
            isolated=launch.isolates_consoles,
            fork_timeout_s=fork_timeout_s,
        )
        self._spawn_socket.is_lost = lambda: not self.is_alive
        self.python_version = (0, 0, 0)

    @classmethod
    async def start(cls, launch: ForkServerLauncher, fork_timeout_s: float = FORK_TIMEOUT_S) -> Self:
        """Start a fork server, and wait until it has imported everything.

        Raises:
            SandboxUnavailable: it ended at once or did not answer; the message contains the end of its log.
        """
        start_task = asyncio.ensure_future(cls._start(launch, fork_timeout_s))
        try:
            return await asyncio.shield(start_task)
        except asyncio.CancelledError:
            # If bubblewrap is killed before it is up, it leaves a process behind that waits for ever. So wait for the
            # start first.
            await asyncio.wait({start_task})
            if not start_task.cancelled() and start_task.exception() is None:
                await start_task.result().stop()
            raise

    @classmethod
    async def _start(cls, launch: ForkServerLauncher, fork_timeout_s: float) -> Self:
        connection, handle = await launch.start()
        server = cls(connection, handle, launch, fork_timeout_s)
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
            last_line = self._handle.get_log_tail().splitlines()[-1]
            reason = last_line.removeprefix(_MESSAGE_PREFIX)
            # The fork server's own messages already include a remedy.
            remedy = "" if reason != last_line else f"; {self._launch.find_remedy(last_line)}"
            raise SandboxUnavailable(f"the sandbox did not start: {reason}{remedy}")
        major, minor, micro = json.loads(packet)["python"]
        self.python_version = (int(major), int(minor), int(micro))

    @property
    def is_alive(self) -> bool:
        """False once the process has ended or is hung."""
        return self._handle.is_alive and not self._spawn_socket.is_closed()

    def get_log_tail(self) -> str:
        """Return the end of its log."""
        return self._handle.get_log_tail()

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """As `SpawnSocket.open_console`."""
        return await self._spawn_socket.open_console(limits, uid=self._allocate_uid(), decide=decide)

    async def prepare_workspace(self, setup: WorkspaceContent, limits: Limits) -> WorkspaceProcess:
        """As `SpawnSocket.prepare_workspace`."""
        return await self._spawn_socket.prepare_workspace(setup, limits, uid=self._allocate_uid())

    def _allocate_uid(self) -> int:
        return draw_uid() if self._launch.uses_own_uids else 0

    async def stop(self) -> None:
        """End it, and every console that it forked."""
        self._connection.close()
        try:
            await self._handle.stop()
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
            return "it was stopped"
        self.log.seek(0)
        return self.log.read()[-2000:].decode("utf-8", "replace").strip() or "it printed nothing"

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
        open_console: Callable[[WorkspaceProcess], Awaitable[ConsoleSession]],
        *,
        starting: int,
        shared: bool,
    ) -> None:
        """`starting`: maximum consoles that start at once; `shared`: one process serves all consoles of a workspace."""
        self._prepare = prepare
        self._open_console = open_console
        self._start_slots = asyncio.Semaphore(starting)
        self._shared = shared
        self._pooled: dict[object, _PooledWorkspace] = {}

    def __len__(self) -> int:
        return len(self._pooled)

    @asynccontextmanager
    async def lease(self, setup: WorkspaceContent) -> AsyncIterator[ConsoleSession]:
        """Lease a fresh console that begins with the workspace `setup`.

        Raises:
            SetupError: the workspace cannot be made.
            SandboxFault: no console could be started, after several tries.
        """
        # Without sharing, each lease has its own workspace process.
        key = setup.digest if self._shared else object()
        pooled = self._get_or_prepare(key, setup)
        pooled.user_count += 1
        try:
            session = await self._open_console_with_retry(pooled, setup)
            try:
                yield session
            finally:
                session.close()
        finally:
            pooled.user_count -= 1
            self._evict_idle()

    def _get_or_prepare(self, key: object, setup: WorkspaceContent) -> _PooledWorkspace:
        pooled = self._pooled.pop(key, None) or _PooledWorkspace(self._start_preparing(setup))
        # The dict keeps the order of use, the latest last.
        self._pooled[key] = pooled
        self._replace_workspace(pooled, setup)
        return pooled

    def _start_preparing(self, setup: WorkspaceContent) -> "asyncio.Task[WorkspaceProcess]":
        prepare_task = asyncio.create_task(_prepare_with_retries(self._prepare, setup))
        prepare_task.add_done_callback(_consume_result)
        return prepare_task

    def _replace_workspace(self, pooled: _PooledWorkspace, setup: WorkspaceContent) -> None:
        if not pooled.is_usable:
            pooled.close()
            pooled.prepare_task = self._start_preparing(setup)

    async def _open_console_with_retry(self, pooled: _PooledWorkspace, setup: WorkspaceContent) -> ConsoleSession:
        for _ in range(_TRIES - 1):
            try:
                return await self._try_open_console(pooled)
            except SandboxLost:
                raise
            except SandboxFault:
                self._replace_workspace(pooled, setup)
        return await self._try_open_console(pooled)

    async def _try_open_console(self, pooled: _PooledWorkspace) -> ConsoleSession:
        # Other leases may wait for the same workspace.
        workspace = await asyncio.shield(pooled.prepare_task)
        async with self._start_slots:
            return await self._open_console(workspace)

    def _evict_idle(self) -> None:
        idle = [key for key, pooled in self._pooled.items() if pooled.user_count == 0]
        for key in idle[: max(0, len(idle) - (IDLE if self._shared else 0))]:
            self._pooled.pop(key).close()

    async def close(self) -> None:
        """End all workspace processes, and every console that they forked."""
        workspaces = list(self._pooled.values())
        self._pooled.clear()
        for workspace in workspaces:
            workspace.close()
        await asyncio.gather(*(workspace.prepare_task for workspace in workspaces), return_exceptions=True)


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


def _consume_result(prepare_task: "asyncio.Task[WorkspaceProcess]") -> None:
    """Retrieve the exception, because every waiting task may be gone."""
    if not prepare_task.cancelled():
        prepare_task.exception()
