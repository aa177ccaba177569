"""Restarting engine: after its process dies, another one opens with the weights of the previous one.

No session survives a restart, so callers start again with another session. Only they know what the session was for.
This module therefore retries no rollout; see `repl_rl.rollout.retry`.

`EngineLifetime` holds one engine from its opening to its end or crash. `RestartingEngine` replaces it by the next one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from repl_rl.engine.base import (
    Chunk,
    Engine,
    EngineSession,
    HasPreemptionStats,
    PreemptionStats,
    Sampling,
    SupportsSleep,
    Watch,
)
from repl_rl.errors import EngineDied, EngineError, UnrecoverableError

log = logging.getLogger(__name__)

OpenEngine = Callable[[], AbstractAsyncContextManager[Engine]]
"""Function that opens an engine; each call opens a new one of the same kind and policy."""

MAX_CRASHES = 3
"""Number of deaths in a row, without new weights in between, after which the engine is not restarted."""
PAUSE_S = 1.0
"""Seconds between a death and the restart. A signal to the process group may kill the engine's process first, and end
the run right after. The pause avoids a useless restart."""


class EngineLifetime:
    """One engine from its opening to its end, in a separate task.

    The first caller may be cancelled while the engine opens. A separate task keeps the engine open for the others.
    """

    def __init__(self, engine_context: AbstractAsyncContextManager[Engine]) -> None:
        self._engine_context = engine_context
        self._opened: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self._calls: set[asyncio.Timeout] = set()
        self.is_dead = False

    async def _run(self) -> None:
        try:
            async with self._engine_context as engine:
                self._opened.set_result(engine)
                await self._closing.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            # Errors are expected when a dead engine closes.
            elif not self.is_dead:
                raise

    async def wait_opened(self) -> Engine:
        """Wait until the engine of this lifetime has opened, and return it, even if it has died since.

        Raises the error of the opening, if it failed.
        """
        # Without the shield, a cancelled caller would cancel the future for all.
        return await asyncio.shield(self._opened)

    @property
    def engine(self) -> Engine:
        """The open engine."""
        return self._opened.result()

    @asynccontextmanager
    async def track_call(self) -> AsyncIterator[None]:
        """Wrap a request to the engine, so that no caller waits for the answer of a dead engine.

        Raises:
            EngineDied: the engine is dead, or dies during the block.
        """
        if self.is_dead:
            raise EngineDied("the engine's process is gone")
        # A timeout without a deadline. `mark_dead` sets its deadline to now, which ends this call only.
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

    def mark_dead(self) -> None:
        """Mark the engine as dead and end all calls that wait for it."""
        self.is_dead = True
        now_s = asyncio.get_running_loop().time()
        for scope in self._calls:
            scope.reschedule(now_s)
        self._calls.clear()

    async def close(self) -> None:
        """Close the engine, or cancel its opening if it is not open yet.

        Raises the error of closing, unless the engine is dead.
        """
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()
        # `wait` does not raise the task's exception, and a cancelled opening is no error.
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()


class RestartingSession:
    """Session of one lifetime of the engine."""

    def __init__(
        self, inner: EngineSession, lifetime: EngineLifetime, report_crash: Callable[[EngineLifetime, EngineDied], None]
    ) -> None:
        self._inner = inner
        self._lifetime = lifetime
        self._report_crash = report_crash

    @property
    def ids(self) -> Sequence[int]:
        """See `EngineSession.ids`."""
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        try:
            async with self._lifetime.track_call():
                return await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        except EngineDied as error:
            self._report_crash(self._lifetime, error)
            raise

    async def undo(self, call: "asyncio.Task[Chunk]") -> int:
        """See `EngineSession.undo`."""
        try:
            async with self._lifetime.track_call():
                return await self._inner.undo(call)
        except EngineDied as error:
            self._report_crash(self._lifetime, error)
            raise


class RestartingEngine:
    """Engine that restarts after it dies. Create it with `open_restarting_engine`."""

    def __init__(self, opener: OpenEngine, pause_s: float) -> None:
        self._opener = opener
        self._pause_s = pause_s
        self._lifetime: EngineLifetime
        self._restart_task: asyncio.Task[None] | None = None
        self._weights: tuple[Path, int] | None = None
        self._crashes_in_a_row = 0
        self._last_error: EngineError = EngineDied("it never died")
        self._earlier_preemptions = PreemptionStats()
        self.crash_count = 0
        """See `HasRestarts.crash_count`."""
        self.policy_step = 0

    async def open(self) -> None:
        """Open an engine and load the weights of the previous one."""
        lifetime = EngineLifetime(self._opener())
        try:
            engine = await lifetime.wait_opened()
            if self._weights is not None:
                await engine.load_weights(*self._weights)
        except BaseException:
            # Errors while it closes do not matter.
            lifetime.mark_dead()
            await lifetime.close()
            raise
        self._lifetime = lifetime
        self.name, self.context_tokens = engine.name, engine.context_tokens
        self.fallback_reason, self.forbidden_ids = engine.fallback_reason, engine.forbidden_ids
        self.seeds_sessions, self.policy_step = engine.seeds_sessions, engine.policy_step

    async def close(self) -> None:
        """Close the engine."""
        if self._restart_task is not None:
            # A restart would replace the engine that is closed below.
            self._restart_task.cancel()
            await asyncio.wait({self._restart_task})
        await self._lifetime.close()

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`."""
        return self._session(prompt_ids, sampling)

    @asynccontextmanager
    async def _session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        lifetime = None
        try:
            async with AsyncExitStack() as stack:
                lifetime, inner = await self._enter_session(stack, prompt_ids, sampling)
                yield RestartingSession(inner, lifetime, self._on_crash)
        except Exception as error:
            if lifetime is None or not lifetime.is_dead or isinstance(error, EngineDied):
                raise
            raise EngineDied("the engine's process is gone, so the use of its session failed") from error
        # Raise even if the caller has swallowed the error of a call.
        if lifetime.is_dead:
            raise EngineDied("the engine's process is gone; it died while this session was open")

    async def _enter_session(
        self, stack: AsyncExitStack, prompt_ids: Sequence[int], sampling: Sampling
    ) -> tuple[EngineLifetime, EngineSession]:
        """Open a session on a live engine. If it dies before the session is open, try again on the next one."""
        while True:
            lifetime = await self._get_live_engine()
            try:
                async with lifetime.track_call():
                    return lifetime, await stack.enter_async_context(lifetime.engine.session(prompt_ids, sampling))
            except EngineDied as error:
                self._on_crash(lifetime, error)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`.

        Raises:
            UnrecoverableError: the engine died too often.
        """
        # Set before the load, so that a restart in the meantime loads these weights.
        previous, self._weights = self._weights, (folder, policy_step)
        if policy_step != self.policy_step:
            # A training step is complete, so earlier deaths no longer count.
            self._crashes_in_a_row = 0
        while True:
            # An engine that is just opening may have read the folder's previous content, so load again.
            lifetime = await self._get_live_engine()
            try:
                async with lifetime.track_call():
                    await lifetime.engine.load_weights(folder, policy_step)
                break
            except EngineDied as error:
                self._on_crash(lifetime, error)
            except BaseException:
                self._weights = previous
                raise
        self.policy_step = policy_step

    async def sleep(self) -> None:
        """See `SupportsSleep.sleep`."""
        lifetime = self._lifetime
        if lifetime.is_dead or not isinstance(lifetime.engine, SupportsSleep):
            return
        try:
            async with lifetime.track_call():
                await lifetime.engine.sleep()
        except EngineDied as error:
            self._on_crash(lifetime, error)

    @property
    def preemptions(self) -> PreemptionStats | None:
        """Preemption counts of all engines that were opened, see `HasPreemptionStats.preemptions`."""
        engine = self._lifetime.engine
        current = engine.preemptions if isinstance(engine, HasPreemptionStats) else None
        return None if current is None else current.add(self._earlier_preemptions)

    def _on_crash(self, lifetime: EngineLifetime, error: EngineError) -> None:
        """Mark the engine of `lifetime` as dead. Only the first caller counts the death."""
        if not lifetime.is_dead:
            lifetime.mark_dead()
            self._record_crash(error)

    def _record_crash(self, error: EngineError) -> None:
        self.crash_count += 1
        self._crashes_in_a_row += 1
        self._last_error = error

    async def _get_live_engine(self) -> EngineLifetime:
        """Return the live engine; restart it first if it is dead.

        Raises:
            UnrecoverableError: the engine died too often.
        """
        while self._lifetime.is_dead:
            if self._restart_task is None or self._restart_task.done():
                # One restart serves all callers, and outlives those that are cancelled.
                self._restart_task = asyncio.create_task(self._restart())
                self._restart_task.add_done_callback(_consume_result)
            await asyncio.shield(self._restart_task)
        return self._lifetime

    async def _restart(self) -> None:
        # Counts of the earlier engines, which the new one does not know.
        preemptions = self.preemptions
        while True:
            # Give up after too many deaths in a row.
            if self._crashes_in_a_row >= MAX_CRASHES:
                remedy = "free memory if the kernel killed it (see dmesg), or give it less"
                state = f"dead {self._crashes_in_a_row} times in a row, with no step in between ({self._last_error})"
                raise UnrecoverableError(f"engine {self.name}", state, remedy) from self._last_error
            await asyncio.sleep(self._pause_s)
            message = "the engine has died (%s); another one is opened with the weights of policy step %d"
            log.warning(message, self._last_error, self._weights[1] if self._weights else self.policy_step)
            # Close the dead engine first, so that its memory is free.
            await self._lifetime.close()
            try:
                await self.open()
            except EngineError as error:
                self._record_crash(error)
                continue
            self._earlier_preemptions = preemptions or PreemptionStats()
            return


@asynccontextmanager
async def open_restarting_engine(opener: OpenEngine, *, pause_s: float = PAUSE_S) -> AsyncIterator[RestartingEngine]:
    """Open an engine with `opener`, and open another one whenever its process dies.

    It gives up after `MAX_CRASHES` deaths in a row.

    Args:
        opener: opens an engine.
        pause_s: seconds between a death and the restart.

    Raises:
        UnrecoverableError: from every use of the engine, once it has died too often.
    """
    engine = RestartingEngine(opener, pause_s)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


def _consume_result(task: "asyncio.Task[None]") -> None:
    """Retrieve the exception of a restart, so that asyncio does not log it if no caller waits any more."""
    if not task.cancelled():
        task.exception()
