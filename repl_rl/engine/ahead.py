"""Optimistic streaming: sampling goes on while the console still works, as if it were known what it will print.

What was sampled ahead is kept when the guess comes true and taken back when it does not. Which of the two happens
depends on the guess alone, never on the ids that were sampled, so what is kept is drawn from the policy as ever.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from repl_rl.engine.base import Chunk, EngineSession, Watch


@dataclass(slots=True)
class Tally:
    """What sampling ahead brought."""

    kept_chunks: int = 0
    wasted_chunks: int = 0
    wasted_tokens: int = 0
    """Sampled ids that were taken back."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What the next call of `sample` is expected to ask for."""

    observed: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]


class AheadSession:
    """An engine session that can sample the next chunk before it is asked for."""

    def __init__(self, inner: EngineSession, tally: Tally) -> None:
        self._inner = inner
        self._tally = tally
        self._guess: Guess | None = None
        self._call: asyncio.Task[Chunk] | None = None
        self._held = 0
        self._begun = False

    @property
    def ids(self) -> Sequence[int]:
        """As `EngineSession.ids`: without those that were sampled ahead."""
        return self._inner.ids if self._call is None else self._inner.ids[: self._held]

    def guess(self, guess: Guess) -> None:
        """Begin to sample as if the next call of `sample` asked for `guess`. A guess that still stands remains."""
        if self._call is None:
            self._held, self._begun = len(self._inner.ids), False
            self._guess = guess
            self._call = asyncio.create_task(self._sample(guess))
            self._call.add_done_callback(_look_at)

    async def _sample(self, guess: Guess) -> Chunk:
        self._begun = True
        return await self._inner.sample(guess.observed, max_tokens=guess.max_tokens, stop_ids=guess.stop_ids)

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """As `EngineSession.sample`."""
        if self._call is not None and watch is None and self._guess == Guess(tuple(observed), max_tokens, stop_ids):
            call = self._call
            chunk = await call  # a cancellation of ours cancels it too
            self._call = None
            self._tally.kept_chunks += 1
            return chunk
        await self.forget()
        return await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """As `EngineSession.undo`."""
        await self.forget()
        return await self._inner.undo(call)

    async def forget(self) -> None:
        """Take back what was sampled ahead."""
        call = self._call
        if call is None:
            return
        if self._begun:
            self._tally.wasted_tokens += await self._inner.undo(call)
        else:
            call.cancel()
            await asyncio.wait({call})
        self._tally.wasted_chunks += 1
        self._call = None


def _look_at(call: asyncio.Task[Chunk]) -> None:
    """Keep asyncio from reporting the error of a call that nobody awaits any more: who samples next learns of it."""
    if not call.cancelled():
        call.exception()


@asynccontextmanager
async def ahead(inner: EngineSession, tally: Tally) -> AsyncIterator[AheadSession]:
    """A session that samples ahead on `inner`; nothing is under way in `inner` after the block."""
    session = AheadSession(inner, tally)
    try:
        yield session
    finally:
        await session.forget()
