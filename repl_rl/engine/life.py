"""Lifetime of one engine in a restarting engine, from its opening to its end or crash."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from repl_rl.engine.base import Engine
from repl_rl.errors import EngineDied


class Life:
    """One engine from its opening to its end, in a separate task.

    The first caller may be cancelled while the engine opens. A separate task keeps the engine open for the others.
    """

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
            # Errors are expected when a dead engine closes.
            elif not self.dead:
                raise

    async def opened(self) -> Engine:
        """Wait until the engine is open, and return it.

        Raises the error of the opening, if it failed.
        """
        # Without the shield, a cancelled caller would cancel the future for all.
        return await asyncio.shield(self._opened)

    @property
    def engine(self) -> Engine:
        """The open engine."""
        return self._opened.result()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Wrap a request to the engine, so that no caller waits for the answer of a dead engine.

        Raises:
            EngineDied: the engine is dead, or dies during the block.
        """
        if self.dead:
            raise EngineDied("the engine's process is gone")
        # A timeout without a deadline. `bury` sets its deadline to now, which ends this call only.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._calls.add(scope)
                try:
                    yield
                finally:
                    self._calls.discard(scope)
        except TimeoutError as error:
            # The block itself raised TimeoutError.
            if not scope.expired():
                raise
            raise EngineDied("the engine's process is gone; it died meanwhile") from error

    def bury(self) -> None:
        """Mark the engine as dead and end all calls that wait for it."""
        self.dead = True
        now_s = asyncio.get_running_loop().time()
        for scope in self._calls:
            scope.reschedule(now_s)
        self._calls.clear()

    async def end(self) -> None:
        """Close the engine, or cancel its opening if it is not open yet.

        Raises the error of closing, unless the engine is dead.
        """
        self._over.set()
        if not self._opened.done():
            self._living.cancel()
        # `wait` does not raise the task's exception, and a cancelled opening is no error.
        await asyncio.wait({self._living})
        if not self._living.cancelled():
            self._living.result()
