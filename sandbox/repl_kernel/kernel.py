"""The kernel: `ipykernel.kernelbase.Kernel` with its own sockets and its own loop.

A line of a rollout takes the fast path (one request, one reply that carries the output). Every other message of the
Jupyter protocol is routed to the handlers of the base class, so any Jupyter client can talk to it.
"""

import logging
import os
import platform
import signal
from collections.abc import Coroutine

import traitlets
import zmq
from ipykernel import kernel_protocol_version
from ipykernel.kernelbase import Kernel
from jupyter_client.session import Session

from repl_kernel.capture import Capture
from repl_kernel.console import Console
from repl_kernel.wire import LineRequest, Signer, line_reply, read_line_request

Socket = zmq.Socket[bytes]
_log = logging.Logger("repl_kernel", logging.CRITICAL)


def _drive(step: object) -> None:
    """Run a handler of the base class to its end. They are coroutines that never wait for anything here."""
    if not isinstance(step, Coroutine):
        return
    try:
        step.send(None)
    except StopIteration:
        return
    step.close()


class ReplKernel(Kernel):
    """One console."""

    implementation = "repl_kernel"
    implementation_version = "1"
    banner = "Python " + platform.python_version()
    language_info: dict[str, object] = {  # noqa: RUF012
        "name": "python",
        "version": platform.python_version(),
        "mimetype": "text/x-python",
        "file_extension": ".py",
    }
    # The base class expects ZMQStream objects, which need an event loop; these are plain sockets.
    shell_stream = traitlets.Any()
    control_stream = traitlets.Any()

    def __init__(self) -> None:
        """A kernel without a console: what can be made once, before a fork. `start_console` gives it the rest."""
        super().__init__(log=_log, session=Session(key=b"", username="kernel"))

    @property
    def kernel_info(self) -> dict[str, object]:
        """What `kernel_info_reply` says. The base class would import a debugger to find out whether there is one."""
        return {
            "protocol_version": kernel_protocol_version,
            "implementation": self.implementation,
            "implementation_version": self.implementation_version,
            "language_info": self.language_info,
            "banner": self.banner,
            "help_links": [],
            "supported_features": [],
        }

    def start_console(self, key: bytes, console: Console, capture: Capture, shell: Socket, **others: Socket) -> None:
        """Become the kernel of `console` in this process. `others`: `control_stream`, `iopub_socket`."""
        self.session.key = key
        self.session.pid = self._pid = os.getpid()
        self.shell_stream = shell
        for name, socket in others.items():
            setattr(self, name, socket)
        self._signer = Signer(key)
        self._console = console
        self._capture = capture
        self._alive = True

    def serve(self) -> None:
        """Answer messages until the console exits. User code runs exactly three frames below this one."""
        console, shell, pid = self._console, self.shell_stream, self._pid
        poller = zmq.Poller()
        for socket in filter(None, (shell, self.control_stream)):
            poller.register(socket, zmq.POLLIN)
        getpid, leave, interrupt = os.getpid, os._exit, KeyboardInterrupt
        kill, sigkill = os.kill, signal.SIGKILL
        while self._alive:
            request = None
            try:
                request = self._next_request(poller)
                if request is None:
                    continue
                console.outcome, more = "ok", False
                try:
                    more = console.push(request.code)
                except SystemExit:
                    console.outcome = "exited"
                except interrupt:  # outside of the user's own frames, as the reference console prints it
                    console.write("\nKeyboardInterrupt\n")
                    console.resetbuffer()
                    console.outcome = "exception"
                if getpid() != pid:  # a child that the line forked; it must not go on as a second kernel
                    leave(0)
            except interrupt:
                pass
            except BaseException as error:  # a user's own hook failed, or the compiler ran out of stack
                if getpid() != pid:
                    leave(1)
                console.say_only(error)
            if request is not None:
                try:
                    self._answer(request, more)
                except Exception:  # the program broke what a reply needs: closed descriptors, emptied builtins
                    kill(pid, sigkill)

    def _next_request(self, poller: zmq.Poller) -> LineRequest | None:
        """The next line to run; None after any other message has been handled."""
        for socket, _ in poller.poll():
            frames = socket.recv_multipart()
            if socket is self.shell_stream:
                request = read_line_request(frames, self._signer)
                if request is not None:
                    return request
            self._route(socket, frames)
        return None

    def _answer(self, request: LineRequest, more: bool) -> None:
        """Send the one reply of a line; a late interrupt must not swallow it."""
        while True:
            try:
                reply = line_reply(request, self._outcome(more), self._signer)
                self.shell_stream.send_multipart(reply)
                return
            except KeyboardInterrupt:
                continue

    def _outcome(self, more: bool) -> dict[str, object]:
        printed = self._capture.take()
        self.execution_count += 1
        repl = {
            "text": printed.text,
            "cut": printed.cut,
            "more": bool(more),
            "outcome": "incomplete" if more else self._console.outcome,
            "answer": self._console.answer,
        }
        return {"status": "ok", "execution_count": self.execution_count, "user_expressions": {}, "repl": repl}

    def _route(self, socket: Socket, frames: list[bytes]) -> None:
        """Hand an ordinary message to the base class."""
        message = [zmq.Frame(frame) for frame in frames]
        if socket is self.control_stream:
            _drive(self.process_control(message))
        else:
            _drive(self.dispatch_shell(message))

    async def do_execute(self, code: str, silent: bool, *_: object, **__: object) -> dict[str, object]:
        """Run a whole cell of an ordinary client: its lines one by one, then a blank line if a block is open."""
        console = self._console
        console.outcome = "ok"
        exited = False
        try:
            more = False
            for line in code.rstrip("\n").split("\n"):
                more = console.push(line)
            if more:
                console.push("")
        except SystemExit:
            exited = True
        printed = self._capture.take()
        if printed.text and not silent:
            self.send_response(self.iopub_socket, "stream", {"name": "stdout", "text": printed.text})
        self._alive = not exited
        reply = {"execution_count": self.execution_count, "payload": [], "user_expressions": {}}
        if console.outcome == "ok":
            return {"status": "ok", **reply}
        return {"status": "error", "ename": console.outcome, "evalue": "", "traceback": [], **reply}

    async def do_is_complete(self, code: str) -> dict[str, str]:
        """What the console would say to `code`: run it, ask for more, or refuse it."""
        try:
            compiled = self._console.compile(code, "<stdin>", "single")
        except (SyntaxError, ValueError, OverflowError):
            return {"status": "invalid"}
        return {"status": "complete"} if compiled else {"status": "incomplete", "indent": "    "}

    async def do_shutdown(self, restart: bool) -> dict[str, object]:
        """Leave the loop after this message."""
        self._alive = False
        return {"status": "ok", "restart": restart}

    def _abort_queues(self, subshell_id: str | None = None) -> None:
        """Queued lines are run even after an error, as in a console."""
