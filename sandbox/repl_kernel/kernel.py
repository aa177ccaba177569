"""Kernel: `ipykernel.kernelbase.Kernel` with its own sockets and its own loop.

A line of a rollout takes the fast path: one request, and one reply that contains the output. A console of the sandbox
answers nothing else. `jupyter.JupyterKernel` serves the rest of the Jupyter protocol on the same loop.
"""

import logging
import os
import signal

import traitlets
import zmq
from ipykernel.kernelbase import Kernel
from jupyter_client.session import Session

from repl_kernel.capture import Capture
from repl_kernel.console import Console
from repl_kernel.host import HostChannel
from repl_kernel.wire import LineRequest, Signer, line_reply, read_line_request

Socket = zmq.Socket[bytes]
_log = logging.Logger("repl_kernel", logging.CRITICAL)


class ReplKernel(Kernel):
    """Kernel of one console."""

    # The base class expects ZMQStream objects, which need an event loop; these are plain sockets.
    shell_stream = traitlets.Any()
    control_stream = traitlets.Any()

    def __init__(self) -> None:
        """Create the parts of a kernel that can be made once, before a fork. `start_console` adds the others."""
        super().__init__(log=_log, session=Session(key=b"", username="kernel"))

    def start_console(self, key: bytes, console: Console, capture: Capture, shell: Socket) -> None:
        """Become the kernel of `console` in this process."""
        self._pid, self._key = os.getpid(), key
        self._shell = shell
        self._signer = Signer(key)
        self._console = console
        self._capture = capture
        self._host: HostChannel | None = None

    def serve(self) -> None:
        """Answer messages for ever. User code runs exactly three frames below this one."""
        console, shell, pid = self._console, self._shell, self._pid
        poller = zmq.Poller()
        poller.register(shell, zmq.POLLIN)
        # Local names, because a program may change these modules and builtins.
        getpid, leave, interrupt = os.getpid, os._exit, KeyboardInterrupt
        kill, sigkill = os.kill, signal.SIGKILL
        heeds = False
        while True:
            request = None
            try:
                if not heeds:
                    # Allow SIGINT inside of this `try` only: before it, the interrupt of a waiting line would end the
                    # console.
                    heeds = True
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                request = self._next_request(poller)
                if request is None:
                    continue
                console.outcome, more = "ok", False
                if request.afresh:
                    console.answer = None
                self._open_host(request)
                try:
                    more = console.push(request.code)
                except SystemExit:
                    console.outcome = "exited"
                except interrupt:
                    # The interrupt came outside of the user's own frames. The reference console prints this text.
                    console.write("\nKeyboardInterrupt\n")
                    console.resetbuffer()
                    console.outcome = "exception"
                if getpid() != pid:
                    # A child that the line forked must not become a second kernel.
                    leave(0)
            except interrupt:
                pass
            except BaseException as error:
                # A user's own hook failed, or the compiler ran out of stack.
                if getpid() != pid:
                    leave(1)
                console.say_only(error)
            if request is not None:
                try:
                    self._answer(request, more)
                except Exception:
                    # The program broke something that a reply needs: it closed descriptors, or emptied the builtins.
                    kill(pid, sigkill)

    def _next_request(self, poller: zmq.Poller) -> LineRequest | None:
        """Return the next line to run, or None after any other message has been handled."""
        for socket, _ in poller.poll():
            frames = socket.recv_multipart()
            request = read_line_request(frames, self._signer)
            if request is not None:
                return request
            self._route(frames)
        return None

    def _open_host(self, request: LineRequest) -> None:
        if request.offer is not None and self._host is None:
            self._host = HostChannel(self._shell, self._signer, request.offer)
            self._host.install()
        if self._host is not None:
            self._host.open(request)

    def _answer(self, request: LineRequest, more: bool) -> None:
        """Send the one reply of a line. A late interrupt must not suppress it."""
        while True:
            try:
                if self._host is not None:
                    self._host.close()
                reply = line_reply(request, self._outcome(more), self._signer)
                self._shell.send_multipart(reply)
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

    def _route(self, frames: list[bytes]) -> None:
        """Ignore an ordinary message, because a console of the sandbox has no channel for a complete answer."""
