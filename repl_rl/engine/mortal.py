"""Scripted engine that dies: a public fake of an engine whose process is killed in the middle of a step."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from repl_rl.engine.base import Chunk, Engine, EngineSession, Sampling, Watch
from repl_rl.engine.scripted import ScriptedEngine
from repl_rl.errors import EngineDied


@dataclass(slots=True)
class MortalEngine(ScriptedEngine):
    """Scripted engine that dies in place of one of its chunks.

    That call and later ones raise `EngineDied`; calls that already wait get no answer.
    """

    life_chunks: int | None = None
    """Number of chunks before it dies (>= 0). None means that it does not die."""
    dead: bool = field(default=False, init=False)
    _given: int = field(default=0, init=False)

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `ScriptedEngine.session`."""
        return self._mortal(ScriptedEngine.session(self, prompt_ids, sampling))

    @asynccontextmanager
    async def _mortal(self, opening: AbstractAsyncContextManager[EngineSession]) -> AsyncIterator[EngineSession]:
        async with opening as session:
            yield MortalSession(session, self)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `ScriptedEngine.load_weights`."""
        self.refuse_if_dead()
        await ScriptedEngine.load_weights(self, folder, policy_step)

    def spend(self) -> None:
        """Count one chunk.

        Raises:
            EngineDied: no chunk is left.
        """
        self.refuse_if_dead()
        self.dead = self._given == self.life_chunks
        self._given += 1
        self.refuse_if_dead()

    def refuse_if_dead(self) -> None:
        """Raise EngineDied if the engine is dead."""
        if self.dead:
            raise EngineDied("the process of the scripted engine was killed")


class MortalSession:
    """One session of a `MortalEngine`."""

    def __init__(self, inner: EngineSession, engine: MortalEngine) -> None:
        self._inner = inner
        self._engine = engine

    @property
    def ids(self) -> Sequence[int]:
        """See `EngineSession.ids`."""
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        self._engine.spend()
        chunk = await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        if self._engine.dead:
            # The engine died during this call, so no answer ever comes.
            await asyncio.Event().wait()
        return chunk

    async def undo(self, call: "asyncio.Task[Chunk]") -> int:
        """See `EngineSession.undo`."""
        self._engine.refuse_if_dead()
        return await self._inner.undo(call)


@dataclass(slots=True)
class Lives:
    """Factory that opens one `MortalEngine` after the other, for `lasting`. The last one does not die."""

    make: Callable[[], MortalEngine]
    chunks: Sequence[int]
    """Number of chunks of each engine that dies."""
    opened: list[MortalEngine] = field(default_factory=list, init=False)
    """All engines that were opened so far."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        """Open the next engine."""
        engine = self.make()
        if len(self.opened) < len(self.chunks):
            engine.life_chunks = self.chunks[len(self.opened)]
        self.opened.append(engine)
        yield engine
