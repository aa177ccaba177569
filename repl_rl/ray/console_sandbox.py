"""Sandbox `nodes`, whose consoles are on the machines of a cluster, behind the interface `HostMachines`.

- messages and interfaces between the sandbox and the processes that hold its consoles
- `ConsoleHost`, such a process, and `LeaseQueue`, which chooses the host of a console
- `ConsoleHostPool`, which starts and replaces hosts
- `HostedSession`, a console as its rollout sees it, and `HostedSandbox`

Nothing here depends on Ray.

Deadlines are enforced by `ConsoleHost`, on the console's machine, so that network latency does not count towards a
line.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure, SandboxFault, SandboxLost, SandboxUnavailable
from repl_rl.sandbox import SANDBOXES
from repl_rl.sandbox.base import (
    HostCallHandler,
    LineResult,
    Sandbox,
    SandboxOptions,
    SandboxSession,
    SupportsHostFunctions,
    open_console,
    validate_line,
)
from repl_rl.sandbox.console_pool import PATIENCE_S
from repl_rl.trajectory.trajectory import WorkspaceContent

H = TypeVar("H")
T = TypeVar("T")

log = logging.getLogger(__name__)

_CLEANUP_S = 10.0
"""Time for host functions to end after their line, seconds."""


class ConsoleHostLost(SandboxLost):
    """Error for a console whose process or machine is gone."""


@dataclass(frozen=True, slots=True)
class WorkspacePayload:
    """Workspace in transit; see `WorkspaceContent`."""

    digest: str
    content: bytes


@dataclass(frozen=True, slots=True)
class HostFunctionOffer:
    """Functions of the host that lines may call; see `HostCallHandler`."""

    functions: Mapping[str, str]
    argument_bytes: int


@dataclass(frozen=True, slots=True)
class LineProgress:
    """Progress of a line: its end, or calls of host functions that wait for an answer."""

    calls: tuple[tuple[int, bytes], ...] = ()
    """Calls, each with its number."""
    result: LineResult | None = None
    """Result of the line. None means that the line still runs: call `wait_progress` next."""
    ended: bool = False
    """True if no further line can be pushed."""


class RemoteConsoleHost(Protocol):
    """Client interface to the process that runs the consoles of one machine. The caller numbers the consoles.

    Every call raises ConsoleHostLost if that process is gone.
    """

    name: str
    """Name of its machine."""

    async def open(self, kind: str, births: SandboxOptions) -> tuple[int, int, int]:
        """Open a sandbox of type `kind` on the machine. Return the Python version of its consoles.

        Raises:
            SandboxUnavailable: the machine cannot provide that sandbox.
        """

    async def lease(self, number: int, setup: WorkspacePayload | None) -> None:
        """Lease a fresh console. `setup` is its workspace; None means an empty console.

        Raises:
            SetupError, SandboxFault: as in the sandbox there.
        """

    async def push(self, number: int, line: str, offered: HostFunctionOffer | None) -> LineProgress:
        """Start a line, and wait until it ends or calls a host function. `offered` is None after the first line.

        Raises:
            SandboxLost: the console died together with its fork server or container.
        """

    async def wait_progress(self, number: int) -> LineProgress:
        """Wait until the running line ends or calls a host function, and return its progress. Raises as `push` does."""

    async def reply_to_call(self, number: int, call: int, content: bytes) -> None:
        """Answer a call. The answer is ignored if the call has ended."""

    async def close(self, number: int) -> None:
        """End a console in any state. If `lease` has not begun for this number, it will open no console."""

    async def check_alive(self) -> None:
        """Return, as a heartbeat: the process lives, and its event loop runs."""

    async def end(self) -> None:
        """Close the sandbox there, with all of its consoles."""

    def kill(self) -> None:
        """End the process at once. Waiting calls raise ConsoleHostLost."""


class HostMachines(Protocol):
    """Machines on which console hosts can run."""

    async def list_names(self) -> Sequence[str]:
        """Return the names of the machines that are alive.

        Raises:
            ConsoleHostLost: the cluster does not answer.
        """

    async def start_host(self, name: str) -> RemoteConsoleHost:
        """Start a console host on a machine. Its process ends with the calling process.

        Raises:
            ConsoleHostLost: the process does not start.
        """


class HostCallRelay:
    """`HostCallHandler` of one console that leaves the answers of host functions to another process."""

    def __init__(self, offered: HostFunctionOffer) -> None:
        self._offered = offered
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._untold: list[tuple[int, bytes]] = []
        self.call_arrived = asyncio.Event()
        """Set while there are calls that were not reported yet."""

    @property
    def functions(self) -> Mapping[str, str]:
        """As `HostCallHandler.functions`."""
        return self._offered.functions

    @property
    def argument_bytes(self) -> int:
        """As `HostCallHandler.argument_bytes`."""
        return self._offered.argument_bytes

    async def answer_call(self, call: bytes) -> bytes:
        """As `HostCallHandler.answer_call`."""
        number = next(self._numbers)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        self._untold.append((number, call))
        self.call_arrived.set()
        try:
            return await reply
        finally:
            del self._waiting[number]

    def take_unsent_calls(self) -> tuple[tuple[int, bytes], ...]:
        """Return the calls that were not reported yet, each with its number. Calls of an ended line are left out."""
        calls, self._untold = self._untold, []
        self.call_arrived.clear()
        return tuple(call for call in calls if call[0] in self._waiting)

    def set_answer(self, number: int, content: bytes) -> None:
        """Answer a call."""
        reply = self._waiting.get(number)
        if reply is not None and not reply.done():
            reply.set_result(content)


class _ConsoleLease:
    """Lease of a console, and its running line."""

    def __init__(self, sandbox: Sandbox, setup: WorkspacePayload | None) -> None:
        self.exit_stack = AsyncExitStack()
        entering = self.exit_stack.enter_async_context(open_console(sandbox, setup))
        self.open_task: asyncio.Task[SandboxSession] = asyncio.create_task(entering)
        self.open_task.add_done_callback(_consume_result)
        self.line_task: asyncio.Task[LineResult] | None = None
        self.relay: HostCallRelay | None = None

    async def close(self) -> None:
        """End the console, and cancel its running line."""
        running = [task for task in (self.line_task, self.open_task) if task is not None and not task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self.exit_stack.aclose()


class ConsoleHost:
    """Holder of the consoles on one machine. All methods run on one event loop.

    It runs an ordinary sandbox, and identifies each console by a number.
    """

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._leases: dict[int, _ConsoleLease] = {}
        self._refused: set[int] = set()
        """Numbers that were closed before their lease began, because calls may overtake each other."""

    async def open(self, kind: str, births: SandboxOptions) -> tuple[int, int, int]:
        """See `RemoteConsoleHost.open`."""
        self._sandbox = await self._stack.enter_async_context(SANDBOXES.get(kind)().open(births))
        return self._sandbox.python_version

    async def lease(self, number: int, setup: WorkspacePayload | None) -> None:
        """See `RemoteConsoleHost.lease`."""
        if self._sandbox is None:
            raise SandboxFault("the sandbox on this machine is not open")
        # `close` came first, so nothing is leased.
        if number in self._refused:
            self._refused.discard(number)
            return
        lease = self._leases[number] = _ConsoleLease(self._sandbox, setup)
        # `close` may cancel the task, which is no error here.
        await asyncio.wait({lease.open_task})
        if not lease.open_task.cancelled() and (error := lease.open_task.exception()) is not None:
            self._leases.pop(number, None)
            raise error

    async def push(self, number: int, line: str, offered: HostFunctionOffer | None) -> LineProgress:
        """See `RemoteConsoleHost.push`."""
        # Offer the host functions before the first line, then start the line and wait for its first turn.
        lease = self._get_lease(number)
        session = lease.open_task.result()
        if offered is not None and isinstance(session, SupportsHostFunctions):
            lease.relay = HostCallRelay(offered)
            session.offer_functions(lease.relay)
        lease.line_task = asyncio.create_task(session.push(line))
        lease.line_task.add_done_callback(_consume_result)
        return await self.wait_progress(number)

    async def wait_progress(self, number: int) -> LineProgress:
        """See `RemoteConsoleHost.wait_progress`."""
        lease = self._get_lease(number)
        if lease.line_task is None:
            raise SandboxFault(f"console {number} runs no line")
        # Wait for the end of the line or for a call of a host function.
        called = asyncio.create_task(lease.relay.call_arrived.wait()) if lease.relay is not None else None
        try:
            await asyncio.wait(
                {lease.line_task} if called is None else {lease.line_task, called}, return_when="FIRST_COMPLETED"
            )
        finally:
            if called is not None:
                called.cancel()
        if not lease.line_task.done():
            return LineProgress(lease.relay.take_unsent_calls() if lease.relay is not None else ())
        if lease.line_task.cancelled():
            raise SandboxFault("the console was closed")
        # The line has ended. Its calls need no answers any more.
        return LineProgress((), lease.line_task.result(), lease.open_task.result().ended)

    async def reply_to_call(self, number: int, call: int, content: bytes) -> None:
        """See `RemoteConsoleHost.reply_to_call`."""
        lease = self._leases.get(number)
        if lease is not None and lease.relay is not None:
            lease.relay.set_answer(call, content)

    async def close(self, number: int) -> None:
        """See `RemoteConsoleHost.close`."""
        lease = self._leases.pop(number, None)
        if lease is None:
            self._refused.add(number)
        else:
            await lease.close()

    async def check_alive(self) -> None:
        """See `RemoteConsoleHost.check_alive`."""

    async def end(self) -> None:
        """See `RemoteConsoleHost.end`."""
        leases = list(self._leases.values())
        self._leases.clear()
        await asyncio.gather(*(lease.close() for lease in leases))
        await self._stack.aclose()

    def _get_lease(self, number: int) -> _ConsoleLease:
        lease = self._leases.get(number)
        if lease is None:
            raise SandboxFault("the console was closed")
        return lease


def _consume_result(task: asyncio.Future[T]) -> None:
    """Retrieve the exception, because the task that waits for it may be gone."""
    if not task.cancelled():
        task.exception()


class LeaseQueue(Generic[H]):
    """Slots for consoles on hosts, the same number on each.

    The host with the fewest consoles gives the next slot, and waiting tasks are served in order. The queue depends
    neither on a clock nor on consoles.
    """

    def __init__(self, most: int) -> None:
        """`most`: maximum consoles per host at a time (>= 1)."""
        self._most = most
        self._leases_by_host: dict[H, int] = {}
        """Consoles per host. The host that was chosen last is at the end, so that ties go to the others."""
        self._waiting: deque[asyncio.Future[H]] = deque()

    @property
    def leases_per_host(self) -> dict[H, int]:
        """Consoles per host."""
        return dict(self._leases_by_host)

    @property
    def waiting_count(self) -> int:
        """Number of tasks that wait for a slot."""
        return sum(not one.done() for one in self._waiting)

    def add_host(self, host: H) -> None:
        """Add a host."""
        self._leases_by_host.setdefault(host, 0)
        self._grant_waiting()

    def remove_host(self, host: H) -> None:
        """Remove a host, with its consoles."""
        self._leases_by_host.pop(host, None)

    def fail_waiting(self, error: Callable[[], Exception]) -> None:
        """Fail all waiting tasks. Later tasks wait again."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error())

    async def acquire(self) -> H:
        """Wait for a slot on a host. The slot belongs to the caller until `release`.

        Raises:
            Exception: the error that `fail_waiting` makes.
        """
        waiting: asyncio.Future[H] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._grant_waiting()
        try:
            return await waiting
        except asyncio.CancelledError:
            # The slot was assigned just before the cancellation; release it.
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.release(waiting.result())
            with suppress(ValueError):
                self._waiting.remove(waiting)
            raise

    def release(self, host: H) -> None:
        """Release a slot. A slot on a removed host is ignored."""
        if host in self._leases_by_host:
            self._leases_by_host[host] -= 1
            self._grant_waiting()

    def _grant_waiting(self) -> None:
        while self._waiting and self._leases_by_host:
            host = min(self._leases_by_host, key=self._leases_by_host.__getitem__)
            if self._leases_by_host[host] >= self._most:
                return
            waiting = self._waiting.popleft()
            if not waiting.done():
                # Move the host to the end, so that ties go to the others.
                self._leases_by_host[host] = self._leases_by_host.pop(host) + 1
                waiting.set_result(host)


@dataclass(frozen=True, slots=True)
class HostTimeouts:
    """Intervals and timeouts, seconds."""

    poll_interval_s: float = 2.0
    """Interval between queries for the machines of the cluster."""
    heartbeat_interval_s: float = 2.0
    """Interval between heartbeats of a host."""
    start_timeout_s: float = 120.0
    """Timeout for the start of a host's process."""
    heartbeat_timeout_s: float = 30.0
    """Timeout of a heartbeat. A host that exceeds it is lost."""
    restart_delays_s: tuple[float, ...] = PATIENCE_S
    """Pauses after successive failed starts of a host on a machine. The last one repeats. If no machine has a host for
    longer than the sum of the pauses, waiting leases fail."""
    end_timeout_s: float = 20.0
    """Time for hosts to end their consoles before they are killed."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """Settings of every host."""

    kind: str
    """Name of the sandbox on each machine."""
    options: SandboxOptions
    """Options for all machines together. The warm consoles are spread over the machines."""
    max_consoles: int
    """Maximum consoles per machine at a time."""
    timeouts: HostTimeouts = field(default_factory=HostTimeouts)

    def divide_options(self, machines: int) -> SandboxOptions:
        """Return the options for each of `machines` machines."""
        # Rounded up, so that all machines together have at least the wanted number.
        warm = min(self.max_consoles, -(-self.options.pool_size // max(1, machines)))
        return SandboxOptions(
            self.options.limits, tuple(self.options.preload), warm, self.options.max_concurrent_starts
        )


class ConsoleHostPool:
    """Console hosts of one sandbox, one per machine. Call `open` first, and `close` at the end.

    It detects lost hosts by heartbeats, and replaces them.
    """

    def __init__(self, machines: HostMachines, spec: HostSpec) -> None:
        self._machines, self._spec, self._waits = machines, spec, spec.timeouts
        self.leases: LeaseQueue[RemoteConsoleHost] = LeaseQueue(spec.max_consoles)
        self._python_version: tuple[int, int, int] | None = None
        self._up: dict[str, _LiveHost] = {}
        self._tried: dict[str, _StartFailures] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._births = spec.options
        self._watching: asyncio.Task[None] | None = None
        self._last_words = "no host was started"

    async def open(self) -> tuple[int, int, int]:
        """Start a host on each machine. Return the version of the Python inside.

        Raises:
            SandboxUnavailable: the cluster has no machine, or none of its machines can hold a console.
        """
        try:
            names = list(await self._machines.list_names())
        except ConsoleHostLost as lost:
            raise SandboxUnavailable(f"sandbox 'nodes': its cluster is gone ({lost}); start it again") from lost
        if not names:
            raise SandboxUnavailable("sandbox 'nodes': no machine of the cluster has CPUs; add some with `ray start`")
        # Start all hosts together. One that works is enough; the others are retried later.
        self._births = self._spec.divide_options(len(names))
        await asyncio.gather(*(self._try_start_host(name) for name in names))
        if self._python_version is None:
            raise SandboxUnavailable(f"sandbox 'nodes': no machine holds consoles: {self._last_words}")
        self._watching = asyncio.create_task(self._watch_machines())
        return self._python_version

    async def _try_start_host(self, name: str) -> None:
        """Start a host on a machine. A failure is logged, and retried later."""
        tried = self._tried.setdefault(name, _StartFailures())
        try:
            await self._start_host(name)
        except (ReplRLError, RolloutFailure) as error:
            # The pause depends on the number of failed starts in a row on this machine.
            pauses = self._waits.restart_delays_s
            pause_s = pauses[min(tried.count, len(pauses) - 1)]
            tried.count, tried.retry_at_s = tried.count + 1, time.monotonic() + pause_s
            self._last_words = f"on {name}: {error}"
            log.warning("machine %s holds no consoles (%s); the next try is in %g s", name, error, pause_s)
        else:
            self._tried.pop(name, None)
        finally:
            self._trying.pop(name, None)

    async def _start_host(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._waits.start_timeout_s):
                host = await self._machines.start_host(name)
        except TimeoutError:
            raise ConsoleHostLost(f"its process has not started within {self._waits.start_timeout_s:g} s") from None
        # Heartbeats also cover the opening of the sandbox, which may hang.
        asking = asyncio.create_task(self._poll_heartbeat(host))
        try:
            version = await host.open(self._spec.kind, self._births)
            # All hosts must have the same Python, because the sandbox has one `python_version`.
            first = self._python_version or version
            if version != first:
                mine, theirs = (".".join(map(str, one)) for one in (first, version))
                raise SandboxFault(f"its consoles have Python {theirs}, other machines have {mine}; use one version")
        except BaseException:
            asking.cancel()
            host.kill()
            raise
        self._python_version = version
        self._up[name] = _LiveHost(host, asking)
        self.leases.add_host(host)

    async def _poll_heartbeat(self, host: RemoteConsoleHost) -> None:
        """Send heartbeats to a host until it does not answer."""
        try:
            while True:
                async with asyncio.timeout(self._waits.heartbeat_timeout_s):
                    await host.check_alive()
                await asyncio.sleep(self._waits.heartbeat_interval_s)
        except ConsoleHostLost as lost:
            self.on_host_lost(host, str(lost))
        except TimeoutError:
            self.on_host_lost(host, f"it has not answered for {self._waits.heartbeat_timeout_s:g} s")

    def on_host_lost(self, host: RemoteConsoleHost, why: str) -> None:
        """Remove a lost host and kill its process. It gets no further leases; calls in flight raise ConsoleHostLost."""
        # The machine may have a newer host by now, which stays.
        up = self._up.get(host.name)
        if up is not None and up.host is host:
            log.warning("the consoles on machine %s are lost: %s", host.name, why)
            self._last_words = f"on {host.name}: {why}"
            self._up.pop(host.name).heartbeat_task.cancel()
            self.leases.remove_host(host)
        host.kill()

    async def _watch_machines(self) -> None:
        """Start hosts on new machines, and on machines whose host is gone."""
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(self._waits.poll_interval_s)
            with suppress(ConsoleHostLost):
                due = [name for name in await self._machines.list_names() if self._is_retry_due(name)]
                for name in due:
                    # Start each in its own task, so that a slow machine does not delay the others.
                    self._trying[name] = asyncio.create_task(self._try_start_host(name))
            now_s = time.monotonic()
            # Measure the time without any host.
            since_s = now_s if self._up else since_s
            if now_s - since_s > sum(self._waits.restart_delays_s):
                self.leases.fail_waiting(lambda: SandboxLost(f"no machine holds consoles: {self._last_words}"))

    def _is_retry_due(self, name: str) -> bool:
        if name in self._up or name in self._trying:
            return False
        return name not in self._tried or time.monotonic() >= self._tried[name].retry_at_s

    async def close(self) -> None:
        """End all hosts and their consoles."""
        self.leases.fail_waiting(lambda: SandboxFault("the sandbox is closed"))
        if self._watching is not None:
            # This task starts others, so end it first.
            self._watching.cancel()
            await asyncio.wait({self._watching})
        # Stop heartbeats and starts. A host that is still starting is killed by its own task.
        tasks = [*(up.heartbeat_task for up in self._up.values()), *self._trying.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hosts = [up.host for up in self._up.values()]
        self._up.clear()
        await asyncio.gather(*(self._end_host(host) for host in hosts))

    async def _end_host(self, host: RemoteConsoleHost) -> None:
        self.leases.remove_host(host)
        try:
            async with asyncio.timeout(self._waits.end_timeout_s):
                await host.end()
        except (TimeoutError, ReplRLError, RolloutFailure) as error:
            log.warning("the consoles on machine %s were killed: %s", host.name, error or "they did not end in time")
        finally:
            host.kill()


@dataclass(slots=True)
class _StartFailures:
    """Failed starts on a machine."""

    count: int = 0
    retry_at_s: float = 0.0


@dataclass(slots=True)
class _LiveHost:
    """Running host, and the task that sends its heartbeats."""

    host: RemoteConsoleHost
    heartbeat_task: "asyncio.Task[None]"


class HostedSession:
    """Console that a host holds, with one call per line. Two tasks must not use it at once."""

    def __init__(self, host: RemoteConsoleHost, number: int, lost: Callable[[str], None]) -> None:
        """`lost` is called if the host is gone."""
        self._hosting, self._number, self._lost = host, number, lost
        self._host: HostCallHandler | None = None
        self._is_offered = self._ended = False

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    def offer_functions(self, host: HostCallHandler) -> None:
        """As `SupportsHostFunctions.offer_functions`."""
        if self._is_offered:
            raise ConfigError(
                "session.offer_functions()", "after a line ran", "offer host functions before the first line"
            )
        self._host = host

    async def push(self, line: str) -> LineResult:
        """As `SandboxSession.push`. `elapsed_s` includes the latency of the network.

        Raises:
            SandboxLost: the console died with its fork server or container, or its process or machine is gone.
        """
        validate_line(line, ended=self._ended)
        started = time.perf_counter()
        # True until the reply comes: after a cancelled push, the state of the console is unknown.
        self._ended = True
        offered, self._is_offered = self._build_offer(), True
        answering: set[asyncio.Task[None]] = set()
        try:
            turn = await self._hosting.push(self._number, line, offered)
            while turn.result is None:
                # Answer the calls of host functions while the line runs on.
                answering |= {asyncio.create_task(self._answer_call(*call)) for call in turn.calls}
                turn = await self._wait_next_progress(answering)
        except ConsoleHostLost as lost:
            self._lost(str(lost))
            raise
        finally:
            await _cancel_tasks(answering)
        self._ended = turn.ended
        return replace(turn.result, elapsed_s=time.perf_counter() - started)

    def _build_offer(self) -> HostFunctionOffer | None:
        host = self._host
        return (
            None if host is None or self._is_offered else HostFunctionOffer(dict(host.functions), host.argument_bytes)
        )

    async def _wait_next_progress(self, answering: "set[asyncio.Task[None]]") -> LineProgress:
        """Return the next progress of the line.

        If the answer to a host function call fails with an exception, that exception is raised, and the line ends.
        """
        following = asyncio.create_task(self._hosting.wait_progress(self._number))
        try:
            while not following.done():
                done, _ = await asyncio.wait({following, *answering}, return_when=asyncio.FIRST_COMPLETED)
                # `result` raises the exception of a failed answer.
                for task in done & answering:
                    answering.discard(task)
                    task.result()
            return following.result()
        finally:
            following.cancel()

    async def _answer_call(self, call: int, content: bytes) -> None:
        if self._host is not None:
            await self._hosting.reply_to_call(self._number, call, await self._host.answer_call(content))

    def end_lease(self) -> None:
        """End the lease."""
        self._ended = True


async def _cancel_tasks(tasks: "set[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CLEANUP_S)


class HostedSandbox:
    """Sandbox that leases consoles from the hosts of a cluster."""

    name = "nodes"

    def __init__(self, hosts: ConsoleHostPool, python_version: tuple[int, int, int]) -> None:
        self.python_version = python_version
        self._hosts = hosts
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def leases_per_host(self) -> Mapping[RemoteConsoleHost, int]:
        """Number of consoles per host."""
        return self._hosts.leases.leases_per_host

    def session(self) -> AbstractAsyncContextManager[HostedSession]:
        """As `Sandbox.session`."""
        return self._lease_session(None)

    def open_workspace_session(self, setup: WorkspaceContent) -> AbstractAsyncContextManager[HostedSession]:
        """As `SupportsWorkspace.open_workspace_session`. Each machine makes a workspace once, when one of its consoles
        needs it."""
        return self._lease_session(setup)

    @asynccontextmanager
    async def _lease_session(self, setup: WorkspaceContent | None) -> AsyncIterator[HostedSession]:
        host, number = await self._lease_console(
            None if setup is None else WorkspacePayload(setup.digest, setup.content)
        )
        session = HostedSession(host, number, partial(self._hosts.on_host_lost, host))
        try:
            yield session
        finally:
            session.end_lease()
            self._close_in_background(host, number)

    async def _lease_console(self, setup: WorkspacePayload | None) -> tuple[RemoteConsoleHost, int]:
        """Lease a console, and return its host and its number. If a host is lost, try another one: no line has run yet.

        Raises:
            SetupError, SandboxFault: as in the sandbox there.
            SandboxLost: no machine was available for too long.
        """
        while True:
            host, number = await self._hosts.leases.acquire(), next(self._numbers)
            try:
                await host.lease(number, setup)
            except ConsoleHostLost as lost:
                self._hosts.on_host_lost(host, str(lost))
            except (ReplRLError, RolloutFailure):
                # The host refused the lease, so it holds no console for it.
                self._hosts.leases.release(host)
                raise
            except BaseException:
                # Cancelled: the host may have started the console already.
                self._close_in_background(host, number)
                raise
            else:
                return host, number

    def _close_in_background(self, host: RemoteConsoleHost, number: int) -> None:
        """End a console in the background. Its slot is released after its end."""
        task = asyncio.create_task(self._close_console(host, number))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_console(self, host: RemoteConsoleHost, number: int) -> None:
        try:
            await host.close(number)
        except ConsoleHostLost as lost:
            self._hosts.on_host_lost(host, str(lost))
        except (ReplRLError, RolloutFailure) as error:
            log.warning("a console on machine %s did not end as it should: %s", host.name, error)
        finally:
            self._hosts.leases.release(host)

    async def wait_closed(self) -> None:
        """Wait until every ended lease has been cleaned up."""
        await asyncio.gather(*self._closing)


@asynccontextmanager
async def open_hosted_sandbox(machines: HostMachines, spec: HostSpec) -> AsyncIterator[HostedSandbox]:
    """Run hosts on these machines, and their consoles, for the duration of the context.

    Raises:
        SandboxUnavailable: there is no machine, or none of them can hold a console.
    """
    hosts = ConsoleHostPool(machines, spec)
    try:
        sandbox = HostedSandbox(hosts, await hosts.open())
        try:
            yield sandbox
        finally:
            # Consoles that are being closed may wait for their hosts, so end these first.
            await hosts.close()
            await sandbox.wait_closed()
    finally:
        await hosts.close()
