"""Kernel for ordinary Jupyter clients: the whole messaging protocol on top of the loop of `request_loop`.

Each request sets the mode. After an ordinary one, stdout and stderr are two streams, published as they are written, and
SIGINT interrupts the running cell. A line of a rollout restores the mode of the trainer's consoles: one file for both
streams, read once after the line.

`OutputChannels` publishes output while the program runs, and answers control requests. Its thread owns the sockets
iopub and control and the reading ends of two pipes. Other threads pass their frames to it, and wait until it has sent
them after all earlier output. So all messages arrive in order. An interrupt hits only the main thread, and never splits
a message. `CellHistory` is in memory and ends with the kernel.
"""

import builtins
import codecs
import contextlib
import fcntl
import fnmatch
import getpass
import os
import platform
import pydoc
import select
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType

import zmq
from ipykernel import kernel_protocol_version
from jupyter_client.session import Session

from repl_kernel import tab_completion as lookup
from repl_kernel.output_capture import OutputCapture
from repl_kernel.parse_cells import CellConsole, CellError, Displays, MimeBundle, build_mime_bundle
from repl_kernel.request_loop import ReplKernel
from repl_kernel.wire import DELIMITER, LineRequest

ZmqSocket = zmq.Socket[bytes]
JupyterMessage = dict[str, dict[str, object]]
CONTROL_THREAD = "Control"
"""Name of the thread, by which the kernel's base class selects the control request as parent of its replies."""
_PIPE_BYTES = 1 << 20
_GATHER_S = 0.01
"""Time for output to wait for more, seconds, so that a loop that prints does not send one message per word."""
_LINGER_MS = 1000
_SUBSCRIBER_S = 1.0
"""Maximum time to wait for a first subscriber, seconds. ZeroMQ reconnects after 0.2 s at most."""
SESSION = 1
"""Number of the only session. Clients may also use 0, which means "this one"."""
_ALONG_WITH_MS = 20
"""Time for a failed cell to wait for requests that its client sent along with it, milliseconds."""


class Pipe:
    """Standard stream of the process."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):
            # The machine's limit for pipes is lower, or the filter of system calls is on already.
            fcntl.fcntl(self._write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def attach(self) -> None:
        os.dup2(self._write_fd, self._number)

    def read(self) -> str:
        """Return all text that is in the pipe now."""
        with contextlib.suppress(BlockingIOError):
            return self._decode(os.read(self.fd, _PIPE_BYTES))
        return ""


def open_pipes() -> tuple[Pipe, Pipe]:
    """Return pipes for standard output and standard error. A process that renounces system calls opens them before."""
    return Pipe("stdout", 1), Pipe("stderr", 2)


class OutputChannels:
    """Thread of the channels. A `Session` uses it as its socket iopub."""

    def __init__(
        self,
        session: Session,
        context: "zmq.Context[ZmqSocket]",
        control: ZmqSocket,
        iopub: ZmqSocket,
        pipes: tuple[Pipe, Pipe],
    ) -> None:
        """`context`: ZeroMQ context of these two sockets only. `pipes`: see `open_pipes`."""
        self._session, self._context, self.control, self._iopub = session, context, control, iopub
        self._pipes = pipes
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pending_messages: SimpleQueue[tuple[list[object], threading.Event]] = SimpleQueue()
        self._pid = os.getpid()
        self._ended = False
        self._subscribed = threading.Event()
        self.on_control: Callable[[list[bytes]], None] = lambda frames: None
        self.parent_header: dict[str, object] = {}
        """Request that output belongs to."""
        self.is_silent = False
        """True while output is discarded."""
        self._thread = threading.Thread(target=self._run, daemon=True, name=CONTROL_THREAD)

    def start(self) -> None:
        """Start to answer control requests."""
        self._thread.start()

    def wait_for_subscriber(self) -> None:
        """Wait until a client has subscribed, for a limited time and only once.

        A client may connect before the kernel listens. Then each of its connections reopens at a different moment, and
        its first requests may arrive before its subscription. Without this wait it would miss their messages, and wait
        for ever.
        """
        self._subscribed.wait(_SUBSCRIBER_S)
        self._subscribed.set()

    def redirect_output(self) -> None:
        """Make the pipes the standard output and error of the process."""
        for pipe in self._pipes:
            pipe.attach()

    def send_multipart(self, frames: list[object], **_: object) -> None:
        """Publish a message after all earlier output. Return when it has been sent."""
        if os.getpid() != self._pid:
            # A child that a cell forked has a copy of this object, but not the thread.
            return
        if threading.current_thread() is self._thread:
            self._iopub.send_multipart(frames)
            return
        sent_event = threading.Event()
        self._pending_messages.put((frames, sent_event))
        os.eventfd_write(self._wake_fd, 1)
        sent_event.wait()

    def flush(self) -> None:
        """Publish all earlier output."""
        self.send_multipart([])

    def set_parent(self, parent: dict[str, object], *, silent: bool) -> None:
        """Make later output belong to `parent`. Earlier output does not."""
        self.flush()
        self.parent_header, self.is_silent = parent, silent

    def end_process(self) -> None:
        """End the process, once all published messages are on their way."""
        self._ended = True
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        """Serve, and end the process with the thread, because a silent kernel would keep its client waiting."""
        try:
            self._run_loop()
        finally:
            os._exit(0 if self._ended else 1)

    def _run_loop(self) -> None:
        poller = zmq.Poller()
        for source in (self.control, self._iopub, self._wake_fd, *(pipe.fd for pipe in self._pipes)):
            poller.register(source, zmq.POLLIN)
        while not self._ended:
            events = dict(poller.poll())
            # Only output is ready: wait for more, unless a message must be sent.
            if not events.keys() - {pipe.fd for pipe in self._pipes}:
                select.select([self._wake_fd], [], [], _GATHER_S)
            self._publish_pending()
            if self.control in events:
                self.on_control(self.control.recv_multipart())
        self._publish_pending()
        for socket in (self.control, self._iopub):
            socket.close(_LINGER_MS)
        self._context.term()

    def _publish_pending(self) -> None:
        """Publish the output, then the messages that were passed on before it was read.

        Clients that have subscribed by now receive them, because a client may request the next cell before its welcome.
        """
        while self._iopub.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._on_subscription(self._iopub.recv())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        # Take the messages before the output is read, since they must not overtake earlier output.
        messages = []
        with contextlib.suppress(Empty):
            while True:
                messages.append(self._pending_messages.get_nowait())
        for pipe in self._pipes:
            text = pipe.read()
            if text and not self.is_silent:
                content = {"name": pipe.name, "text": text}
                ident = f"stream.{pipe.name}".encode()
                self._session.send(self._iopub, "stream", content, parent=self.parent_header, ident=ident)
        for frames, sent_event in messages:
            if frames:
                self._iopub.send_multipart(frames)
            sent_event.set()

    def _on_subscription(self, subscription: bytes) -> None:
        """Add a client, and send it a message from which on it misses nothing; or remove a client."""
        topic = subscription[1:]
        self._iopub.setsockopt(zmq.SUBSCRIBE if subscription[:1] == b"\x01" else zmq.UNSUBSCRIBE, topic)
        if subscription[:1] == b"\x01":
            self._subscribed.set()
            content = {"subscription": topic.decode("utf-8", "replace")}
            self._session.send(self._iopub, "iopub_welcome", content, ident=topic)


# History, for `history_request`.


@dataclass(frozen=True)
class HistoryEntry:
    """One cell."""

    line: int
    """Execution count."""
    source: str
    output: str | None
    """Result as text. None means no result."""


class CellHistory:
    """Cells in the order in which they ran."""

    def __init__(self) -> None:
        self._entries: list[HistoryEntry] = []

    def add_entry(self, entry: HistoryEntry) -> None:
        """Add a cell."""
        self._entries.append(entry)

    def get_tail(self, n: int | None) -> list[HistoryEntry]:
        """Return the last `n` cells, or all if `n` is None."""
        return _take_last(self._entries, n)

    def get_range(self, session: int, start: int, stop: int | None) -> list[HistoryEntry]:
        """Return the cells of a session from the count `start` up to `stop`, without `stop`."""
        if session not in (0, SESSION):
            return []
        return [entry for entry in self._entries if start <= entry.line and (stop is None or entry.line < stop)]

    def search(self, pattern: str, n: int | None, *, unique: bool) -> list[HistoryEntry]:
        """Return the last `n` cells whose source matches a glob pattern. `unique`: each source once, at its last
        run."""
        entries: Iterable[HistoryEntry] = [e for e in self._entries if fnmatch.fnmatchcase(e.source, pattern)]
        if unique:
            entries = sorted({entry.source: entry for entry in entries}.values(), key=lambda entry: entry.line)
        return _take_last(list(entries), n)


def _take_last(entries: list[HistoryEntry], n: int | None) -> list[HistoryEntry]:
    return entries if n is None else entries[max(0, len(entries) - n) :]


# Kernel.


class JupyterKernel(ReplKernel):
    """Console for a Jupyter client."""

    implementation = "repl_kernel"
    implementation_version = "1"
    banner = f"Python {sys.version} on {sys.platform}"
    language_info: dict[str, object] = {  # noqa: RUF012
        "name": "python",
        "version": platform.python_version(),
        "mimetype": "text/x-python",
        "file_extension": ".py",
        "pygments_lexer": "python3",
        "codemirror_mode": {"name": "python", "version": 3},
        "nbconvert_exporter": "python",
    }

    @property
    def kernel_info(self) -> dict[str, object]:
        """Content of `kernel_info_reply`. The base class would import a debugger to find out whether one exists."""
        return {
            "protocol_version": kernel_protocol_version,
            "implementation": self.implementation,
            "implementation_version": self.implementation_version,
            "language_info": self.language_info,
            "banner": self.banner,
            "help_links": [],
            "supported_features": [],
        }

    def open_channels(
        self, channels: OutputChannels, stdin: ZmqSocket, capture: OutputCapture, console: CellConsole
    ) -> None:
        """Answer ordinary messages, too. Call it after `start_console`."""
        # A console of the sandbox does without the base class's settings, because they would delay its start.
        self.session.key, self.session.pid = self._key, self._pid
        self.shell_stream = self._shell
        self._console, self._capture = console, capture
        self._channels = self.iopub_socket = channels
        self.control_stream, self.stdin_socket = channels.control, stdin
        self._history = CellHistory()
        self._cells = False
        self._sigint: Callable[[int, FrameType | None], object] | int | None = signal.getsignal(signal.SIGINT)
        self._pages: list[str] = []
        self._doomed: list[list[bytes]] = []
        self._result: str | None = None
        # Lines of rollouts use these functions.
        self._usual = (builtins.input, getpass.getpass, pydoc.pager)
        self.shell_handlers["comm_open"] = self._reject_comm
        Displays(self._publish).install()
        channels.on_control = self._take_control
        channels.start()
        self._publish_status("starting", "shell")

    # The loop.

    def _next_request(self, poller: zmq.Poller) -> LineRequest | None:
        request = super()._next_request(poller)
        # A line comes after ordinary requests: restore the mode of the trainer's consoles.
        if request is not None and self._cells:
            self._cells = False
            self._channels.flush()
            self._capture.redirect()
            builtins.input, getpass.getpass, pydoc.pager = self._usual
            signal.signal(signal.SIGINT, self._sigint)
        return request

    def _take_control(self, frames: list[bytes]) -> None:
        """Handle a request to the control channel."""
        if self._is_readable(frames):
            _run_coroutine(self.process_control([zmq.Frame(frame) for frame in frames]))

    def _is_readable(self, frames: list[bytes]) -> bool:
        """Return False for a message to drop, because the base class raises for it. It may come from any process that
        can connect."""
        if DELIMITER in frames:
            return True
        self.log.error("dropped a message that is not one of the Jupyter protocol")
        return False

    def _handle_other_message(self, frames: list[bytes]) -> None:
        if not self._is_readable(frames):
            return
        # An ordinary request comes after lines: switch to the mode of a Jupyter client.
        if not self._cells:
            self._cells = True
            self._sigint = signal.signal(signal.SIGINT, _ignore_signal)
            self._channels.redirect_output()
            builtins.input, getpass.getpass = self.raw_input, self.getpass
            pydoc.pager = self._page_text
        self._dispatch(frames)
        self._aborting = True
        while self._doomed:
            self._dispatch(self._doomed.pop(0))
        self._aborting = False

    def _dispatch(self, frames: list[bytes]) -> None:
        self._channels.wait_for_subscriber()
        _run_coroutine(self.dispatch_shell([zmq.Frame(frame) for frame in frames]))

    def pre_handler_hook(self) -> None:
        """Do nothing. The base class would let SIGINT through while a message is handled."""

    def post_handler_hook(self) -> None:
        """See `pre_handler_hook`."""

    def _abort_pending(self, stream: ZmqSocket) -> None:
        """Take the messages that wait behind a failed cell. Execution requests among them are answered with `aborted`.

        This happens before the client can know of the failure, so that no request is taken that it sends because of it.
        """
        while stream.poll(_ALONG_WITH_MS):
            frames = stream.recv_multipart()
            if self._is_readable(frames):
                self._doomed.append(frames)

    # Cells.

    async def execute_request(self, stream: ZmqSocket, ident: list[bytes], parent: JupyterMessage) -> None:
        """Run a cell, publish its output, and reply."""
        content = parent["content"]
        silent = bool(content.get("silent", False))
        store_history = bool(content.get("store_history", True)) and not silent
        self._allow_stdin = bool(content.get("allow_stdin", False))
        self._result, self._pages = None, []
        self.execution_count += store_history
        self._channels.set_parent(parent, silent=silent)
        if not silent:
            self._publish_execute_input(content["code"], parent, self.execution_count)
        failure = self._run_cell(str(content["code"]))
        if os.getpid() != self._pid:
            # This is a child that the cell forked.
            os._exit(0)
        reply = self._reply(failure, content.get("user_expressions") or {})
        self._channels.set_parent(parent, silent=False)
        if reply["status"] == "error" and not silent:
            if content.get("stop_on_error", True):
                self._abort_pending(stream)
            error = {name: reply[name] for name in ("ename", "evalue", "traceback")}
            self.send_response(self.iopub_socket, "error", error, ident=self._topic("error"))
        if store_history:
            self._history.add_entry(HistoryEntry(self.execution_count, str(content["code"]), self._result))
        self.session.send(stream, "execute_reply", reply, parent, ident=ident)

    def _run_cell(self, code: str) -> CellError | None:
        """Run a whole cell, which SIGINT can interrupt."""
        return self._run_interruptible(lambda: self._console.run_cell(code, self._display_result))

    def _run_interruptible(self, run: Callable[[], CellError | None]) -> CellError | None:
        try:
            signal.signal(signal.SIGINT, self._sigint)
            try:
                return run()
            finally:
                self._sigint = signal.signal(signal.SIGINT, _ignore_signal)
        except KeyboardInterrupt:
            # The interrupt came just before or after the program's own statements.
            signal.signal(signal.SIGINT, _ignore_signal)
            return CellError("KeyboardInterrupt", "", ["KeyboardInterrupt"])

    def _reply(self, failure: CellError | None, expressions: object) -> dict[str, object]:
        if failure is not None and not failure.exit_requested:
            reply: dict[str, object] = {
                "status": "error",
                "ename": failure.ename,
                "evalue": failure.evalue,
                "traceback": failure.traceback,
            }
            return reply | {"execution_count": self.execution_count, "payload": [], "user_expressions": {}}
        text = "\n".join(self._pages)
        payload: list[object] = [{"source": "page", "data": {"text/plain": text}, "start": 0}] if self._pages else []
        if failure is not None:
            # Ask the client to end the session, as `exit()` does.
            payload.append({"source": "ask_exit", "keepkernel": False})
        requested = expressions if isinstance(expressions, dict) else {}
        values = {name: self._evaluate_expression(code) for name, code in requested.items()}
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": payload,
            "user_expressions": values,
        }

    def _evaluate_expression(self, code: str) -> dict[str, object]:
        """Evaluate an entry of a request's `user_expressions`."""
        values: list[object] = []
        failure = self._run_interruptible(lambda: self._console.run_cell(code, values.append))
        if failure is None and not values:
            failure = CellError("SyntaxError", "this is not an expression", ["SyntaxError: this is not an expression"])
        if failure is not None:
            return {
                "status": "error",
                "ename": failure.ename,
                "evalue": failure.evalue,
                "traceback": failure.traceback,
            }
        data, metadata = build_mime_bundle(values[0])
        return {"status": "ok", "data": data, "metadata": metadata}

    def _display_result(self, value: object) -> None:
        """Publish the value of a cell's last expression, as its `sys.displayhook`."""
        if value is None:
            return
        vars(builtins)["_"] = None
        # An exception of `repr` is an error of the cell, as in the console.
        plain = repr(value)
        data, metadata = build_mime_bundle(value, exclude=("text/plain",))
        self._result = plain
        content = {"execution_count": self.execution_count, "data": {"text/plain": plain} | data, "metadata": metadata}
        self._publish("execute_result", content)
        vars(builtins)["_"] = value

    def _publish(self, message_type: str, content: MimeBundle) -> None:
        if not self._channels.is_silent:
            self.send_response(self.iopub_socket, message_type, content, ident=self._topic(message_type))

    # Requests of a program to the client.

    def raw_input(self, prompt: object = "", /) -> str:
        """Ask the client for a line, as `input()` of a cell."""
        self._channels.flush()
        return str(super().raw_input(prompt))

    def _page_text(self, text: str, title: str = "") -> None:
        """Show text, as `pydoc.pager` of a cell. A client that a person uses has its own pager."""
        if self._allow_stdin:
            self._pages.append(pydoc.plain(text))
        else:
            pydoc.plainpager(text)

    # Other requests.

    async def do_is_complete(self, code: str) -> dict[str, str]:
        """Return the response of the console to `code`."""
        return lookup.check_completeness(code)

    async def do_complete(self, code: str, cursor_pos: int | None) -> dict[str, object]:
        """Return the names that complete the one before the cursor."""
        end = len(code) if cursor_pos is None else cursor_pos
        matches, start = lookup.find_completions(code, end, self._console.locals)
        return {"status": "ok", "matches": matches, "cursor_start": start, "cursor_end": end, "metadata": {}}

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: object = ()
    ) -> dict[str, object]:
        """Return a description of the name at the cursor."""
        text = lookup.describe_name(code, cursor_pos, detail_level, self._console.locals)
        return {"status": "ok", "found": text is not None, "data": {"text/plain": text} if text else {}, "metadata": {}}

    async def do_history(
        self,
        hist_access_type: str,
        output: bool,
        raw: bool,
        session: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        n: int | None = None,
        pattern: str | None = None,
        unique: bool = False,
    ) -> dict[str, object]:
        """Return cells that ran. `raw` makes no difference, because input is never transformed."""
        if hist_access_type == "range":
            entries = self._history.get_range(session or SESSION, start or 0, stop)
        elif hist_access_type == "search":
            entries = self._history.search(pattern or "*", n, unique=unique)
        else:
            entries = self._history.get_tail(n)
        rows = [(SESSION, e.line, (e.source, e.output) if output else e.source) for e in entries]
        return {"status": "ok", "history": rows}

    async def _reject_comm(self, stream: ZmqSocket, ident: list[bytes], parent: JupyterMessage) -> None:
        """Close a comm: this kernel has no targets, and the protocol requires an answer."""
        content = {"comm_id": parent["content"].get("comm_id"), "data": {}}
        self.send_response(self.iopub_socket, "comm_close", content, ident=self._topic("comm_close"))

    async def shutdown_request(self, stream: ZmqSocket, ident: list[bytes], parent: JupyterMessage) -> None:
        """Reply to all clients, then end the process, even if a cell runs."""
        content = {"status": "ok", "restart": parent["content"].get("restart", False)}
        self.session.send(stream, "shutdown_reply", content, parent, ident=ident)
        self.session.send(self.iopub_socket, "shutdown_reply", content, parent, ident=self._topic("shutdown"))
        self._channels.end_process()


def _run_coroutine(step: object) -> None:
    """Run a handler of the base class to its end. The handlers are coroutines that never wait here."""
    if not isinstance(step, Coroutine):
        return
    try:
        step.send(None)
    except StopIteration:
        return
    step.close()


def _ignore_signal(*_: object) -> None:
    """Ignore SIGINT between cells. The processes of a program would inherit SIG_IGN."""
