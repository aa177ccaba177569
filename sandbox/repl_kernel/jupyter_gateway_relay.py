"""Relay of a console on an external Jupyter server: `jupyter_gateway_relay.py OPTIONS FOLDER`.

A cell starts it next to a kernel there. It takes the role of the host for one console: it requests its fork, sends it
lines, and interrupts or kills it at a line's deadline. Requests arrive as lines of JSON on its standard input, through
the kernel, and each gets one line as reply. A line that begins with `?` asks back: it is a call of one of the host's
functions.
"""

import base64
import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

if __name__ == "__main__":
    filters = list(warnings.filters)
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import zmq

from repl_kernel import timeout_supervisor as supervisor
from repl_kernel.fork_server import ForkServerOptions, run_fork_server
from repl_kernel.wire import CALL_HEADER, DELIMITER, LINE_METADATA, MessageSigner

RelayReply: TypeAlias = dict[str, object]
RelayRequest: TypeAlias = "dict[str, str | float | None]"

_PACKET_BYTES = 65_536
_READY_S = 30.0
_DEATH_REPORT_S = 2.0
_MAX_CALLS_PER_LINE = 16_384
"""Maximum calls per line, as on the host. Further calls get no answer, and the line times out."""
_TOO_LATE = b'{"error": "the time of the line is over"}'


class ConsoleUnavailable(Exception):
    """Error for a console that cannot be started, or that is gone."""


class SupervisedProcess:
    """Forked process, seen through the socket of its supervisor."""

    def __init__(self) -> None:
        self.own_socket, self.child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pidfd = self.folder = -1
        self.is_ready = False
        self.death_info: RelayReply | None = None
        self._output = bytearray()

    def wait(self, deadline: float) -> None:
        """Wait until it is ready or dead.

        Raises:
            ConsoleUnavailable: it is neither, in time.
        """
        while not self.is_ready and self.death_info is None:
            if not _wait_readable([self.own_socket], deadline):
                raise ConsoleUnavailable(f"a console was not ready after {_READY_S:g} s")
            self.read_packet()

    def send_order(self, order: bytes) -> None:
        """Interrupt or kill it."""
        with suppress(OSError):
            # It is gone; its death is about to be read.
            self.own_socket.send(order)

    def read_packet(self) -> None:
        """Read one packet of its supervisor."""
        try:
            packet, descriptors, _, _ = socket.recv_fds(self.own_socket, _PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            packet, descriptors = b"", []
        # An empty packet means that the supervisor has closed its end.
        packet_type, rest = packet[:1], packet[1:]
        if packet_type == supervisor.FORKED:
            self.pidfd, self.folder = descriptors
        elif packet_type == supervisor.READY:
            self.is_ready = True
        elif packet_type == supervisor.TEXT:
            self._output += rest
        elif packet_type in (supervisor.DIED, b""):
            report = json.loads(rest) if packet_type else {"code": None, "cut": False}
            self.death_info = {
                "death": report["code"],
                "text": self._output.decode("utf-8", "replace"),
                "cut": report["cut"],
            }

    def destroy(self) -> None:
        """End its supervisor, and so all processes that it supervises."""
        self.own_socket.close()
        for descriptor in (self.pidfd, self.folder):
            if descriptor >= 0:
                os.close(descriptor)


class ConsoleRelay:
    """Server of the requests on standard input."""

    def __init__(self, fork_server: socket.socket, log: int, call_host: Callable[[bytes], bytes]) -> None:
        """`log`: file with the last messages of the fork server; `call_host`: function that returns the answer to a
        call."""
        self._fork_server, self._log, self._call_host = fork_server, log, call_host
        # Wait for the greeting of the fork server.
        self._alive = bool(fork_server.recv(_PACKET_BYTES))
        self._channel: socket.socket | None = None
        self._processes: list[SupervisedProcess] = []
        self._console: SupervisedProcess | None = None
        self._key = secrets.token_hex(32)
        self._signer = MessageSigner(self._key.encode())

    def start_console(self, request: RelayRequest) -> RelayReply:
        """Start the console. With `content`, it begins with a workspace, which is refused if it cannot be made."""
        # End the previous console and workspace.
        for process in self._processes:
            process.destroy()
        self._processes.clear()
        self._console = self._channel = None
        limits = json.loads(str(request["limits"]))
        if request["content"] is not None:
            problem = self._prepare_workspace(limits, zlib.decompress(base64.b64decode(str(request["content"]))))
            if problem:
                return {"refused": problem}
        # Fork from the workspace process, or else from the fork server.
        source = self._channel or self._fork_server
        console = self._fork_process(source, {**limits, "prepares": False}, [], self._key.encode())
        console.wait(time.monotonic() + _READY_S)
        if console.death_info is not None:
            raise ConsoleUnavailable(f"a console died at its start: {self._get_log_tail()}")
        self._console = console
        self._connect_to_console(console)
        return {"python": list(sys.version_info[:3])}

    def _fork_process(
        self, source: socket.socket, request: RelayReply, descriptors: Sequence[int], key: bytes = b""
    ) -> SupervisedProcess:
        if not self._alive:
            raise ConsoleUnavailable(f"the fork server did not start: {self._get_log_tail()}")
        process = SupervisedProcess()
        self._processes.append(process)
        # The key travels on the console's own socket, which the fork server does not read.
        if key:
            process.own_socket.send(key)
        with process.child_socket:
            socket.send_fds(source, [json.dumps(request).encode()], [process.child_socket.fileno(), *descriptors])
        return process

    def _get_log_tail(self) -> str:
        tail = os.pread(self._log, _PACKET_BYTES, max(0, os.fstat(self._log).st_size - _PACKET_BYTES))
        return tail.decode("utf-8", "replace").strip() or "it printed nothing"

    def _prepare_workspace(self, limits: RelayReply, content: bytes) -> RelayReply | None:
        """Make a workspace, from which the console is forked. Return its problem, or None if it was made."""
        self._channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = self._channel
        with tempfile.TemporaryFile() as file, their_channel:
            file.write(content)
            file.seek(0)
            process = self._fork_process(
                self._fork_server, {**limits, "prepares": True}, [their_channel.fileno(), file.fileno()]
            )
        # Wait for the reply; past the limit, interrupt the lines of the workspace.
        limit_s, grace_s = float(str(limits["cpu_s"])), 0.5
        if not _wait_readable([channel], time.monotonic() + limit_s):
            process.send_order(supervisor.INTERRUPT)
            if not _wait_readable([channel], time.monotonic() + grace_s):
                timeout_problem = f"it takes more than {limit_s:g} s"
                return {"place": "its end", "value": "ignores interrupts", "problem": timeout_problem}
        # An empty packet means that the process ended.
        packet = channel.recv(_PACKET_BYTES)
        if packet:
            result: RelayReply = json.loads(packet)
            return result or None
        self._wait_for_death(process)
        code = (process.death_info or {}).get("death")
        problem = f"it ended its process ({code}) while it was made; it may take too much memory or time"
        return {"place": "its end", "value": str((process.death_info or {}).get("text", ""))[-200:], "problem": problem}

    def _wait_for_death(self, process: SupervisedProcess) -> None:
        deadline = time.monotonic() + _DEATH_REPORT_S
        while process.death_info is None and _wait_readable([process.own_socket], deadline):
            process.read_packet()

    def _connect_to_console(self, console: SupervisedProcess) -> None:
        self._shell = zmq.Context.instance().socket(zmq.DEALER)
        self._shell.linger = 0
        # Another console may listen at this address next.
        self._shell.reconnect_ivl = -1
        self._shell.connect(f"ipc:///proc/self/fd/{console.folder}/shell")

    def run_line(self, request: RelayRequest) -> RelayReply:
        """Run a line. Return its reply, or how the console died."""
        assert self._console is not None
        header = json.dumps({"msg_id": secrets.token_hex(16), "msg_type": "execute_request"}).encode()
        offer = request["offer"]
        content = {"code": request["code"], **({"host": json.loads(str(offer))} if offer is not None else {})}
        if not self._send_message([header, b"{}", LINE_METADATA, json.dumps(content).encode()]):
            # The console closed its connection, so no reply can come any more.
            self._console.send_order(supervisor.KILL)
        return self._wait_for_reply(
            self._console, header, float(str(request["timeout_s"])), float(str(request["grace_s"]))
        )

    def _send_message(self, body: list[bytes]) -> bool:
        """Send a message. Return False if the console does not accept it."""
        with suppress(zmq.Again):
            self._shell.send_multipart([DELIMITER, self._signer.sign(body), *body], zmq.DONTWAIT)
            return True
        return False

    def _wait_for_reply(
        self, console: SupervisedProcess, header: bytes, timeout_s: float, grace_s: float
    ) -> RelayReply:
        deadline, calls = time.monotonic() + timeout_s, 0
        # At the deadline, first interrupt the line, then kill the console, then its supervisor.
        steps = [(supervisor.INTERRUPT, grace_s), (supervisor.KILL, _DEATH_REPORT_S)]
        interrupted = False
        while True:
            frames = self._receive_next(console, deadline)
            if frames is None and console.death_info is not None:
                return {**console.death_info, "interrupted": interrupted}
            if frames is None and not steps:
                console.destroy()
                return {"death": None, "text": "", "cut": False, "interrupted": True}
            if frames is None:
                order, more_s = steps.pop(0)
                console.send_order(order)
                interrupted, deadline = True, time.monotonic() + more_s
            elif frames[2] == CALL_HEADER:
                calls += 1
                if calls <= _MAX_CALLS_PER_LINE:
                    deadline += self._answer_call(frames, late=interrupted)
            else:
                return {"reply": json.loads(frames[5])["repl"], "interrupted": interrupted}

    def _receive_next(self, console: SupervisedProcess, deadline: float) -> list[bytes] | None:
        """Return the next message of the console about its line. None means that it died, or that the time is over."""
        poller = zmq.Poller()
        poller.register(self._shell, zmq.POLLIN)
        poller.register(console.own_socket, zmq.POLLIN)
        poller.register(0, zmq.POLLIN)
        while True:
            events = dict(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if 0 in events:
                # No request comes while a line runs, so the kernel is gone.
                os._exit(0)
            while self._shell.poll(0):
                frames = self._shell.recv_multipart()
                is_late = time.monotonic() > deadline
                signed = len(frames) == 6 and frames[0] == DELIMITER and self._signer.sign(frames[2:]) == frames[1]
                # Past the deadline, a reply is still taken, but no call.
                if signed and not (is_late and frames[2] == CALL_HEADER):
                    return frames
                # A console can send faster than this loop reads, so the loop must also end at the deadline.
                if is_late:
                    return None
            if console.own_socket.fileno() in events:
                console.read_packet()
            # A last message may arrive just after the notice of a death.
            if console.death_info is not None and not self._shell.poll(50):
                return None
            if not events:
                return None

    def _answer_call(self, frames: list[bytes], *, late: bool) -> float:
        """Answer a call. Return the seconds that this took, during which the line's clock is paused."""
        start = time.monotonic()
        answer = _TOO_LATE if late else self._call_host(frames[5])
        self._send_message([CALL_HEADER, frames[3], frames[4], answer])
        return time.monotonic() - start


def _wait_readable(sockets: list[socket.socket], deadline: float) -> bool:
    return bool(select.select(sockets, [], [], max(0.0, deadline - time.monotonic()))[0])


def _handle_request(relay: ConsoleRelay, request: RelayRequest) -> RelayReply:
    try:
        return relay.start_console(request) if request["do"] == "begin" else relay.run_line(request)
    except (ConsoleUnavailable, OSError, ValueError, KeyError) as error:
        return {"fault": str(error) or type(error).__name__}


def run_relay(fork_server: socket.socket, log: int) -> None:
    """Answer requests until the kernel is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer

    def read_line() -> bytes:
        line = stdin.readline()
        if not line:
            # The kernel is gone.
            os._exit(0)
        return line

    def write_line(reply: bytes) -> None:
        stdout.write(reply + b"\n")
        stdout.flush()

    def call_host(call: bytes) -> bytes:
        write_line(b"?" + base64.b64encode(call))
        return base64.b64decode(read_line())

    try:
        relay = ConsoleRelay(fork_server, log, call_host)
        while True:
            write_line(json.dumps(_handle_request(relay, json.loads(read_line()))).encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    # Remove the unpacked package; all of it has been read.
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it lives as long as the process
    # The parent is the relay, the child becomes the fork server.
    if os.fork():
        theirs.close()
        run_relay(ours, words.fileno())
    ours.close()
    # Errors of the fork server go to a file that the relay reads.
    os.dup2(words.fileno(), 2)
    words.close()
    os.dup2(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), 0)
    os.dup2(0, 1)
    sys.path[0] = ""
    run_fork_server(str(theirs.detach()), ForkServerOptions(**json.loads(sys.argv[1])), filters).run_loop()
