"""A client's connection: uvicorn's own, bound in what it may hold without a request, and in how many there are."""

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_ENOUGH = 1 << 16
"""Open files that a process is given at most; some systems allow numbers that other programs choke on."""


class Connection(H11Protocol):
    """One request at a time, each begun and sent as far as its body within `timeout_keep_alive` seconds.

    A client that sends anything after a request before that is answered is hung up on: uvicorn reads no further then,
    so nobody would hear it leave.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As uvicorn's; hangs up where there are too many."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        super().connection_lost(exc)
        self._unwatch()

    def data_received(self, data: bytes) -> None:
        """As uvicorn's."""
        super().data_received(data)
        if self._asking:
            self._unwatch()
        elif self._deadline is None:
            self._watch()

    def handle_events(self) -> None:
        """As uvicorn's."""
        super().handle_events()
        if self._asking and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.abort()

    @property
    def _asking(self) -> bool:
        """A request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def most_connections() -> int:
    """Half of the files that this process may open: the rest is for consoles and the engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (_ENOUGH if soft == resource.RLIM_INFINITY else soft) // 2


def open_many() -> None:
    """Let this process open as many files as the system has for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
