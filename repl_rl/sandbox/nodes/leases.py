"""Which host gives the next console: the one that holds the fewest; whoever came first is served first.

It knows no clock, no Ray and no console.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

H = TypeVar("H")


class Leases(Generic[H]):
    """Places on hosts, so many on each."""

    def __init__(self, most: int) -> None:
        """`most`: consoles of a host at a time (>= 1)."""
        self._most = most
        self._held: dict[H, int] = {}
        """The host that was chosen last stands last: of those that hold equally many it is the last to be chosen."""
        self._waiting: deque[asyncio.Future[H]] = deque()

    @property
    def held(self) -> dict[H, int]:
        """Consoles of each host."""
        return dict(self._held)

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(not one.done() for one in self._waiting)

    def join(self, host: H) -> None:
        """A host has come."""
        self._held.setdefault(host, 0)
        self._serve()

    def leave(self, host: H) -> None:
        """A host is gone, with its consoles."""
        self._held.pop(host, None)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Everybody who waits learns of it; who comes next waits again."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error())

    async def take(self) -> H:
        """A place on a host. It is the caller's until it is given back.

        Raises:
            Exception: what `refuse` makes.
        """
        waiting: asyncio.Future[H] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._serve()
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.give(waiting.result())
            with suppress(ValueError):
                self._waiting.remove(waiting)
            raise

    def give(self, host: H) -> None:
        """A place is free again. One on a host that is gone is none."""
        if host in self._held:
            self._held[host] -= 1
            self._serve()

    def _serve(self) -> None:
        while self._waiting and self._held:
            host = min(self._held, key=self._held.__getitem__)
            if self._held[host] >= self._most:
                return
            waiting = self._waiting.popleft()
            if not waiting.done():
                self._held[host] = self._held.pop(host) + 1
                waiting.set_result(host)
