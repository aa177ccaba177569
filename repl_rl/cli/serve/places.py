"""Places to play at: so many at once, and so many who wait for one, in the order in which they came."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from repl_rl.cli.serve.refusal import Refusal, whole_seconds

_WEIGHT = 0.2
"""Of the newest turn in the mean of how long turns take."""


class Places:
    """Of one server."""

    def __init__(self, at_once: int, waiting: int) -> None:
        """`at_once`: turns that are played at once (>= 1). `waiting`: those that may wait (>= 0)."""
        self.running = self.waiting = 0
        self._at_once = at_once
        self._most_waiting = waiting
        self._free = asyncio.Semaphore(at_once)
        self._mean_s = 1.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place, after those who asked before.

        Raises:
            Refusal: too many wait already (429).
        """
        if self._free.locked() and self.waiting >= self._most_waiting:
            wait_s = self._mean_s * (self.waiting + 1) / self._at_once
            message = f"{self.running} turns are played and {self.waiting} wait; try again"
            raise Refusal(429, message, code="busy", retry_after_s=whole_seconds(wait_s))
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()

    def took(self, seconds: float) -> None:
        """So long took a turn."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
