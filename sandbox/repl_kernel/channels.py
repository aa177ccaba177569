"""What goes on beside the program: its output is published while it runs, and control requests are answered.

One thread owns the sockets iopub and control and the reading ends of two pipes. Whoever publishes hands his frames to
that thread and waits until it has sent them, after whatever had been printed before. So everything arrives in order,
and an interrupt, which hits the main thread, never tears a message.
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
"""The base class of the kernel knows the thread by this name: replies then go to the parent on that channel."""
_PIPE_BYTES = 1 << 20
_GATHER_S = 0.01
"""How long output may wait for more, so that a loop that prints does not send a message a word."""
_LINGER_MS = 1000
_READER_S = 1.0
"""How long a first reader is waited for; ZeroMQ connects again after 0.2 s at most."""


class _Pipe:
    """One standard stream of the process."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        with contextlib.suppress(OSError):  # the machine's limit for pipes is lower
            fcntl.fcntl(self._write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def attach(self) -> None:
        os.dup2(self._write_fd, self._number)

    def read(self) -> str:
        """All that is in it now."""
        with contextlib.suppress(BlockingIOError):
            return self._decode(os.read(self.fd, _PIPE_BYTES))
        return ""


class Channels:
    """The thread. To a `Session` it is the socket iopub."""

    def __init__(self, session: Session, context: "zmq.Context[Socket]", control: Socket, iopub: Socket) -> None:
        """`context`: of these two sockets alone."""
        self._session, self._context, self.control, self._iopub = session, context, control, iopub
        self._pipes = (_Pipe("stdout", 1), _Pipe("stderr", 2))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting: SimpleQueue[tuple[list[object], threading.Event]] = SimpleQueue()
        self._pid = os.getpid()
        self._ended = False
        self._read = threading.Event()
        self.on_control: Callable[[list[bytes]], None] = lambda frames: None
        self.parent: dict[str, object] = {}
        """The request that output belongs to."""
        self.silent = False
        """Output is thrown away."""
        self._thread = threading.Thread(target=self._run, daemon=True, name=CONTROL_THREAD)

    def start(self) -> None:
        """Begin to answer control requests."""
        self._thread.start()

    def wait_for_reader(self) -> None:
        """Until somebody has subscribed, though not for long, and only once.

        A client whose connections came before the kernel listened opens each of them again at a moment of its own, so
        that its first requests may come before it hears what they publish, and it would wait for that for ever.
        """
        self._read.wait(_READER_S)
        self._read.set()

    def attach(self) -> None:
        """Make the pipes the standard output and error of the process."""
        for pipe in self._pipes:
            pipe.attach()

    def send_multipart(self, frames: list[object], **_: object) -> None:
        """Publish a message after all that has been printed; returns when it has been sent."""
        if os.getpid() != self._pid:  # a child that a cell forked: it has memory of the thread, but not the thread
            return
        if threading.current_thread() is self._thread:
            self._iopub.send_multipart(frames)
            return
        sent = threading.Event()
        self._waiting.put((frames, sent))
        os.eventfd_write(self._wake, 1)
        sent.wait()

    def flush(self) -> None:
        """Publish all that has been printed."""
        self.send_multipart([])

    def attribute(self, parent: dict[str, object], *, silent: bool) -> None:
        """From now on, what is printed belongs to `parent`; what was printed before does not."""
        self.flush()
        self.parent, self.silent = parent, silent

    def end(self) -> None:
        """End the process, once what has been published is on its way."""
        self._ended = True
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        """End the process with the thread: a kernel that says nothing more would keep its client waiting."""
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
        """What has been printed, then the messages that were handed over before it was read.

        Whoever has subscribed by now hears them: a client may ask for the next cell before its welcome.
        """
        while self._iopub.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._welcome(self._iopub.recv())
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
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
        """Let a client in, and tell it that it misses nothing from now on; or let it go."""
        topic = subscription[1:]
        self._iopub.setsockopt(zmq.SUBSCRIBE if subscription[:1] == b"\x01" else zmq.UNSUBSCRIBE, topic)
        if subscription[:1] == b"\x01":
            self._read.set()
            content = {"subscription": topic.decode("utf-8", "replace")}
            self._session.send(self._iopub, "iopub_welcome", content, ident=topic)
