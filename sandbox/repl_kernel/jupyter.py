"""Kernel for ordinary Jupyter clients: the whole messaging protocol on top of the loop of `kernel`.

Each request sets the mode. After an ordinary one, stdout and stderr are two streams, published as they are written, and
SIGINT interrupts the running cell. A line of a rollout restores the mode of the trainer's consoles: one file for both
streams, read once after the line.
"""

import builtins
import getpass
import os
import platform
import pydoc
import signal
import sys
from collections.abc import Callable, Coroutine
from types import FrameType

import zmq
from ipykernel import kernel_protocol_version

from repl_kernel import lookup
from repl_kernel.capture import Capture
from repl_kernel.cell import CellConsole, Failure
from repl_kernel.channels import Channels, Socket
from repl_kernel.display import Bundle, Displays, bundle
from repl_kernel.history import SESSION, Entry, History
from repl_kernel.kernel import ReplKernel
from repl_kernel.wire import DELIMITER, LineRequest

_UNDER_WAY_MS = 20
"""Time for a failed cell to wait for requests that its client sent along with it, milliseconds."""
Message = dict[str, dict[str, object]]


def _drive(step: object) -> None:
    """Run a handler of the base class to its end. The handlers are coroutines that never wait here."""
    if not isinstance(step, Coroutine):
        return
    try:
        step.send(None)
    except StopIteration:
        return
    step.close()


def _ignore(*_: object) -> None:
    """Ignore SIGINT between cells. The processes of a program would inherit SIG_IGN."""


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

    def open_channels(self, channels: Channels, stdin: Socket, capture: Capture, console: CellConsole) -> None:
        """Answer ordinary messages, too. Call it after `start_console`."""
        # A console of the sandbox does without the base class's settings, because they would delay its start.
        self.session.key, self.session.pid = self._key, self._pid
        self.shell_stream = self._shell
        self._console, self._capture = console, capture
        self._channels = self.iopub_socket = channels
        self.control_stream, self.stdin_socket = channels.control, stdin
        self._history = History()
        self._cells = False
        self._sigint: Callable[[int, FrameType | None], object] | int | None = signal.getsignal(signal.SIGINT)
        self._pages: list[str] = []
        self._doomed: list[list[bytes]] = []
        self._result: str | None = None
        # Lines of rollouts use these functions.
        self._usual = (builtins.input, getpass.getpass, pydoc.pager)
        self.shell_handlers["comm_open"] = self._refuse_comm
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
            self._capture.attach()
            builtins.input, getpass.getpass, pydoc.pager = self._usual
            signal.signal(signal.SIGINT, self._sigint)
        return request

    def _take_control(self, frames: list[bytes]) -> None:
        """Handle a request to the control channel."""
        if self._is_readable(frames):
            _drive(self.process_control([zmq.Frame(frame) for frame in frames]))

    def _is_readable(self, frames: list[bytes]) -> bool:
        """Return False for a message to drop, because the base class raises for it. It may come from any process that
        can connect."""
        if DELIMITER in frames:
            return True
        self.log.error("dropped a message that is not one of the Jupyter protocol")
        return False

    def _route(self, frames: list[bytes]) -> None:
        if not self._is_readable(frames):
            return
        # An ordinary request comes after lines: switch to the mode of a Jupyter client.
        if not self._cells:
            self._cells = True
            self._sigint = signal.signal(signal.SIGINT, _ignore)
            self._channels.attach()
            builtins.input, getpass.getpass = self.raw_input, self.getpass
            pydoc.pager = self._page
        self._dispatch(frames)
        self._aborting = True
        while self._doomed:
            self._dispatch(self._doomed.pop(0))
        self._aborting = False

    def _dispatch(self, frames: list[bytes]) -> None:
        self._channels.wait_for_reader()
        _drive(self.dispatch_shell([zmq.Frame(frame) for frame in frames]))

    def pre_handler_hook(self) -> None:
        """Do nothing. The base class would let SIGINT through while a message is handled."""

    def post_handler_hook(self) -> None:
        """See `pre_handler_hook`."""

    def _doom(self, stream: Socket) -> None:
        """Take the messages that wait behind a failed cell. Execution requests among them are answered with `aborted`.

        This happens before the client can know of the failure, so that no request is taken that it sends because of it.
        """
        while stream.poll(_UNDER_WAY_MS):
            frames = stream.recv_multipart()
            if self._is_readable(frames):
                self._doomed.append(frames)

    # Cells.

    async def execute_request(self, stream: Socket, ident: list[bytes], parent: Message) -> None:
        """Run a cell, publish its output, and reply."""
        content = parent["content"]
        silent = bool(content.get("silent", False))
        remember = bool(content.get("store_history", True)) and not silent
        self._allow_stdin = bool(content.get("allow_stdin", False))
        self._result, self._pages = None, []
        self.execution_count += remember
        self._channels.attribute(parent, silent=silent)
        if not silent:
            self._publish_execute_input(content["code"], parent, self.execution_count)
        failure = self._run(str(content["code"]))
        if os.getpid() != self._pid:
            # This is a child that the cell forked.
            os._exit(0)
        reply = self._reply(failure, content.get("user_expressions") or {})
        self._channels.attribute(parent, silent=False)
        if reply["status"] == "error" and not silent:
            if content.get("stop_on_error", True):
                self._doom(stream)
            error = {name: reply[name] for name in ("ename", "evalue", "traceback")}
            self.send_response(self.iopub_socket, "error", error, ident=self._topic("error"))
        if remember:
            self._history.add(Entry(self.execution_count, str(content["code"]), self._result))
        self.session.send(stream, "execute_reply", reply, parent, ident=ident)

    def _run(self, code: str) -> Failure | None:
        """Run a whole cell, which SIGINT can interrupt."""
        return self._interruptible(lambda: self._console.run_cell(code, self._show))

    def _interruptible(self, run: Callable[[], Failure | None]) -> Failure | None:
        try:
            signal.signal(signal.SIGINT, self._sigint)
            try:
                return run()
            finally:
                self._sigint = signal.signal(signal.SIGINT, _ignore)
        except KeyboardInterrupt:
            # The interrupt came just before or after the program's own statements.
            signal.signal(signal.SIGINT, _ignore)
            return Failure("KeyboardInterrupt", "", ["KeyboardInterrupt"])

    def _reply(self, failure: Failure | None, expressions: object) -> dict[str, object]:
        if failure is not None and not failure.asked_to_leave:
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
        asked = expressions if isinstance(expressions, dict) else {}
        values = {name: self._evaluate(code) for name, code in asked.items()}
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": payload,
            "user_expressions": values,
        }

    def _evaluate(self, code: str) -> dict[str, object]:
        """Evaluate an entry of a request's `user_expressions`."""
        values: list[object] = []
        failure = self._interruptible(lambda: self._console.run_cell(code, values.append))
        if failure is None and not values:
            failure = Failure("SyntaxError", "this is no expression", ["SyntaxError: this is no expression"])
        if failure is not None:
            return {
                "status": "error",
                "ename": failure.ename,
                "evalue": failure.evalue,
                "traceback": failure.traceback,
            }
        data, metadata = bundle(values[0])
        return {"status": "ok", "data": data, "metadata": metadata}

    def _show(self, value: object) -> None:
        """Publish the value of a cell's last expression, as its `sys.displayhook`."""
        if value is None:
            return
        vars(builtins)["_"] = None
        # An exception of `repr` is an error of the cell, as in the console.
        plain = repr(value)
        data, metadata = bundle(value, exclude=("text/plain",))
        self._result = plain
        content = {"execution_count": self.execution_count, "data": {"text/plain": plain} | data, "metadata": metadata}
        self._publish("execute_result", content)
        vars(builtins)["_"] = value

    def _publish(self, kind: str, content: Bundle) -> None:
        if not self._channels.silent:
            self.send_response(self.iopub_socket, kind, content, ident=self._topic(kind))

    # Requests of a program to the client.

    def raw_input(self, prompt: object = "", /) -> str:
        """Ask the client for a line, as `input()` of a cell."""
        self._channels.flush()
        return str(super().raw_input(prompt))

    def _page(self, text: str, title: str = "") -> None:
        """Show text, as `pydoc.pager` of a cell. A client that a person uses has its own pager."""
        if self._allow_stdin:
            self._pages.append(pydoc.plain(text))
        else:
            pydoc.plainpager(text)

    # Other requests.

    async def do_is_complete(self, code: str) -> dict[str, str]:
        """Return the response of the console to `code`."""
        return lookup.completeness(code)

    async def do_complete(self, code: str, cursor_pos: int | None) -> dict[str, object]:
        """Return the names that complete the one before the cursor."""
        end = len(code) if cursor_pos is None else cursor_pos
        matches, start = lookup.completions(code, end, self._console.locals)
        return {"status": "ok", "matches": matches, "cursor_start": start, "cursor_end": end, "metadata": {}}

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: object = ()
    ) -> dict[str, object]:
        """Return a description of the name at the cursor."""
        text = lookup.description(code, cursor_pos, detail_level, self._console.locals)
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
            found = self._history.between(session or SESSION, start or 0, stop)
        elif hist_access_type == "search":
            found = self._history.search(pattern or "*", n, unique=unique)
        else:
            found = self._history.tail(n)
        rows = [(SESSION, e.line, (e.source, e.output) if output else e.source) for e in found]
        return {"status": "ok", "history": rows}

    async def _refuse_comm(self, stream: Socket, ident: list[bytes], parent: Message) -> None:
        """Close a comm: this kernel has no targets, and the protocol requires an answer."""
        content = {"comm_id": parent["content"].get("comm_id"), "data": {}}
        self.send_response(self.iopub_socket, "comm_close", content, ident=self._topic("comm_close"))

    async def shutdown_request(self, stream: Socket, ident: list[bytes], parent: Message) -> None:
        """Reply to all clients, then end the process, even if a cell runs."""
        content = {"status": "ok", "restart": parent["content"].get("restart", False)}
        self.session.send(stream, "shutdown_reply", content, parent, ident=ident)
        self.session.send(self.iopub_socket, "shutdown_reply", content, parent, ident=self._topic("shutdown"))
        self._channels.end()
