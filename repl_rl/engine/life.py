"""One engine of several that follow each other: from its opening to its end, or its death."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from repl_rl.engine.base import Engine
from repl_rl.errors import EngineDied


class Life:
    """One engine, from its opening to its end, in a task of its own: whoever needs it first may be cancelled."""

    def __init__(self, opening: AbstractAsyncContextManager[Engine]) -> None:
        self._opening = opening
        self._opened: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._living = asyncio.create_task(self._live())
        self._calls: set[asyncio.Timeout] = set()
        self.dead = False

    async def _live(self) -> None:
        try:
            async with self._opening as engine:
                self._opened.set_result(engine)
                await self._over.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            elif not self.dead:  # of one that died nothing else is expected
                raise

    async def opened(self) -> Engine:
        """The engine. Raises what its opening raised."""
        return await asyncio.shield(self._opened)

    @property
    def engine(self) -> Engine:
        """The engine, which is open."""
        return self._opened.result()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Around whatever asks the engine for something: nobody waits for an answer of one that is dead.

        Raises:
            EngineDied: it is dead, or died over this, or meanwhile.
        """
        if self.dead:
            raise EngineDied("the engine's process is gone")
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls.add(scope)
                try:
                    yield
                finally:
                    self._calls.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise EngineDied("the engine's process is gone; it died meanwhile") from error

    def bury(self) -> None:
        """It is dead: whatever is asked of it ends."""
        self.dead = True
        now_s = asyncio.get_running_loop().time()
        for scope in self._calls:
            scope.reschedule(now_s)
        self._calls.clear()

    async def end(self) -> None:
        """Close it; one that is being opened is given up. Raises what its end raised, unless it is dead."""
        self._over.set()
        if not self._opened.done():
            self._living.cancel()
        await asyncio.wait({self._living})
        if not self._living.cancelled():
            self._living.result()
