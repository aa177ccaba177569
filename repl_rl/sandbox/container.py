"""Running container of a fork server, until it is removed."""

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
    """Process that made a connection, as this process sees it."""

    pid: int
    """Process number. 0 means that its process namespace is not visible to this process."""
    uid: int
    handle: int
    """pidfd of the process. -1 means that it has ended."""

    @property
    def alive(self) -> bool:
        """False once the process has ended. Another process may then get its number."""
        return self.handle >= 0 and not select.select([self.handle], [], [], 0)[0]


@contextlib.contextmanager
def open_peer(connection: socket.socket) -> Iterator[Peer]:
    """Identify the process that made a connection, and hold a handle on it within the context."""
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
    """Container of a fork server."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._words = ""
        self._alive = True

    @property
    def alive(self) -> bool:
        """False once an inspection has found it ended."""
        return self._alive

    def look(self) -> bool:
        """Fetch the state and the end of the log from the daemon. Return True if the container runs."""
        import docker  # slow to import

        try:
            self._words = self._container.logs(tail=20).decode("utf-8", "replace").strip()
            self._container.reload()
            self._alive = self._container.status in ("created", "running")
        except (docker.errors.APIError, OSError):
            # The container was removed, or the daemon is away.
            self._alive = False
        return self._alive

    def owns(self, pid: int) -> bool:
        """Return True if `pid` is the container's first process or a descendant of it. This queries the daemon."""
        self.look()
        first = self._container.attrs["State"]["Pid"] if self._alive else 0
        return first > 0 and pid in (first, *descendants(first))

    def last_words(self) -> str:
        """Return the end of its log, as of the last `look`."""
        return self._words or "it said nothing"

    async def end(self) -> None:
        """Kill and remove the container."""
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
            # Another removal is running; wait for its end.
            with contextlib.suppress(docker.errors.NotFound):
                self._container.wait(condition="removed", timeout=_REMOVED_WITHIN_S)
        except OSError:
            # The daemon is away. The connection to this process is closed, so the container ends and is removed without
            # us.
            pass
