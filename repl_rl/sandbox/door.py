"""Host end of a process that consoles are forked from: a fork server or a workspace process."""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import zmq

from repl_rl.errors import SandboxFault, SetupError
from repl_rl.record.setup import Setup
from repl_rl.sandbox.base import INODES, OPEN_FILES, Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.keeper import Death, KeeperLink
from repl_rl.sandbox.wire import plain_text

BORN_WITHIN_S = 30.0
"""Time for a fork server to fork a process, seconds. One that takes longer counts as hung."""
_READY_TIMEOUT_S = 30.0
_NEWS_S = 2.0
"""Time for the report of a death after its first signs, seconds."""
_PACKET_BYTES = 65_536
_SIGXCPU = 24


class Door:
    """Socket on which the host requests consoles. All methods run on the event loop that created it."""

    def __init__(
        self,
        connection: socket.socket,
        context: "zmq.Context[zmq.Socket[bytes]]",
        last_words: Callable[[], str],
        *,
        isolated: bool,
        born_within_s: float = BORN_WITHIN_S,
    ) -> None:
        """`last_words` returns the end of the fork server's log. For `isolated`, see `KeeperLink`."""
        self.connection = connection
        self._born_within_s = born_within_s
        self.broken = False
        """True once the process behind the socket is gone or hung."""
        self._context = context
        self._last_words = last_words
        self._isolated = isolated
        self.lost: Callable[[], bool] = self.gone
        """Returns True if its consoles died together with the process behind the socket."""

    def gone(self) -> bool:
        """Return True if the process behind the socket is gone, as far as the system knows, or hung."""
        try:
            self.broken = self.broken or not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            # The process lives and sends nothing.
            pass
        except OSError:
            self.broken = True
        return self.broken

    async def open_console(self, limits: Limits, *, uid: int, decide: bool) -> ConsoleSession:
        """Return a fresh console, ready for its first line. `uid` is its user outside; 0 means that of the forking
        process.

        Raises:
            SandboxFault: the console died or was not ready in time.
        """
        key = secrets.token_hex(32)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Send the key on the console's own socket. Every later console can read the memory of the fork server.
        ours.send(key.encode())
        link = self._link(ours, limits)
        try:
            with theirs:
                self._ask(_request(limits, uid), theirs)
            await self._birth(link)
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await link.ready
            if link.death is not None or self._context.closed:
                # The console died, or its fork server was stopped meanwhile.
                raise SandboxFault(f"a console died at birth: {self._last_words()}")
            return ConsoleSession(link, key, limits, self._context, decide=decide, lost=lambda: self.lost())
        except TimeoutError:
            link.close()
            raise SandboxFault(f"a console was not ready after {_READY_TIMEOUT_S:g} s") from None
        except OSError as error:
            link.close()
            raise SandboxFault(f"a console cannot be reached: {error}") from error
        except BaseException:
            link.close()
            raise

    async def prepare(self, setup: Setup, limits: Limits, *, uid: int) -> "Station":
        """Start a process, make a workspace in it, and return it as a source of consoles with that workspace.

        Raises:
            SetupError: the workspace cannot be made, within the limits of a console and `limits.cpu_s` of wall clock.
            SandboxFault: the process could not be isolated, or no reply came.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The workspace process takes its requests for consoles on this channel.
        channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        link = self._link(ours, limits)
        try:
            with theirs, other, _in_memory(setup.content) as content:
                self._ask(_request(limits, uid, prepares=True), theirs, other, content)
            await self._birth(link)
            said = await _verdict(channel, link, limits)
            # Without a reply, the process has ended. A non-empty reply is a problem of the workspace.
            if said is None:
                raise self._ended(setup, link.death, limits)
            if said:
                raise _refused(setup, said["place"], said["value"], f"{said['problem']}; correct the workspace")
            door = Door(
                channel,
                self._context,
                self._last_words,
                isolated=self._isolated,
                born_within_s=self._born_within_s,
            )
            return Station(door, link)
        except BaseException:
            link.close()
            channel.close()
            raise

    async def _birth(self, link: KeeperLink) -> None:
        """Wait until the requested process is forked, or has died.

        Raises:
            SandboxFault: the fork server is hung.
        """
        try:
            async with asyncio.timeout(self._born_within_s):
                await link.born
        except TimeoutError:
            self.broken = True
            raise SandboxFault(
                f"the fork server stands still: it forked nothing for {self._born_within_s:g} s"
            ) from None

    def _link(self, connection: socket.socket, limits: Limits) -> KeeperLink:
        return KeeperLink(connection, isolated=self._isolated, max_text_bytes=2 * limits.output_bytes)

    def _ask(self, request: bytes, *sockets: socket.socket | int) -> None:
        descriptors = [each if isinstance(each, int) else each.fileno() for each in sockets]
        try:
            socket.send_fds(self.connection, [request], descriptors)
        except BlockingIOError:
            # The fork server lives, but the queue of its socket is full.
            raise SandboxFault("the fork server takes no further request now") from None
        except OSError as error:
            self.broken = True
            raise SandboxFault(f"the fork server is gone: {error}") from error

    def _ended(self, setup: Setup, death: Death | None, limits: Limits) -> SetupError | SandboxFault:
        """Return the error for a workspace process that ended without a reply."""
        if death is None or death.code is None:
            return SandboxFault(f"a workspace's process died at birth: {self._last_words()}")
        reason = f"it ended its process ({death.code}) while it was made"
        if death.code == -_SIGXCPU:
            reason = f"it takes more than {limits.cpu_s:g} s of CPU; make it smaller, or give a larger limits.cpu_s"
        elif death.code < 0:
            reason = f"it was killed by signal {-death.code} while it was made; it may take too much memory or time"
        return _refused(setup, "its end", plain_text(death.text[-200:]), reason)


class Station:
    """Workspace process: a process in which a workspace was made, and from which consoles are forked."""

    def __init__(self, door: Door, link: KeeperLink) -> None:
        self._door = door
        self._link = link
        self.on_close: Callable[[], None] = lambda: None
        """Called once, when it is released."""

    @property
    def alive(self) -> bool:
        """False once it has ended, together with its consoles."""
        return self._link.death is None and not self._door.broken

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """As `Door.open_console`. Consoles of one workspace share one user outside, and each has its own namespaces."""
        return await self._door.open_console(limits, uid=0, decide=decide)

    def close(self) -> None:
        """End it, and every console that it forked."""
        self._door.connection.close()
        self._link.close()
        on_close, self.on_close = self.on_close, lambda: None
        on_close()


def _request(limits: Limits, uid: int, *, prepares: bool = False) -> bytes:
    names = ("cpu_s", "memory_mb", "output_bytes", "processes", "disk_mb")
    chosen = {name: getattr(limits, name) for name in names}
    fixed = {"open_files": OPEN_FILES, "inodes": INODES}
    return json.dumps({"uid": uid, "prepares": prepares, **chosen, **fixed}).encode()


@contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    """Yield a descriptor to read `content` from. `content` may exceed the size of a socket message."""
    descriptor = os.memfd_create("workspace")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


async def _verdict(channel: socket.socket, link: KeeperLink, limits: Limits) -> Mapping[str, str] | None:
    """Return the problem of a workspace, or an empty mapping. None means that its process ended without a reply."""
    # Use one task for both periods: a packet that arrives while its reading is cancelled would be lost.
    reading = asyncio.create_task(_packet(channel))
    try:
        done, _ = await asyncio.wait({reading}, timeout=limits.cpu_s)
        if not done:
            link.interrupt()
            done, _ = await asyncio.wait({reading}, timeout=limits.interrupt_grace_s)
        if not done:
            problem = f"it takes more than {limits.cpu_s:g} s"
            return {"place": "its end", "value": "deaf to interrupts", "problem": problem}
        packet = reading.result()
    finally:
        reading.cancel()
        await asyncio.wait({reading})
    if not packet:
        # Its supervisor reports the death a little later.
        async with asyncio.timeout(_NEWS_S):
            await link.ready
        return None
    try:
        said = json.loads(packet)
        return {name: plain_text(str(said[name])) for name in ("place", "value", "problem")} if said else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {"place": "its process", "value": plain_text(repr(packet[:80])), "problem": "it sent nonsense"}


async def _packet(channel: socket.socket) -> bytes:
    """Return the next packet. It is empty at the end of the stream."""
    try:
        return await asyncio.get_running_loop().sock_recv(channel, _PACKET_BYTES)
    except OSError:
        return b""


def _refused(setup: Setup, place: str, value: str, remedy: str) -> SetupError:
    return SetupError(f"workspace {setup.digest[:12]}, {place}", value, remedy)
