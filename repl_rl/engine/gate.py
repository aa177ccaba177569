"""Keeps a change of weights and calls of `sample` apart: calls pass together, a change passes alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Any number of calls, or one change. A change that waits lets those inside leave and nobody else in."""

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Pass beside other calls."""
        async with self._door:
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._empty.set()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Pass alone, after the calls under way have ended."""
        async with self._door:
            while self._inside:
                self._empty.clear()
                await self._empty.wait()
            yield
