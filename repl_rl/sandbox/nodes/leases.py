"""Scheduler of leases: the host with the fewest consoles gives the next one, and waiting tasks are served in order.

It does not depend on a clock, Ray or consoles.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

H = TypeVar("H")


class Leases(Generic[H]):
    """Slots on hosts, the same number on each."""

    def __init__(self, most: int) -> None:
        """`most`: maximum consoles per host at a time (>= 1)."""
        self._most = most
        self._held: dict[H, int] = {}
        """Consoles per host. The host that was chosen last is at the end, so that ties go to the others."""
        self._waiting: deque[asyncio.Future[H]] = deque()

    @property
    def held(self) -> dict[H, int]:
        """Consoles per host."""
        return dict(self._held)

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        return sum(not one.done() for one in self._waiting)

    def join(self, host: H) -> None:
        """Add a host."""
        self._held.setdefault(host, 0)
        self._serve()

    def leave(self, host: H) -> None:
        """Remove a host, with its consoles."""
        self._held.pop(host, None)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Fail all waiting tasks. Later tasks wait again."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error())

    async def take(self) -> H:
        """Wait for a slot on a host. The slot belongs to the caller until `give`.

        Raises:
            Exception: the error that `refuse` makes.
        """
        waiting: asyncio.Future[H] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._serve()
        try:
            return await waiting
        except asyncio.CancelledError:
            # The slot was assigned just before the cancellation; release it.
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self.give(waiting.result())
            with suppress(ValueError):
                self._waiting.remove(waiting)
            raise

    def give(self, host: H) -> None:
        """Release a slot. A slot on a removed host is ignored."""
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
                # Move the host to the end, so that ties go to the others.
                self._held[host] = self._held.pop(host) + 1
                waiting.set_result(host)
