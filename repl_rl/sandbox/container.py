"""A fork server's container, from when it runs to when it is removed."""

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from repl_rl.machine.processes import descendants
from repl_rl.sandbox.daemon import Container

_REMOVED_WITHIN_S = 30
_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that made a connection, as this process sees it."""

    pid: int
    """0: it is of a process namespace that this process cannot see into."""
    uid: int
    handle: int
    """A pidfd; -1: it has ended."""

    @property
    def alive(self) -> bool:
        """False once it has ended, so its number may be another process's."""
        return self.handle >= 0 and not select.select([self.handle], [], [], 0)[0]


@contextlib.contextmanager
def open_peer(connection: socket.socket) -> Iterator[Peer]:
    """Ask the kernel who made a connection, and hold on to that process."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        handle = os.pidfd_open(pid) if pid > 0 else -1
    except ProcessLookupError:
        handle = -1
    try:
        yield Peer(pid, uid, handle)
    finally:
        if handle >= 0:
            os.close(handle)


class RunningContainer:
    """A fork server's container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._words = ""
        self._alive = True

    @property
    def alive(self) -> bool:
        """False once it has been seen ended."""
        return self._alive

    def look(self) -> bool:
        """Ask the daemon whether it runs, and keep the end of its log."""
        import docker  # slow to import

        try:
            self._words = self._container.logs(tail=20).decode("utf-8", "replace").strip()
            self._container.reload()
            self._alive = self._container.status in ("created", "running")
        except (docker.errors.APIError, OSError):  # removed, or the daemon is away
            self._alive = False
        return self._alive

    def owns(self, pid: int) -> bool:
        """Whether a process is the container's first one, or descends from it. It asks the daemon."""
        self.look()
        first = self._container.attrs["State"]["Pid"] if self._alive else 0
        return first > 0 and pid in (first, *descendants(first))

    def last_words(self) -> str:
        """The end of its log, when it was last looked at."""
        return self._words or "it said nothing"

    async def end(self) -> None:
        """Kill and remove it."""
        await asyncio.to_thread(self._remove)
        self._alive = False

    def _remove(self) -> None:
        import docker  # slow to import

        try:
            self._container.remove(force=True)
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            if "already in progress" not in str(error):
                raise
            with contextlib.suppress(docker.errors.NotFound):
                self._container.wait(condition="removed", timeout=_REMOVED_WITHIN_S)
        except OSError:  # the daemon is away; our end of the line is closed, so it ends, and is removed, by itself
            pass
