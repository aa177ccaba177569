"""Channels of a Jupyter client: output is published while the program runs, and control requests are answered.

One thread owns the sockets iopub and control and the reading ends of two pipes. Other threads pass their frames to it,
and wait until it has sent them after all earlier output. So all messages arrive in order. An interrupt hits only the
main thread, and never splits a message.
"""

import codecs
import contextlib
import fcntl
import os
import select
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq
from jupyter_client.session import Session

Socket = zmq.Socket[bytes]
CONTROL_THREAD = "Control"
"""Name of the thread, by which the kernel's base class selects the control request as parent of its replies."""
_PIPE_BYTES = 1 << 20
_GATHER_S = 0.01
"""Time for output to wait for more, seconds, so that a loop that prints does not send one message per word."""
_LINGER_MS = 1000
_READER_S = 1.0
"""Maximum time to wait for a first reader, seconds. ZeroMQ reconnects after 0.2 s at most."""


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


class Channels:
    """Thread of the channels. A `Session` uses it as its socket iopub."""

    def __init__(
        self,
        session: Session,
        context: "zmq.Context[Socket]",
        control: Socket,
        iopub: Socket,
        pipes: tuple[Pipe, Pipe],
    ) -> None:
        """`context`: ZeroMQ context of these two sockets only. `pipes`: see `open_pipes`."""
        self._session, self._context, self.control, self._iopub = session, context, control, iopub
        self._pipes = pipes
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting: SimpleQueue[tuple[list[object], threading.Event]] = SimpleQueue()
        self._pid = os.getpid()
        self._ended = False
        self._read = threading.Event()
        self.on_control: Callable[[list[bytes]], None] = lambda frames: None
        self.parent: dict[str, object] = {}
        """Request that output belongs to."""
        self.silent = False
        """True while output is discarded."""
        self._thread = threading.Thread(target=self._run, daemon=True, name=CONTROL_THREAD)

    def start(self) -> None:
        """Start to answer control requests."""
        self._thread.start()

    def wait_for_reader(self) -> None:
        """Wait until a client has subscribed, for a limited time and only once.

        A client may connect before the kernel listens. Then each of its connections reopens at a different moment, and
        its first requests may arrive before its subscription. Without this wait it would miss their messages, and wait
        for ever.
        """
        self._read.wait(_READER_S)
        self._read.set()

    def attach(self) -> None:
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
        sent = threading.Event()
        self._waiting.put((frames, sent))
        os.eventfd_write(self._wake, 1)
        sent.wait()

    def flush(self) -> None:
        """Publish all earlier output."""
        self.send_multipart([])

    def attribute(self, parent: dict[str, object], *, silent: bool) -> None:
        """Make later output belong to `parent`. Earlier output does not."""
        self.flush()
        self.parent, self.silent = parent, silent

    def end(self) -> None:
        """End the process, once all published messages are on their way."""
        self._ended = True
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """Serve, and end the process with the thread, because a silent kernel would keep its client waiting."""
        try:
            self._serve()
        finally:
            os._exit(0 if self._ended else 1)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self.control, self._iopub, self._wake, *(pipe.fd for pipe in self._pipes)):
            poller.register(source, zmq.POLLIN)
        while not self._ended:
            ready = dict(poller.poll())
            # Only output is ready: wait for more, unless a message must be sent.
            if not ready.keys() - {pipe.fd for pipe in self._pipes}:
                select.select([self._wake], [], [], _GATHER_S)
            self._publish()
            if self.control in ready:
                self.on_control(self.control.recv_multipart())
        self._publish()
        for socket in (self.control, self._iopub):
            socket.close(_LINGER_MS)
        self._context.term()

    def _publish(self) -> None:
        """Publish the output, then the messages that were passed on before it was read.

        Clients that have subscribed by now receive them, because a client may request the next cell before its welcome.
        """
        while self._iopub.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._welcome(self._iopub.recv())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # Take the messages before the output is read, since they must not overtake earlier output.
        messages = []
        with contextlib.suppress(Empty):
            while True:
                messages.append(self._waiting.get_nowait())
        for pipe in self._pipes:
            text = pipe.read()
            if text and not self.silent:
                content = {"name": pipe.name, "text": text}
                ident = f"stream.{pipe.name}".encode()
                self._session.send(self._iopub, "stream", content, parent=self.parent, ident=ident)
        for frames, sent in messages:
            if frames:
                self._iopub.send_multipart(frames)
            sent.set()

    def _welcome(self, subscription: bytes) -> None:
        """Add a client, and send it a message from which on it misses nothing; or remove a client."""
        topic = subscription[1:]
        self._iopub.setsockopt(zmq.SUBSCRIBE if subscription[:1] == b"\x01" else zmq.UNSUBSCRIBE, topic)
        if subscription[:1] == b"\x01":
            self._read.set()
            content = {"subscription": topic.decode("utf-8", "replace")}
            self._session.send(self._iopub, "iopub_welcome", content, ident=topic)
