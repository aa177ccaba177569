"""The host's end of a console's supervisor: orders go in, the console's birth and death come out."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

_PACKET_BYTES = 65_536
_INTERRUPT, _KILL = b"I", b"K"
_BORN, _READY, _STRUCK, _TEXT, _DIED = b"B", b"R", b"S", b"T", b"D"


@dataclass(frozen=True, slots=True)
class Death:
    """How a console ended."""

    code: int | None
    """Exit code; minus the signal's number; None: its supervisor is gone as well."""
    text: str = ""
    """What it had printed and nobody had read."""
    cut: bool = False
    """The middle of that was left out."""


def _parse_death(packet: bytes, text: str) -> Death:
    try:
        news = json.loads(packet)
        code, cut = news["code"], news["cut"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Death(None, text)
    return Death(code if isinstance(code, int) else None, text, cut is True)


class KeeperLink:
    """Talks to one supervisor. Everything happens on the loop that made it."""

    def __init__(self, connection: socket.socket, *, isolated: bool, max_text_bytes: int) -> None:
        """`isolated`: the supervisor is process 1 of its namespaces, so killing it kills all."""
        self._connection = connection
        self._isolated = isolated
        self._max_text_bytes = max_text_bytes
        self._loop = asyncio.get_running_loop()
        self._words = bytearray()
        self._process = -1
        self._folder = -1
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.death: Death | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._struck: asyncio.Future[None] | None = None
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._read)

    @property
    def address(self) -> str:
        """Where the console listens; valid until `forget_address`."""
        return f"ipc:///proc/self/fd/{self._folder}/shell"

    def forget_address(self) -> None:
        """The connection is made; its folder need not stay open."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def interrupt(self) -> "asyncio.Future[None]":
        """SIGINT to the console's process group. The future is done when the signal has been sent, or it is dead."""
        if self._struck is None or self._struck.done():
            self._struck = self._loop.create_future()
        self._order(_INTERRUPT)
        if self.death is not None:
            self._struck.set_result(None)
        return self._struck

    def kill(self) -> None:
        """SIGKILL to the console; its death is then reported."""
        self._order(_KILL)

    def destroy(self) -> None:
        """SIGKILL to the supervisor, and so to everything in its namespaces."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """End the console and let go of everything. A supervisor without namespaces cleans up when it notices."""
        if self._isolated:
            self.destroy()
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        self.forget_address()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        if not self.ready.done():
            self.ready.cancel()

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):  # a closed connection: the death is about to be read
            self._connection.send(order)

    def _read(self) -> None:
        while self.death is None:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._connection, _PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            self._take(packet, descriptors)

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        kind, rest = packet[:1], packet[1:]
        if kind == _BORN and len(descriptors) == 2 and self._process < 0:
            self._process, self._folder = descriptors
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == _READY and not self.ready.done():
            self.ready.set_result(None)
        elif kind == _STRUCK and self._struck is not None and not self._struck.done():
            self._struck.set_result(None)
        elif kind == _TEXT and len(self._words) < self._max_text_bytes:
            self._words += rest
        elif kind in (_DIED, b""):
            text = self._words.decode("utf-8", "replace")
            self._die(_parse_death(rest, text) if kind else Death(None, text))

    def _die(self, death: Death) -> None:
        self.death = death
        self._loop.remove_reader(self._connection.fileno())
        for waiting in (self.ready, self._struck):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self.on_death()
