"""The host's end of a fork server: starts it, asks it for consoles, restarts nothing by itself."""

import asyncio
import itertools
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Protocol, Self

import zmq

from repl_rl.errors import SandboxFault, SandboxUnavailable
from repl_rl.sandbox.base import INODES, OPEN_FILES, Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.keeper import KeeperLink

_START_TIMEOUT_S = 120.0
_READY_TIMEOUT_S = 30.0
_OWN_WORDS = "repl_kernel: "
"""Begins what the fork server itself says of its end, remedy included."""
_FIRST_UID = 1_600_000_000
_UIDS = 1_000_000
_uids = itertools.count(os.getpid() * 4096 % _UIDS)


class Running(Protocol):
    """A fork server that has been started."""

    @property
    def alive(self) -> bool:
        """False once it has ended."""

    def last_words(self) -> str:
        """The end of what it wrote to its log."""

    async def end(self) -> None:
        """End it, and every console that it made."""


class Launch(Protocol):
    """How a fork server is started."""

    @property
    def isolated(self) -> bool:
        """Consoles get namespaces of their own."""

    @property
    def own_uids(self) -> bool:
        """The fork server may change its user: each console gets a user id of its own."""

    @property
    def remedy_for(self) -> Callable[[str], str]:
        """From what was said of a failure to what a person can do."""

    async def start(self) -> tuple[socket.socket, Running]:
        """Start one; returns the socket on which it takes requests.

        Raises:
            SandboxUnavailable: it cannot be started here.
        """


def _request(key: str, uid: int, limits: Limits) -> bytes:
    names = ("cpu_s", "memory_mb", "output_bytes", "processes", "disk_mb")
    chosen = {name: getattr(limits, name) for name in names}
    fixed = {"open_files": OPEN_FILES, "inodes": INODES}
    return json.dumps({"key": key, "uid": uid, **chosen, **fixed}).encode()


class ForkServer:
    """One running fork server."""

    def __init__(self, connection: socket.socket, running: Running, launch: Launch) -> None:
        self._connection = connection
        self._running = running
        self._launch = launch
        self._broken = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 8192
        self.python_version = (0, 0, 0)

    @classmethod
    async def start(cls, launch: Launch) -> Self:
        """Start it and wait until everything is imported.

        Raises:
            SandboxUnavailable: it ended at once or did not answer; the message has its last words.
        """
        connection, running = await launch.start()
        server = cls(connection, running, launch)
        try:
            await server._hello()
        except BaseException:
            await server.stop()
            raise
        return server

    async def _hello(self) -> None:
        self._connection.setblocking(False)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                packet = await asyncio.get_running_loop().sock_recv(self._connection, 4096)
        except (TimeoutError, OSError):
            packet = b""
        if not packet:
            words = self._running.last_words().splitlines()[-1]  # of a traceback, what was raised
            reason = words.removeprefix(_OWN_WORDS)
            remedy = "" if reason != words else f"; {self._launch.remedy_for(words)}"
            raise SandboxUnavailable(f"the sandbox did not start: {reason}{remedy}")
        major, minor, micro = json.loads(packet)["python"]
        self.python_version = (int(major), int(minor), int(micro))

    @property
    def alive(self) -> bool:
        """False once the process has ended."""
        return self._running.alive and not self._broken

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """A fresh console, ready for its first line.

        Raises:
            SandboxFault: it died or was not ready in time.
        """
        key = secrets.token_hex(32)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = KeeperLink(ours, isolated=self._launch.isolated, max_text_bytes=2 * limits.output_bytes)
        try:
            with theirs:
                uid = _FIRST_UID + next(_uids) % _UIDS if self._launch.own_uids else 0
                socket.send_fds(self._connection, [_request(key, uid, limits)], [theirs.fileno()])
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await link.ready
            if link.death is not None:
                raise SandboxFault(f"a console died at birth: {self._running.last_words()}")
            return ConsoleSession(link, key, limits, self._context, decide=decide)
        except TimeoutError:
            link.close()
            raise SandboxFault(f"a console was not ready after {_READY_TIMEOUT_S:g} s") from None
        except BlockingIOError:  # it is alive, with more requests before it than its socket holds
            link.close()
            raise SandboxFault("the fork server takes no further request now") from None
        except OSError as error:
            self._broken = True
            link.close()
            raise SandboxFault(f"the fork server is gone: {error}") from error
        except BaseException:
            link.close()
            raise

    async def stop(self) -> None:
        """End it and every console that it made."""
        self._connection.close()
        try:
            await self._running.end()
        finally:
            self._context.destroy(linger=0)
