"""Host end of a fork server: starts it and requests consoles. It restarts nothing."""

import asyncio
import itertools
import json
import os
import socket
from collections.abc import Callable
from typing import Protocol, Self

import zmq

from repl_rl.errors import SandboxUnavailable
from repl_rl.record.setup import Setup
from repl_rl.sandbox.base import Limits
from repl_rl.sandbox.client import ConsoleSession
from repl_rl.sandbox.door import BORN_WITHIN_S, Door, Station

_START_TIMEOUT_S = 120.0
_OWN_WORDS = "repl_kernel: "
"""Prefix of the fork server's own message about its end. Such a message includes the remedy."""
_FIRST_UID = 1_600_000_000
_UIDS = 1_000_000
# Processes of one machine usually start at different user ids.
_uids = itertools.count(os.getpid() * 4096 % _UIDS)


def draw_uid() -> int:
    """Return the next user id for a console that root starts. No account of the machine has such an id."""
    return _FIRST_UID + next(_uids) % _UIDS


class Running(Protocol):
    """Fork server that has been started."""

    @property
    def alive(self) -> bool:
        """False once it has ended."""

    def last_words(self) -> str:
        """Return the end of its log."""

    async def end(self) -> None:
        """End it, and every console that it forked."""


class Launch(Protocol):
    """Launcher of a fork server."""

    @property
    def isolated(self) -> bool:
        """True if each console gets its own namespaces."""

    @property
    def own_uids(self) -> bool:
        """True if the fork server may change its user, so that each console gets its own user id."""

    @property
    def remedy_for(self) -> Callable[[str], str]:
        """Function from an error message to a remedy."""

    async def start(self) -> tuple[socket.socket, Running]:
        """Start a fork server. Also return the socket on which it takes requests.

        Raises:
            SandboxUnavailable: it cannot be started here.
        """


class ForkServer:
    """Running fork server."""

    def __init__(
        self, connection: socket.socket, running: Running, launch: Launch, born_within_s: float = BORN_WITHIN_S
    ) -> None:
        """`born_within_s`: seconds to fork a console, after which the fork server counts as hung."""
        self._connection = connection
        self._running = running
        self._launch = launch
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 8192
        self._door = Door(
            connection, self._context, running.last_words, isolated=launch.isolated, born_within_s=born_within_s
        )
        self._door.lost = lambda: not self.alive
        self.python_version = (0, 0, 0)

    @classmethod
    async def start(cls, launch: Launch, born_within_s: float = BORN_WITHIN_S) -> Self:
        """Start a fork server, and wait until it has imported everything.

        Raises:
            SandboxUnavailable: it ended at once or did not answer; the message contains the end of its log.
        """
        starting = asyncio.ensure_future(cls._started(launch, born_within_s))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # If bubblewrap is killed before it is up, it leaves a process behind that waits for ever. So wait for the
            # start first.
            await asyncio.wait({starting})
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop()
            raise

    @classmethod
    async def _started(cls, launch: Launch, born_within_s: float) -> Self:
        connection, running = await launch.start()
        server = cls(connection, running, launch, born_within_s)
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
            # The last line of a traceback is the exception.
            words = self._running.last_words().splitlines()[-1]
            reason = words.removeprefix(_OWN_WORDS)
            # The fork server's own messages already include a remedy.
            remedy = "" if reason != words else f"; {self._launch.remedy_for(words)}"
            raise SandboxUnavailable(f"the sandbox did not start: {reason}{remedy}")
        major, minor, micro = json.loads(packet)["python"]
        self.python_version = (int(major), int(minor), int(micro))

    @property
    def alive(self) -> bool:
        """False once the process has ended or is hung."""
        return self._running.alive and not self._door.gone()

    def last_words(self) -> str:
        """Return the end of its log."""
        return self._running.last_words()

    async def open_console(self, limits: Limits, *, decide: bool) -> ConsoleSession:
        """As `Door.open_console`."""
        return await self._door.open_console(limits, uid=self._uid(), decide=decide)

    async def prepare(self, setup: Setup, limits: Limits) -> Station:
        """As `Door.prepare`."""
        return await self._door.prepare(setup, limits, uid=self._uid())

    def _uid(self) -> int:
        return draw_uid() if self._launch.own_uids else 0

    async def stop(self) -> None:
        """End it, and every console that it forked."""
        self._connection.close()
        try:
            await self._running.end()
        finally:
            self._context.destroy(linger=0)
