"""Kernel: `ipykernel.kernelbase.Kernel` with its own sockets and its own loop.

A line of a rollout takes the fast path: one request, and one reply that contains the output. A console of the sandbox
answers nothing else. `jupyter_entry.JupyterKernel` serves the rest of the Jupyter protocol on the same loop.
"""

import logging
import os
import signal

import traitlets
import zmq
from ipykernel.kernelbase import Kernel
from jupyter_client.session import Session

from repl_kernel.execute_line import ReplConsole
from repl_kernel.host_function_stubs import HostChannel
from repl_kernel.output_capture import OutputCapture
from repl_kernel.wire import LineRequest, MessageSigner, decode_line_request, encode_line_reply

ZmqSocket = zmq.Socket[bytes]
_log = logging.Logger("repl_kernel", logging.CRITICAL)


class ReplKernel(Kernel):
    """Kernel of one console."""

    # The base class expects ZMQStream objects, which need an event loop; these are plain sockets.
    shell_stream = traitlets.Any()
    control_stream = traitlets.Any()

    def __init__(self) -> None:
        """Create the parts of a kernel that can be made once, before a fork. `start_console` adds the others."""
        super().__init__(log=_log, session=Session(key=b"", username="kernel"))

    def start_console(self, key: bytes, console: ReplConsole, capture: OutputCapture, shell: ZmqSocket) -> None:
        """Become the kernel of `console` in this process."""
        self._pid, self._key = os.getpid(), key
        self._shell = shell
        self._signer = MessageSigner(key)
        self._console = console
        self._capture = capture
        self._host: HostChannel | None = None

    def run_loop(self) -> None:
        """Answer messages for ever. User code runs exactly three frames below this one."""
        console, shell, pid = self._console, self._shell, self._pid
        poller = zmq.Poller()
        poller.register(shell, zmq.POLLIN)
        # Local names, because a program may change these modules and builtins.
        getpid, exit_process, interrupt = os.getpid, os._exit, KeyboardInterrupt
        kill, sigkill = os.kill, signal.SIGKILL
        accepts_interrupts = False
        while True:
            request = None
            try:
                if not accepts_interrupts:
                    # Allow SIGINT inside of this `try` only: before it, the interrupt of a waiting line would end the
                    # console.
                    accepts_interrupts = True
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                request = self._next_request(poller)
                if request is None:
                    continue
                console.cell_status, incomplete = "ok", False
                if request.forget_answer:
                    console.final_answer = None
                self._open_host_channel(request)
                try:
                    incomplete = console.push(request.code)
                except SystemExit:
                    console.cell_status = "exited"
                except interrupt:
                    # The interrupt came outside of the user's own frames. The reference console prints this text.
                    console.write("\nKeyboardInterrupt\n")
                    console.resetbuffer()
                    console.cell_status = "exception"
                if getpid() != pid:
                    # A child that the line forked must not become a second kernel.
                    exit_process(0)
            except interrupt:
                pass
            except BaseException as error:
                # A user's own hook failed, or the compiler ran out of stack.
                if getpid() != pid:
                    exit_process(1)
                console.print_last_traceback_line(error)
            if request is not None:
                try:
                    self._send_line_reply(request, incomplete)
                except Exception:
                    # The program broke something that a reply needs: it closed descriptors, or emptied the builtins.
                    kill(pid, sigkill)

    def _next_request(self, poller: zmq.Poller) -> LineRequest | None:
        """Return the next line to run, or None after any other message has been handled."""
        for socket, _ in poller.poll():
            frames = socket.recv_multipart()
            request = decode_line_request(frames, self._signer)
            if request is not None:
                return request
            self._handle_other_message(frames)
        return None

    def _open_host_channel(self, request: LineRequest) -> None:
        if request.host_functions is not None and self._host is None:
            self._host = HostChannel(self._shell, self._signer, request.host_functions)
            self._host.install()
        if self._host is not None:
            self._host.begin_line(request)

    def _send_line_reply(self, request: LineRequest, incomplete: bool) -> None:
        """Send the one reply of a line. A late interrupt must not suppress it."""
        while True:
            try:
                if self._host is not None:
                    self._host.end_line()
                reply = encode_line_reply(request, self._build_outcome(incomplete), self._signer)
                self._shell.send_multipart(reply)
                return
            except KeyboardInterrupt:
                continue

    def _build_outcome(self, incomplete: bool) -> dict[str, object]:
        printed = self._capture.take_output()
        self.execution_count += 1
        repl = {
            "text": printed.text,
            "cut": printed.truncated,
            "more": bool(incomplete),
            "outcome": "incomplete" if incomplete else self._console.cell_status,
            "answer": self._console.final_answer,
        }
        return {"status": "ok", "execution_count": self.execution_count, "user_expressions": {}, "repl": repl}

    def _handle_other_message(self, frames: list[bytes]) -> None:
        """Ignore an ordinary message, because a console of the sandbox has no channel for a complete answer."""
