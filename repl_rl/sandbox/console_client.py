"""Host end of one console: sends lines, checks replies, enforces deadlines, answers calls of host functions.

`ConsoleSession` is the console of a rollout. `SupervisorClient` sends orders to its supervisor, and receives the
console's birth and death. `LineHostCalls` accepts the calls of the running line, only a few at once, and cancels them
when their line ends. The console's `HostCallHandler` answers them. `LineTimer` is the deadline of a line.

All data that this module reads is untrusted. It does not parse the content of a call.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from repl_rl.errors import ConfigError, SandboxLost
from repl_rl.sandbox.base import HostCallHandler, Limits, LineResult, validate_line
from repl_rl.sandbox.jupyter_wire import (
    ConsoleReply,
    HostCallMessage,
    JupyterWire,
    MalformedReply,
    PendingCell,
)
from repl_rl.sandbox.line_status import make_result_from_exit, make_result_from_reply
from repl_rl.trajectory.trajectory import LineStatus

log = logging.getLogger(__name__)

# Constants of host function calls.

_MAX_PENDING_CALLS = 64
"""Maximum concurrent calls, more than a console has threads. Further calls are dropped."""
_MAX_CALLS_PER_LINE = 16_384
"""Maximum calls per line, so that answers do not keep the host busy. Later calls are dropped until the timeout."""
_CLEANUP_S = 10.0
"""Time for cancelled calls to end, seconds. A nested rollout releases its session and console in this time."""
_WAITS_PER_LINE = 10
"""Number of consecutive waits into which the clock splits a line's time."""
_TOO_LATE = b'{"error": "the time of the line is over"}'

# Constants of a supervisor's connection.

_PACKET_BYTES = 65_536
_MAX_PACKETS_PER_WAKEUP = 64
"""Packets that are read before other callbacks of the event loop run."""
_MAX_UNEXPECTED_PACKETS = 256
"""Packets of one console that nothing waits for. A supervisor sends a few, and a changed one could send them for
ever."""
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(2 * struct.calcsize("i"))
_HAS_ENDED = -1
"""Value of `Pid` in /proc/self/fdinfo for a pidfd whose process has ended, and was reaped by its parent."""
_INTERRUPT, _KILL = b"I", b"K"
"""Orders, as in `sandbox/repl_kernel/timeout_supervisor.py`."""
_FORKED, _READY, _INTERRUPTED, _TEXT, _DIED = b"B", b"R", b"S", b"T", b"D"
"""First byte of each packet from the supervisor, which is the type of the packet."""

# Constants of a console.

_SOURCE_LOST = "the fork server of the console is gone, and the console with it"
_LOST_CHECKS, _LOST_CHECK_S = 4, 0.05
"""Number of checks, and seconds between them, for whether a killed console died together with its fork server."""
_LAST_REPLY_S = 0.05
"""Time to wait for a last reply after the notice of a death, seconds. The two may arrive in either order."""
_DEATH_REPORT_S = 1.0
"""Time for a supervisor to report a requested death, seconds. After it, the supervisor is killed as well."""
_MAX_MESSAGES_PER_WAKEUP = 64
"""Messages that are read before other callbacks of the event loop run."""
_QUEUED_MESSAGES = 64
_NEVER = -1
"""ZeroMQ interval that disables reconnecting, because another console may later listen at the same address."""

# Plain numbers: combining and converting the library's enumerations takes longer than sending a frame.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE_FOLLOWS = int(zmq.DONTWAIT | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)


class LineTimer:
    """Deadline of a line. It is paused while the host works for the line.

    The clock counts in short waits. If this process is suspended, as on a paused machine, so is the line. At most two
    waits count then, so the line does not time out because of the pause.
    """

    def __init__(self, on_timeout: Callable[[], None]) -> None:
        """Create a stopped clock that calls `on_timeout` when the time is over."""
        self._on_timeout = on_timeout
        self._remaining_s = self._wait_s = 0.0
        self._started_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def start(self, seconds: float) -> None:
        """Start to count `seconds` down."""
        self._remaining_s, self._wait_s = seconds, seconds / _WAITS_PER_LINE
        self.resume()

    def pause(self) -> None:
        """Pause the clock."""
        if self._timer is not None:
            self._update_remaining()
            self.stop()

    def resume(self) -> None:
        """Resume the clock."""
        self._started_s = self._loop.time()
        self._timer = self._loop.call_later(min(self._remaining_s, self._wait_s), self._check_deadline)

    def stop(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _update_remaining(self) -> None:
        # Count at most two waits, in case this process was suspended.
        self._remaining_s = max(0.0, self._remaining_s - min(self._loop.time() - self._started_s, 2 * self._wait_s))

    def _check_deadline(self) -> None:
        self._timer = None
        self._update_remaining()
        if self._remaining_s:
            self.resume()
        else:
            self._on_timeout()


class LineHostCalls:
    """Host function calls of one console."""

    def __init__(
        self,
        wire: JupyterWire,
        send: Callable[[list[bytes]], bool],
        clock: LineTimer,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`fail` receives an exception of the host. It is an internal error and ends the line."""
        self.host: HostCallHandler | None = None
        """Handler of the calls. None means that no function is offered, so calls are dropped."""
        self._wire, self._send, self._clock, self._fail = wire, send, clock, fail
        self._tasks: set[asyncio.Task[None]] = set()
        self._line = b""
        self._is_late = False
        self._count = 0

    def start_line(self, line: bytes) -> None:
        """Start the line whose request has the header `line`."""
        self._line, self._is_late, self._count = line, False, 0

    def refuse_further_calls(self) -> None:
        """Refuse further calls, because the time of the line is over. The clock is no longer paused or resumed."""
        self._is_late = True

    def answer_call(self, call: HostCallMessage) -> None:
        """Answer a call in the background."""
        if self.host is None or call.line != self._line:
            return
        self._count += 1
        if len(self._tasks) >= _MAX_PENDING_CALLS or self._count > _MAX_CALLS_PER_LINE:
            return
        # The first of several concurrent calls pauses the clock; `_on_call_done` of the last one resumes it.
        if not self._tasks and not self._is_late:
            self._clock.pause()
        task = asyncio.create_task(self._run_call(self.host, call))
        self._tasks.add(task)
        task.add_done_callback(self._on_call_done)

    async def _run_call(self, host: HostCallHandler, call: HostCallMessage) -> None:
        reply = _TOO_LATE if self._is_late else await host.answer_call(call.content)
        # The line may have ended while the host worked.
        if call.line == self._line:
            self._send(self._wire.encode_host_reply(call, reply))

    def _on_call_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)
        elif not self._tasks and self._line and not self._is_late:
            self._clock.resume()

    async def end_line(self) -> None:
        """End the line, and cancel its pending calls."""
        self._line = b""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLEANUP_S)


@dataclass(frozen=True, slots=True)
class ConsoleDeath:
    """End of a console."""

    code: int | None
    """Exit code, or minus the number of the signal. None means that the supervisor is gone as well."""
    text: str = ""
    """Output that was printed but not read."""
    truncated: bool = False
    """True if the middle of that output was left out."""


@dataclass(frozen=True, slots=True)
class _SupervisorPacket:
    """Packet of a supervisor."""

    content: bytes
    descriptors: Sequence[int]
    sender: int
    """Sending process, as reported by the kernel. 0 means that it was not requested or is not visible here."""


class SupervisorClient:
    """Connection to one supervisor. All methods run on the event loop that created it."""

    def __init__(self, connection: socket.socket, *, isolated: bool, max_text_bytes: int) -> None:
        """`isolated`: the supervisor is process 1 of its namespaces, so killing it kills all processes in them."""
        self._connection = connection
        self._isolated = isolated
        self._max_text_bytes = max_text_bytes
        self._loop = asyncio.get_running_loop()
        self._unread_output = bytearray()
        self._unexpected_packets = 0
        self._process = -1
        self._folder = self._console_socket = -1
        # `_handle_packet` sets these two, and the death of the console sets those that still wait.
        self.forked: asyncio.Future[None] = self._loop.create_future()
        """Done when the fork server has forked the supervisor, or when it is dead."""
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.exit_info: ConsoleDeath | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._interrupt_sent: asyncio.Future[None] | None = None
        connection.setblocking(False)
        # The system then reports the sender of the first packet.
        self._request_credentials(True)
        self._loop.add_reader(connection.fileno(), self._read_packets)

    def _request_credentials(self, enabled: bool) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, enabled)

    def open_console_address(self) -> str:
        """Open the console's socket, once. Return an address that is valid until `close_console_address`.

        The console owns the folder and may put a link there. So the address names the socket itself, not a path.

        Raises:
            OSError: there is no socket.
        """
        self._console_socket = os.open("shell", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        self._close_folder()
        if not stat.S_ISSOCK(os.fstat(self._console_socket).st_mode):
            raise OSError("a console replaced its socket by something else")
        return f"ipc:///proc/self/fd/{self._console_socket}"

    def close_console_address(self) -> None:
        """Close the socket's file, which is not needed once the connection is made."""
        if self._console_socket >= 0:
            os.close(self._console_socket)
            self._console_socket = -1

    def _close_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def interrupt(self) -> "asyncio.Future[None]":
        """Send SIGINT to the console's process group. The future is done when the signal is sent, or the console is
        dead."""
        if self._interrupt_sent is None or self._interrupt_sent.done():
            self._interrupt_sent = self._loop.create_future()
        self._send_order(_INTERRUPT)
        if self.exit_info is not None:
            self._interrupt_sent.set_result(None)
        return self._interrupt_sent

    def kill(self) -> None:
        """Send SIGKILL to the console. Its death is then reported."""
        self._send_order(_KILL)

    def destroy(self) -> None:
        """Send SIGKILL to the supervisor, and so to all processes in its namespaces."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """End the console and release its resources. A supervisor without namespaces notices the end and cleans up."""
        if self._isolated:
            self.destroy()
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        self.close_console_address()
        self._close_folder()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        for future in (self.forked, self.ready):
            if not future.done():
                future.cancel()

    def _send_order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            # If the connection is closed, the death is about to be read.
            self._connection.send(order)

    def _read_packets(self) -> None:
        """Read some packets. The event loop calls this again while more of them wait."""
        for _ in range(_MAX_PACKETS_PER_WAKEUP):
            if self.exit_info is not None:
                return
            try:
                packet = _receive_packet(self._connection)
            except BlockingIOError:
                return
            except OSError:
                packet = _SupervisorPacket(b"", (), 0)
            self._handle_packet(packet)

    def _handle_packet(self, packet: _SupervisorPacket) -> None:
        packet_type, rest = packet.content[:1], packet.content[1:]
        if packet_type == _FORKED and self._process < 0 and self._is_sent_by_itself(packet):
            self._process, self._folder = packet.descriptors
            # Only the first packet's sender must be checked.
            self._request_credentials(False)
            if not self.forked.done():
                self.forked.set_result(None)
            return
        # Any other packet must not contain descriptors; close them.
        for descriptor in packet.descriptors:
            os.close(descriptor)
        if packet_type == _FORKED:
            self._record_death(ConsoleDeath(None))
            return
        if packet_type == _READY and not self.ready.done():
            self.ready.set_result(None)
        elif packet_type == _INTERRUPTED and self._interrupt_sent is not None and not self._interrupt_sent.done():
            self._interrupt_sent.set_result(None)
        elif packet_type == _TEXT and rest and len(self._unread_output) < self._max_text_bytes:
            self._unread_output += rest
        elif packet_type in (_READY, _INTERRUPTED, _TEXT) and self._unexpected_packets < _MAX_UNEXPECTED_PACKETS:
            self._unexpected_packets += 1
        else:
            # An unknown kind, or too many packets, is as good as a closed connection.
            text = self._unread_output.decode("utf-8", "replace")
            self._record_death(_parse_death(rest, text) if packet_type == _DIED else ConsoleDeath(None, text))

    def _is_sent_by_itself(self, packet: _SupervisorPacket) -> bool:
        """Return True if the packet's pidfd refers to its sender. No other process may be killed through the pidfd."""
        if len(packet.descriptors) != 2:
            return False
        pid = _read_pid_of_pidfd(packet.descriptors[0])
        if pid > 0 and pid == packet.sender:
            return True
        # On a busy machine, a short workspace process has ended before this packet is read. Nothing can be killed
        # through its handle, and the next packet has its status.
        if pid == _HAS_ENDED and not os.path.exists(f"/proc/{packet.sender}"):
            return True
        log.warning("refused: process %d handed over process %d as a console's", packet.sender, pid)
        return False

    def _record_death(self, death: ConsoleDeath) -> None:
        self.exit_info = death
        self._loop.remove_reader(self._connection.fileno())
        # Wake all waiting tasks; they check `exit_info`.
        for future in (self.forked, self.ready, self._interrupt_sent):
            if future is not None and not future.done():
                future.set_result(None)
        self.on_death()


def _receive_packet(connection: socket.socket) -> _SupervisorPacket:
    content, ancillary, _, _ = connection.recvmsg(_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors, sender = list[int](), 0
    for level, message_type, data in ancillary:
        if (level, message_type) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(data)[0]
        elif (level, message_type) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += [number for (number,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
    return _SupervisorPacket(content, descriptors, sender)


def _read_pid_of_pidfd(handle: int) -> int:
    """Return the process that a pidfd refers to, `_HAS_ENDED` after its end, or 0 if it is in no visible namespace."""
    with open(f"/proc/self/fdinfo/{handle}") as file:
        numbers = [int(line.split()[1]) for line in file if line.startswith("Pid:")]
    return numbers[0] if numbers else 0


def _parse_death(packet: bytes, text: str) -> ConsoleDeath:
    try:
        report = json.loads(packet)
        code, truncated = report["code"], report["cut"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ConsoleDeath(None, text)
    return ConsoleDeath(code if isinstance(code, int) else None, text, truncated is True)


class ConsoleSession:
    """Console that runs in another process. Two tasks must not use it at once."""

    def __init__(
        self,
        supervisor: SupervisorClient,
        key: str,
        limits: Limits,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        decide: bool,
        is_source_lost: Callable[[], bool],
    ) -> None:
        """`decide`: host and console run the same Python, so the host may decide whether a cell is complete.

        `is_source_lost`: returns True if the fork server of this console is gone.
        """
        self._supervisor = supervisor
        self._is_source_lost = is_source_lost
        self._limits = limits
        self._wire = JupyterWire(key)
        self._pending_cell = PendingCell(decide=decide)
        self._ended = False
        self._interrupting: asyncio.Future[None] | None = None
        self._pending: asyncio.Future[ConsoleReply | ConsoleDeath | None] | None = None
        self._header = b""
        self._timer: asyncio.TimerHandle | None = None
        self._clock = LineTimer(self._interrupt)
        self._calls = LineHostCalls(self._wire, self._send, self._clock, self._fail)
        self._offer_sent = False
        self._answered = self._discard_answer = False
        self._loop = asyncio.get_running_loop()
        # Each reply arrives on this socket, and the report of a death on that of `supervisor`.
        address = supervisor.open_console_address()
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = _NEVER
        # Bound the memory that a console's messages can use on the host.
        self._socket.rcvhwm = _QUEUED_MESSAGES
        self._socket.maxmsgsize = (1 << 20) + 8 * limits.output_bytes
        self._socket.connect(address)
        self._loop.add_reader(self._socket.fileno(), self._read_messages)
        supervisor.on_death = self._on_death
        self.on_close: Callable[[], None] = _do_nothing
        """Called once, when this console is released."""

    @property
    def ended(self) -> bool:
        """True once no further line can be pushed."""
        return self._ended

    @property
    def is_dead(self) -> bool:
        """True once its process has ended. This can happen while the console waits for its lease."""
        return self._socket.closed or self._supervisor.exit_info is not None

    def offer_functions(self, host: HostCallHandler) -> None:
        """As `SupportsHostFunctions.offer_functions`."""
        if self._offer_sent:
            raise ConfigError(
                "session.offer_functions()", "after a line ran", "offer host functions before the first line"
            )
        self._calls.host = host

    def continue_after_answer(self) -> None:
        """As `SupportsContinue.continue_after_answer`."""
        if self._ended and not self._answered:
            raise ConfigError(
                "session.continue_after_answer()", "ended", "only an answer can be followed by further lines"
            )
        self._discard_answer = self._discard_answer or self._answered
        self._ended = self._answered = False

    async def push(self, line: str) -> LineResult:
        """As `SandboxSession.push`. The line's clock is paused while the host works for it.

        Raises:
            SandboxLost: the console died because its fork server or container died.
        """
        validate_line(line, ended=self._ended)
        start = time.perf_counter()
        code = self._pending_cell.add_line(line)
        if isinstance(code, LineResult):
            return code
        outcome = await self._run(code)
        elapsed_s = time.perf_counter() - start
        if outcome is None:
            return LineResult("", False, LineStatus.SANDBOX_FAULT, None, elapsed_s)
        if isinstance(outcome, ConsoleReply):
            return self._make_result_from_reply(outcome, elapsed_s)
        await self._raise_if_source_lost(outcome)
        return self._make_result_from_death(outcome, elapsed_s)

    async def _run(self, code: str) -> ConsoleReply | ConsoleDeath | None:
        """Return the console's reply or its death. None means that the reply was malformed."""
        if self._socket.closed:
            self._ended = True
            raise SandboxLost(_SOURCE_LOST)
        # True until the reply comes: after a cancelled push, the state of the console is unknown.
        self._ended = True
        self._interrupting = None
        self._header, frames = self._wire.encode_request(code, self._build_offer(), self._discard_answer)
        self._discard_answer = False
        self._pending = self._loop.create_future()
        self._calls.start_line(self._header)
        self._clock.start(self._limits.line_timeout_s)
        try:
            if not self._send(frames):
                # The console closed its connection, so no reply can come any more.
                self._kill()
            if self._supervisor.exit_info is not None:
                self._on_death()
            # `_read_messages`, `_on_death` or `_destroy` sets the result.
            outcome = await self._pending
            await self._wait_for_signal()
        finally:
            self._clock.stop()
            if self._timer is not None:
                self._timer.cancel()
            self._pending = None
            await self._calls.end_line()
        return outcome

    def _build_offer(self) -> dict[str, object] | None:
        """Return the description of the host functions for the first request, and None after it."""
        host, is_sent, self._offer_sent = self._calls.host, self._offer_sent, True
        if host is None or is_sent:
            return None
        return {"functions": dict(host.functions), "argument_bytes": host.argument_bytes}

    async def _wait_for_signal(self) -> None:
        """Wait until a requested interrupt is delivered, because a later one would hit the next line."""
        if self._interrupting is not None:
            await self._interrupting

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message. Return False if the console does not accept it."""
        if self._socket.closed:
            return False
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _MORE_FOLLOWS)
            self._socket.send(frames[-1], _DONTWAIT)
        except zmq.Again:
            return False
        # ZeroMQ's descriptor is edge-triggered, and sending consumes edges: without this, a reply could stay unread.
        self._read_messages()
        return True

    def _interrupt(self) -> None:
        self._calls.refuse_further_calls()
        self._interrupting = self._supervisor.interrupt()
        self._timer = self._loop.call_later(self._limits.interrupt_grace_s, self._kill)

    def _kill(self) -> None:
        self._supervisor.kill()
        self._timer = self._loop.call_later(_DEATH_REPORT_S, self._destroy)

    def _destroy(self) -> None:
        self._supervisor.destroy()
        self._resolve(ConsoleDeath(None))

    def _on_death(self) -> None:
        if self._pending is not None and self._supervisor.exit_info is not None:
            self._loop.call_later(_LAST_REPLY_S, self._resolve_request, self._header, self._supervisor.exit_info)

    def _resolve_request(self, header: bytes, death: ConsoleDeath) -> None:
        if header == self._header:
            self._read_messages()
            self._resolve(death)

    def _resolve(self, outcome: ConsoleReply | ConsoleDeath | None) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(outcome)

    def _fail(self, error: BaseException) -> None:
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(error)

    def _read_messages(self) -> None:
        """Read every message that has arrived. Messages that are not about the running line are dropped."""
        if self._socket.closed:
            return
        for _ in range(_MAX_MESSAGES_PER_WAKEUP):
            if not int(self._socket.getsockopt(_EVENTS)) & _READABLE:
                return
            frames = self._socket.recv_multipart(_DONTWAIT)
            # No line waits for this message.
            if self._pending is None or self._pending.done():
                continue
            call = self._wire.decode_call(frames, self._header)
            if call is not None:
                self._calls.answer_call(call)
                continue
            try:
                reply = self._wire.decode_reply(frames, self._header)
            except MalformedReply:
                self._pending.set_result(None)
                continue
            if reply is not None:
                self._pending.set_result(reply)
        # More messages may wait; read them after other callbacks have run.
        self._loop.call_soon(self._read_messages)

    def _make_result_from_reply(self, reply: ConsoleReply, elapsed_s: float) -> LineResult:
        self._supervisor.close_console_address()
        result = make_result_from_reply(reply, self._limits, elapsed_s, interrupted=self._interrupting is not None)
        self._ended = self._pending_cell.update_from_result(result)
        self._answered = result.status is LineStatus.ANSWERED
        return result

    async def _raise_if_source_lost(self, death: ConsoleDeath) -> None:
        """Raise SandboxLost if the console died with its fork server, whose end may become visible a little later."""
        # Killed, or without a known exit code, and not interrupted by the host at the deadline.
        is_unexplained = death.code in (None, -signal.SIGKILL) and self._interrupting is None
        for attempt in range(_LOST_CHECKS if is_unexplained else 1):
            if attempt:
                await asyncio.sleep(_LOST_CHECK_S)
            if self._is_source_lost():
                raise SandboxLost(_SOURCE_LOST)

    def mark_source_lost(self) -> None:
        """Fail the running line, or else the next one, because the fork server of this console is gone."""
        self._fail(SandboxLost(_SOURCE_LOST))
        self._close_socket()

    def _close_socket(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _make_result_from_death(self, death: ConsoleDeath, elapsed_s: float) -> LineResult:
        return make_result_from_exit(death, self._limits, elapsed_s, interrupted=self._interrupting is not None)

    def close(self) -> None:
        """Kill the console and release its resources."""
        self._ended = True
        self._close_socket()
        self._supervisor.close()
        on_close, self.on_close = self.on_close, _do_nothing
        on_close()


def _do_nothing() -> None:
    pass
