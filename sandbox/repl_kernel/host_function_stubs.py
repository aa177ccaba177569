"""Functions of the host that lines can call. Each call waits until the host's answer has come.

Calls use the socket on which lines arrive, which is not read otherwise while a line runs. One waiting thread at a time
drives the socket for all: it sends their calls and distributes the replies. An interrupt hits the main thread, and
waits until no message is half sent.
"""

import builtins
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import zmq

from repl_kernel.wire import HostFunctionsMessage, LineRequest, MessageSigner, decode_host_reply, encode_host_call

ZmqSocket = zmq.Socket[bytes]
_POLL_S = 0.01
"""Interval at which a waiting thread checks for the end of the driving one, seconds."""


class HostError(Exception):
    """The host refused a call of one of its functions, or the function failed there."""


HostError.__module__ = "builtins"


class _PendingCall:
    """Call that waits for its answer."""

    def __init__(self) -> None:
        self.reply: bytes | None = None
        self.answered_event = threading.Event()


class HostChannel:
    """Connection of this console to the functions of the host."""

    def __init__(self, shell: ZmqSocket, signer: MessageSigner, offer: HostFunctionsMessage) -> None:
        self._shell, self._signer, self._offer = shell, signer, offer
        self._line: LineRequest | None = None
        self._slots: dict[int, _PendingCall] = {}
        self._numbers = itertools.count()
        self._outbox: SimpleQueue[list[bytes]] = SimpleQueue()
        self._socket_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = zmq.Poller()
        self._poller.register(shell, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._pid = os.getpid()

    def install(self) -> None:
        """Add the functions and `HostError` to the builtins, where `dir()` does not show them."""
        vars(builtins)["HostError"] = HostError
        for name, documentation in self._offer.functions.items():
            setattr(builtins, name, self._make_function(name, documentation))

    def begin_line(self, line: LineRequest) -> None:
        """Make later calls belong to `line`."""
        self._line = line

    def end_line(self) -> None:
        """End the line: the kernel owns the socket again, and calls that still wait fail."""
        with _DelayedInterrupt(self._wake_fd):
            self._line = None
            os.eventfd_write(self._wake_fd, 1)
            # Wait until no thread drives the socket, then drop unsent calls.
            with self._socket_lock, suppress(Empty):
                for slot in list(self._slots.values()):
                    slot.answered_event.set()
                while True:
                    self._outbox.get_nowait()

    def _make_function(self, name: str, documentation: str) -> Callable[..., object]:
        def function(*args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

        function.__name__ = function.__qualname__ = name
        function.__module__, function.__doc__ = "builtins", documentation
        return function

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if os.getpid() != self._pid:
            raise HostError(f"{name}() cannot be called from a child process; call it in the console's own")
        line = self._line
        if line is None:
            raise HostError(f"{name}() can be called only while a line runs")
        content = self._encode_call(name, args, kwargs)
        number, slot = next(self._numbers), _PendingCall()
        self._slots[number] = slot
        try:
            self._outbox.put(encode_host_call(line, number, content, self._signer))
            os.eventfd_write(self._wake_fd, 1)
            while slot.reply is None and self._line is line:
                # Wait again after an interrupt that the program ignores.
                with _DelayedInterrupt(self._wake_fd) as signals:
                    self._wait_for_reply(slot, line, signals)
        finally:
            del self._slots[number]
        return _decode_reply(name, slot.reply)

    def _encode_call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
        max_bytes = self._offer.argument_bytes
        oversizes = [
            len(value) for value in (*args, *kwargs.values()) if isinstance(value, str) and len(value) > max_bytes
        ]
        # Long strings are refused before they are encoded, which would take time and memory.
        if not oversizes:
            try:
                text = json.dumps({"name": name, "args": args, "kwargs": kwargs}, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise HostError(f"arguments of {name}() must be JSON values: {error}") from None
            if len(text) <= max_bytes:
                return text.encode()
            oversizes = [len(text)]
        raise HostError(f"arguments of {name}() have {max(oversizes)} bytes as JSON; at most {max_bytes} are allowed")

    def _wait_for_reply(self, slot: _PendingCall, line: LineRequest, signals: list[int]) -> None:
        while not slot.answered_event.is_set() and self._line is line and not signals:
            # Another thread drives the socket; look again soon, because it may stop.
            if not self._socket_lock.acquire(blocking=False):
                slot.answered_event.wait(_POLL_S)
                continue
            try:
                while slot.reply is None and self._line is line and not signals:
                    self._exchange_messages(line)
            finally:
                self._socket_lock.release()

    def _exchange_messages(self, line: LineRequest) -> None:
        """Send all pending messages, then receive what has arrived, at least one message or wake-up."""
        with suppress(Empty):
            while True:
                self._shell.send_multipart(self._outbox.get_nowait())
        self._poller.poll()
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        with suppress(zmq.Again):
            while True:
                reply = decode_host_reply(self._shell.recv_multipart(zmq.DONTWAIT), line.header, self._signer)
                slot = self._slots.get(reply[0]) if reply is not None else None
                if reply is not None and slot is not None:
                    slot.reply = reply[1]
                    slot.answered_event.set()


class _DelayedInterrupt:
    """Block that delays interrupts of the main thread until its end. Its value is a list of the delayed signals.

    It is no generator, because a traceback leaves out only frames of this package.
    """

    def __init__(self, wake_fd: int) -> None:
        self._wake_fd = wake_fd
        self._signals: list[int] = []
        self._is_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> list[int]:
        if self._is_main_thread:
            self._previous_handler = signal.signal(signal.SIGINT, self._record_signal)
        return self._signals

    def __exit__(self, *_: object) -> None:
        if self._is_main_thread:
            signal.signal(signal.SIGINT, self._previous_handler)
            if self._signals:
                signal.raise_signal(signal.SIGINT)

    def _record_signal(self, number: int, _: object) -> None:
        self._signals.append(number)
        os.eventfd_write(self._wake_fd, 1)


def _decode_reply(name: str, reply: bytes | None) -> object:
    """Return the value of the host's answer.

    Raises:
        HostError: the host refused the call, the function failed, or the line ended first.
    """
    if reply is None:
        raise HostError(f"the line ended before {name}() was answered")
    content = json.loads(reply)
    if "error" in content:
        raise HostError(content["error"])
    return content["answer"]
