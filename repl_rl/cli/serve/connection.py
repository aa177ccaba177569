"""Connection of a client: uvicorn's class with a deadline for each request, and a limit on their number."""

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_ENOUGH = 1 << 16
"""Largest limit of open files to set. Some systems allow numbers that other programs cannot handle."""


class Connection(H11Protocol):
    """HTTP connection with one request at a time, whose head must arrive within `timeout_keep_alive` seconds.

    The connection is aborted if the client sends more after a request that is not answered yet. uvicorn stops reading
    then, so the server would not notice that the client disconnects.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Extend uvicorn's handler: abort the connection if there are too many."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Extend uvicorn's handler: cancel the deadline."""
        super().connection_lost(exc)
        self._unwatch()

    def data_received(self, data: bytes) -> None:
        """Extend uvicorn's handler: a complete head cancels the deadline, other data starts one."""
        super().data_received(data)
        if self._asking:
            self._unwatch()
        elif self._deadline is None:
            self._watch()

    def handle_events(self) -> None:
        """Extend uvicorn's handler: abort the connection if more data follows a request in progress."""
        super().handle_events()
        # DONE: the request is complete. Data after it is of no request that can be answered now.
        if self._asking and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.abort()

    @property
    def _asking(self) -> bool:
        """True if a request is in progress."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def most_connections() -> int:
    """Return half of the limit of open files. The other half is for consoles and the engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_ENOUGH if soft == resource.RLIM_INFINITY else soft) // 2


def open_many() -> None:
    """Raise the limit of open files of this process as far as the system allows, up to `_ENOUGH`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
