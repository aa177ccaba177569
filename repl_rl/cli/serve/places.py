"""Admission of turns: a limit on concurrent turns, and a queue in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from repl_rl.cli.serve.refusal import Refusal, whole_seconds

_WEIGHT = 0.2
"""Weight of the newest turn in the moving average of turn durations."""


class Places:
    """Admission queue of one server."""

    def __init__(self, at_once: int, waiting: int) -> None:
        """Set the limits: `at_once` concurrent turns (>= 1), and `waiting` turns in the queue (>= 0)."""
        self.running = self.waiting = 0
        self._at_once = at_once
        self._most_waiting = waiting
        self._free = asyncio.Semaphore(at_once)
        self._mean_s = 1.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait in the queue for a slot, and hold it for the block.

        Raises:
            Refusal: the queue is full (429).
        """
        if self._free.locked() and self.waiting >= self._most_waiting:
            # Estimate the time until this turn would get a slot, for the header Retry-After.
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
        """Record the duration of a turn, seconds."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
