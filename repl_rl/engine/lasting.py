"""Restarting engine: after its process dies, another one opens, with the weights of the previous one.

No session survives a restart, so callers start again with another session. Only they know what the session was for.
This module therefore retries no rollout; see `repl_rl.rollout.again`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from repl_rl.engine.base import Chunk, Engine, EngineSession, Pressure, Resting, Sampling, Seated, Watch
from repl_rl.engine.life import Life
from repl_rl.errors import BrokenDown, EngineDied, EngineError

log = logging.getLogger(__name__)

Opener = Callable[[], AbstractAsyncContextManager[Engine]]
"""Function that opens an engine; each call opens a new one of the same kind and policy."""

MOST_DEATHS = 3
"""Number of deaths in a row, without new weights in between, after which the engine is not restarted."""
PAUSE_S = 1.0
"""Seconds between a death and the restart. A signal to a group of processes may reach the engine's process first, and
the run ends right after it."""


class LastingSession:
    """Session of one lifetime of the engine."""

    def __init__(self, inner: EngineSession, life: Life, bury: Callable[[Life, EngineDied], None]) -> None:
        self._inner = inner
        self._life = life
        self._bury = bury

    @property
    def ids(self) -> Sequence[int]:
        """See `EngineSession.ids`."""
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        try:
            async with self._life.call():
                return await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        except EngineDied as error:
            self._bury(self._life, error)
            raise

    async def undo(self, call: "asyncio.Task[Chunk]") -> int:
        """See `EngineSession.undo`."""
        try:
            async with self._life.call():
                return await self._inner.undo(call)
        except EngineDied as error:
            self._bury(self._life, error)
            raise


class LastingEngine:
    """Engine that restarts after it dies. Create it with `lasting`."""

    def __init__(self, opener: Opener, pause_s: float) -> None:
        self._opener = opener
        self._pause_s = pause_s
        self._life: Life
        self._reviving: asyncio.Task[None] | None = None
        self._weights: tuple[Path, int] | None = None
        self._in_a_row = 0
        self._last: EngineError = EngineDied("it never died")
        self._pressure = Pressure()
        self.deaths = 0
        """See `Lasting.deaths`."""
        self.policy_step = 0

    async def open(self) -> None:
        """Open an engine and load the weights of the previous one."""
        life = Life(self._opener())
        try:
            engine = await life.opened()
            if self._weights is not None:
                await engine.load_weights(*self._weights)
        except BaseException:
            # Errors while it closes do not matter.
            life.bury()
            await life.end()
            raise
        self._life = life
        self.name, self.context_tokens = engine.name, engine.context_tokens
        self.fallback_reason, self.forbidden_ids = engine.fallback_reason, engine.forbidden_ids
        self.seeds_sessions, self.policy_step = engine.seeds_sessions, engine.policy_step

    async def close(self) -> None:
        """Close the engine."""
        if self._reviving is not None:
            # A restart would replace the engine that is closed below.
            self._reviving.cancel()
            await asyncio.wait({self._reviving})
        await self._life.end()

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`."""
        return self._session(prompt_ids, sampling)

    @asynccontextmanager
    async def _session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        life = None
        try:
            async with AsyncExitStack() as stack:
                life, inner = await self._entered(stack, prompt_ids, sampling)
                yield LastingSession(inner, life, self._bury)
        except Exception as error:
            if life is None or not life.dead or isinstance(error, EngineDied):
                raise
            raise EngineDied("the engine's process is gone; what its session was used for failed") from error
        # Raise even if the caller has swallowed the error of a call.
        if life.dead:
            raise EngineDied("the engine's process is gone; it died while this session was open")

    async def _entered(
        self, stack: AsyncExitStack, prompt_ids: Sequence[int], sampling: Sampling
    ) -> tuple[Life, EngineSession]:
        """Open a session on a live engine. If it dies before the session is open, try again on the next one."""
        while True:
            life = await self._alive()
            try:
                async with life.call():
                    return life, await stack.enter_async_context(life.engine.session(prompt_ids, sampling))
            except EngineDied as error:
                self._bury(life, error)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`.

        Raises:
            BrokenDown: the engine died too often.
        """
        # Set before the load, so that a restart in the meantime loads these weights.
        before, self._weights = self._weights, (folder, policy_step)
        if policy_step != self.policy_step:
            # A training step is complete, so earlier deaths no longer count.
            self._in_a_row = 0
        while True:
            # An engine that is just opening may have read the folder's previous content, so load again.
            life = await self._alive()
            try:
                async with life.call():
                    await life.engine.load_weights(folder, policy_step)
                break
            except EngineDied as error:
                self._bury(life, error)
            except BaseException:
                self._weights = before
                raise
        self.policy_step = policy_step

    async def rest(self) -> None:
        """See `Resting.rest`."""
        life = self._life
        if life.dead or not isinstance(life.engine, Resting):
            return
        try:
            async with life.call():
                await life.engine.rest()
        except EngineDied as error:
            self._bury(life, error)

    @property
    def pressure(self) -> Pressure | None:
        """Preemption counts of all engines that were opened, see `Seated.pressure`."""
        engine = self._life.engine
        now = engine.pressure if isinstance(engine, Seated) else None
        return None if now is None else now.after(self._pressure)

    def _bury(self, life: Life, error: EngineError) -> None:
        """Mark the engine of `life` as dead. Only the first caller counts the death."""
        if not life.dead:
            life.bury()
            self._died(error)

    def _died(self, error: EngineError) -> None:
        self.deaths += 1
        self._in_a_row += 1
        self._last = error

    async def _alive(self) -> Life:
        """Return the live engine; restart it first if it is dead.

        Raises:
            BrokenDown: the engine died too often.
        """
        while self._life.dead:
            if self._reviving is None or self._reviving.done():
                # One restart serves all callers, and outlives those that are cancelled.
                self._reviving = asyncio.create_task(self._revive())
                self._reviving.add_done_callback(_heard)
            await asyncio.shield(self._reviving)
        return self._life

    async def _revive(self) -> None:
        # Counts of the earlier engines, which the new one does not know.
        before = self.pressure
        while True:
            # Give up after too many deaths in a row.
            if self._in_a_row >= MOST_DEATHS:
                remedy = "free memory for it, if the kernel killed it (dmesg says so), or give it less"
                times = f"dead {self._in_a_row} times in a row, with no step in between ({self._last})"
                raise BrokenDown(f"engine {self.name}", times, remedy) from self._last
            await asyncio.sleep(self._pause_s)
            what = "the engine has died (%s); another one is opened with the weights of policy step %d"
            log.warning(what, self._last, self._weights[1] if self._weights else self.policy_step)
            # Close the dead engine first, so that its memory is free.
            await self._life.end()
            try:
                await self.open()
            except EngineError as error:
                self._died(error)
                continue
            self._pressure = before or Pressure()
            return


def _heard(reviving: "asyncio.Task[None]") -> None:
    """Retrieve the exception of a restart, so that asyncio does not log it if no caller waits any more."""
    if not reviving.cancelled():
        reviving.exception()


@asynccontextmanager
async def lasting(opener: Opener, *, pause_s: float = PAUSE_S) -> AsyncIterator[LastingEngine]:
    """Open an engine with `opener`, and open another one whenever its process dies.

    It gives up after `MOST_DEATHS` deaths in a row.

    Args:
        opener: opens an engine.
        pause_s: seconds between a death and the restart.

    Raises:
        BrokenDown: from every use of the engine, once it has died too often.
    """
    engine = LastingEngine(opener, pause_s)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()
