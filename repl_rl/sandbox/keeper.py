"""Host end of a console's supervisor: sends orders, and receives the console's birth and death."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

_PACKET_BYTES = 65_536
_PACKETS_A_WAKE = 64
"""Packets that are read before other callbacks of the event loop run."""
_MOST_UNASKED = 256
"""Packets of one console that nothing waits for. A supervisor sends a few, and a changed one could send them for
ever."""
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(2 * struct.calcsize("i"))
_HAS_ENDED = -1
"""Number of the process of a pidfd, in /proc, once its parent has read its status."""
_INTERRUPT, _KILL = b"I", b"K"
_BORN, _READY, _STRUCK, _TEXT, _DIED = b"B", b"R", b"S", b"T", b"D"


@dataclass(frozen=True, slots=True)
class Death:
    """End of a console."""

    code: int | None
    """Exit code, or minus the number of the signal. None means that the supervisor is gone as well."""
    text: str = ""
    """Output that was printed but not read."""
    cut: bool = False
    """True if the middle of that output was left out."""


@dataclass(frozen=True, slots=True)
class _Packet:
    """Packet of a supervisor."""

    content: bytes
    descriptors: Sequence[int]
    sender: int
    """Sending process, as reported by the kernel. 0 means that it was not requested or is not visible here."""


def _receive(connection: socket.socket) -> _Packet:
    content, ancillary, _, _ = connection.recvmsg(_PACKET_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors, sender = list[int](), 0
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(data)[0]
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors += [number for (number,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
    return _Packet(content, descriptors, sender)


def _process_of(handle: int) -> int:
    """Return the process that a pidfd refers to, `_HAS_ENDED` after its end, or 0 if it is in no visible namespace."""
    with open(f"/proc/self/fdinfo/{handle}") as file:
        numbers = [int(line.split()[1]) for line in file if line.startswith("Pid:")]
    return numbers[0] if numbers else 0


def _parse_death(packet: bytes, text: str) -> Death:
    try:
        news = json.loads(packet)
        code, cut = news["code"], news["cut"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return Death(None, text)
    return Death(code if isinstance(code, int) else None, text, cut is True)


class KeeperLink:
    """Connection to one supervisor. All methods run on the event loop that created it."""

    def __init__(self, connection: socket.socket, *, isolated: bool, max_text_bytes: int) -> None:
        """`isolated`: the supervisor is process 1 of its namespaces, so killing it kills all processes in them."""
        self._connection = connection
        self._isolated = isolated
        self._max_text_bytes = max_text_bytes
        self._loop = asyncio.get_running_loop()
        self._words = bytearray()
        self._unasked = 0
        self._process = -1
        self._folder = self._listening = -1
        self.born: asyncio.Future[None] = self._loop.create_future()
        """Done when the fork server has forked the supervisor, or when it is dead."""
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.death: Death | None = None
        self.on_death: Callable[[], None] = lambda: None
        self._struck: asyncio.Future[None] | None = None
        connection.setblocking(False)
        self._ask_for_senders(True)
        self._loop.add_reader(connection.fileno(), self._read)

    def _ask_for_senders(self, wanted: bool) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, wanted)

    def open_address(self) -> str:
        """Open the console's socket, once. Return an address that is valid until `forget_address`.

        The console owns the folder and may put a link there. So the address names the socket itself, not a path.

        Raises:
            OSError: there is no socket.
        """
        self._listening = os.open("shell", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        self._close_folder()
        if not stat.S_ISSOCK(os.fstat(self._listening).st_mode):
            raise OSError("a console put something else in the place of its socket")
        return f"ipc:///proc/self/fd/{self._listening}"

    def forget_address(self) -> None:
        """Close the socket's file, which is not needed once the connection is made."""
        if self._listening >= 0:
            os.close(self._listening)
            self._listening = -1

    def _close_folder(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def interrupt(self) -> "asyncio.Future[None]":
        """Send SIGINT to the console's process group. The future is done when the signal is sent, or the console is
        dead."""
        if self._struck is None or self._struck.done():
            self._struck = self._loop.create_future()
        self._order(_INTERRUPT)
        if self.death is not None:
            self._struck.set_result(None)
        return self._struck

    def kill(self) -> None:
        """Send SIGKILL to the console. Its death is then reported."""
        self._order(_KILL)

    def destroy(self) -> None:
        """Send SIGKILL to the supervisor, and so to all processes in its namespaces."""
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """End the console and release its resources. A supervisor without namespaces notices the end and cleans up."""
        if self._isolated:
            self.destroy()
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        self.forget_address()
        self._close_folder()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        for waiting in (self.born, self.ready):
            if not waiting.done():
                waiting.cancel()

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError):
            # If the connection is closed, the death is about to be read.
            self._connection.send(order)

    def _read(self) -> None:
        """Read some packets. The event loop calls this again while more of them wait."""
        for _ in range(_PACKETS_A_WAKE):
            if self.death is not None:
                return
            try:
                packet = _receive(self._connection)
            except BlockingIOError:
                return
            except OSError:
                packet = _Packet(b"", (), 0)
            self._take(packet)

    def _take(self, packet: _Packet) -> None:
        kind, rest = packet.content[:1], packet.content[1:]
        if kind == _BORN and self._process < 0 and self._is_of_its_sender(packet):
            self._process, self._folder = packet.descriptors
            # Only the first packet's sender must be checked.
            self._ask_for_senders(False)
            if not self.born.done():
                self.born.set_result(None)
            return
        # Any other packet must not contain descriptors; close them.
        for descriptor in packet.descriptors:
            os.close(descriptor)
        if kind == _BORN:
            self._die(Death(None))
            return
        if kind == _READY and not self.ready.done():
            self.ready.set_result(None)
        elif kind == _STRUCK and self._struck is not None and not self._struck.done():
            self._struck.set_result(None)
        elif kind == _TEXT and rest and len(self._words) < self._max_text_bytes:
            self._words += rest
        elif kind in (_READY, _STRUCK, _TEXT) and self._unasked < _MOST_UNASKED:
            self._unasked += 1
        else:
            # An unknown kind, or too many packets, is as good as a closed connection.
            text = self._words.decode("utf-8", "replace")
            self._die(_parse_death(rest, text) if kind == _DIED else Death(None, text))

    def _is_of_its_sender(self, packet: _Packet) -> bool:
        """Return True if the sender handed over itself. Any other process must not be killed through this handle."""
        if len(packet.descriptors) != 2:
            return False
        handed = _process_of(packet.descriptors[0])
        if handed > 0 and handed == packet.sender:
            return True
        # On a busy machine, a short workspace process has ended before this packet is read. Nothing can be killed
        # through its handle, and the next packet has its status.
        if handed == _HAS_ENDED and not os.path.exists(f"/proc/{packet.sender}"):
            return True
        log.warning("refused: process %d handed over process %d as a console's", packet.sender, handed)
        return False

    def _die(self, death: Death) -> None:
        self.death = death
        self._loop.remove_reader(self._connection.fileno())
        # Wake all waiting tasks; they check `death`.
        for waiting in (self.born, self.ready, self._struck):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        self.on_death()
