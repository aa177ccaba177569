"""Scripted engines: public fakes of an engine, without a model or a tokenizer.

`ScriptedEngine` plays scripts or calls a function. `FaultyEngine` also dies in the middle of a step, like an engine
whose process is killed. `FaultyEngineSequence` opens several of them for a restarting engine.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import (
    Chunk,
    Engine,
    EngineSession,
    ReadWriteLock,
    Sampling,
    Watch,
    compute_chunk_budget,
    copy_prompt_ids,
    find_chunk_end,
)
from repl_rl.errors import EngineDied, EngineError

ScriptedPolicy = Callable[[Sequence[int]], Sequence[int]]
"""Function from all ids of a session so far to the ids that it samples next (at least one)."""

ScriptSource = Callable[[Sequence[int], int, int], Sequence[int]]
"""Function from the ids so far, the number of sampled ids and the number of wanted ids to the next ids. Ids past the
chunk are dropped."""


def make_script_source(script: Sequence[int]) -> ScriptSource:
    """Return a source that plays the ids of `script` in order and ignores what is observed in between."""

    def source(_ids: Sequence[int], sampled: int, count: int) -> Sequence[int]:
        if sampled >= len(script):
            raise EngineError(f"the script has {len(script)} ids and all were sampled; end the rollout or lengthen it")
        return script[sampled : sampled + count]

    return source


@dataclass(slots=True)
class ScriptedSession:
    """One session of a `ScriptedEngine`."""

    ids: list[int]
    source: ScriptSource
    context_tokens: int
    logprob: float
    lock: ReadWriteLock
    policy_step: Callable[[], int]
    """Function that returns the policy step of the loaded weights."""
    forbidden_ids: frozenset[int] = frozenset()
    sampled: int = 0
    closed: bool = False
    _call_start: tuple[int, int] = (0, 0)
    """Number of ids, and number of sampled ids, before the last chunk."""

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        async with self.lock.read():
            return await self._sample(observed, max_tokens, stop_ids, watch)

    async def _sample(
        self, observed: Sequence[int], max_tokens: int, stop_ids: frozenset[int], watch: Watch | None
    ) -> Chunk:
        if self.closed:
            raise EngineError("the session is closed; open a new one")
        budget = compute_chunk_budget(len(self.ids), observed, max_tokens, self.context_tokens)
        # Remember the state from before this call, for `undo`.
        self._call_start = len(self.ids), self.sampled
        self.ids.extend(observed)
        # Like a real engine, let other sessions run here, and allow a cancellation.
        await asyncio.sleep(0)
        start = len(self.ids)
        # A source may give fewer ids than are wanted, so ask it until the chunk ends.
        while True:
            for token_id in self._get_next_ids(budget - (len(self.ids) - start)):
                if token_id in self.forbidden_ids:
                    raise EngineError(
                        f"the scripted engine was to sample {token_id}, a forbidden id; encode its text with "
                        "Renderer.encode_as_sampled, or use newline_tokens 'carry'"
                    )
                self.ids.append(token_id)
                self.sampled += 1
                end = find_chunk_end(token_id, len(self.ids) - start, budget, stop_ids, watch)
                if end is not None:
                    sampled_ids = tuple(self.ids[start:])
                    return Chunk(sampled_ids, (self.logprob,) * len(sampled_ids), end, self.policy_step())

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """See `EngineSession.undo`."""
        call.cancel()
        await asyncio.wait({call})
        # Restore the ids from before the call. The script resumes at the same place.
        id_count, sampled_before = self._call_start
        undone, self.sampled = self.sampled - sampled_before, sampled_before
        del self.ids[id_count:]
        return undone

    def _get_next_ids(self, count: int) -> Sequence[int]:
        ids = self.source(self.ids, self.sampled, count)
        if not ids:
            raise EngineError("the policy of the scripted engine returned 0 ids; it returns at least 1")
        return ids


@keeps_old_names
@dataclass(slots=True)
class ScriptedEngine:
    """Engine that plays scripts, which are sequences of ids.

    Seeds and prompt alone decide on a session's script, not timing. `ScriptedEngine(scripts)` draws a script per
    session. `ScriptedEngine.from_policy(policy)` calls a function. `ScriptedEngine.from_text(lines, encode)` plays the
    same lines in every session. Every id has log probability `logprob` (nats).
    """

    scripts: Sequence[Sequence[int]]
    seed: int = 0
    context_tokens: int = 1 << 20
    logprob: float = -0.5
    policy: ScriptedPolicy | None = None
    policy_step: int = 0
    forbidden_ids: frozenset[int] = frozenset()
    """Ids that must not be sampled; a script or policy that samples them raises EngineError."""
    name: str = field(default="scripted", init=False)
    seeds_sessions: bool = field(default=True, init=False)
    fallback_reason: str | None = field(default=None, init=False)
    open_sessions: int = field(default=0, init=False)
    lock: ReadWriteLock = field(default_factory=ReadWriteLock, init=False, repr=False)
    loaded_folders: list[Path] = field(default_factory=list, init=False)
    """Folders that `load_weights` got, in order."""

    def __post_init__(self) -> None:
        if self.policy is None and not self.scripts:
            raise EngineError("the scripted engine has 0 scripts and no policy; give one of them")

    @classmethod
    def from_policy(
        cls, policy: ScriptedPolicy, *, context_tokens: int = 1 << 20, forbidden_ids: frozenset[int] = frozenset()
    ) -> Self:
        """Return an engine that calls `policy` with the ids of a session when it needs more."""
        return cls((), policy=policy, context_tokens=context_tokens, forbidden_ids=forbidden_ids)

    @classmethod
    def from_text(cls, lines: Sequence[str], encode: Callable[[str], Sequence[int]]) -> Self:
        """Return an engine in which every session samples `lines`, each encoded separately by `encode`."""
        return cls([[token_id for line in lines for token_id in encode(line)]])

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`. `sampling.seed` chooses among scripts; the temperature has no effect."""
        return self._session(copy_prompt_ids(prompt_ids), sampling)

    @asynccontextmanager
    async def _session(self, ids: list[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        source = self._make_source(ids, sampling)
        session = ScriptedSession(
            ids, source, self.context_tokens, self.logprob, self.lock, lambda: self.policy_step, self.forbidden_ids
        )
        self.open_sessions += 1
        try:
            yield session
        finally:
            self.open_sessions -= 1
            session.closed = True

    def _make_source(self, ids: Sequence[int], sampling: Sampling) -> ScriptSource:
        policy = self.policy
        if policy is not None:
            return lambda ids, _sampled, _wanted: policy(ids)
        # A string seeds by its digest, so the draw is the same in every process.
        draw = random.Random(f"{self.seed} {sampling.seed} {tuple(ids)}")
        return make_script_source(draw.choice(self.scripts))

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`. Reads no file; the scripts stay the same."""
        async with self.lock.write():
            self._load(folder, policy_step)

    def _load(self, folder: Path, policy_step: int) -> None:
        self.loaded_folders.append(folder)
        self.policy_step = policy_step


@dataclass(slots=True)
class FaultyEngine(ScriptedEngine):
    """Scripted engine that dies in place of one of its chunks.

    That call and later ones raise `EngineDied`; calls that already wait get no answer.
    """

    chunks_until_crash: int | None = None
    """Number of chunks before it dies (>= 0). None means that it does not die."""
    is_dead: bool = field(default=False, init=False)
    _chunk_count: int = field(default=0, init=False)

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `ScriptedEngine.session`."""
        return self._open_faulty_session(ScriptedEngine.session(self, prompt_ids, sampling))

    @asynccontextmanager
    async def _open_faulty_session(
        self, opening: AbstractAsyncContextManager[EngineSession]
    ) -> AsyncIterator[EngineSession]:
        async with opening as session:
            yield FaultyEngineSession(session, self)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `ScriptedEngine.load_weights`."""
        self.check_alive()
        await ScriptedEngine.load_weights(self, folder, policy_step)

    def spend_chunk(self) -> None:
        """Count one chunk.

        Raises:
            EngineDied: no chunk is left.
        """
        self.check_alive()
        # The engine dies in place of the chunk after the last one that it may give.
        self.is_dead = self._chunk_count == self.chunks_until_crash
        self._chunk_count += 1
        self.check_alive()

    def check_alive(self) -> None:
        """Raise EngineDied if the engine is dead."""
        if self.is_dead:
            raise EngineDied("the process of the scripted engine was killed")


class FaultyEngineSession:
    """One session of a `FaultyEngine`."""

    def __init__(self, inner: EngineSession, engine: FaultyEngine) -> None:
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
        self._engine.spend_chunk()
        chunk = await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        # Another session may have spent the last chunk meanwhile.
        if self._engine.is_dead:
            # The engine died during this call, so no answer ever comes.
            await asyncio.Event().wait()
        return chunk

    async def undo(self, call: "asyncio.Task[Chunk]") -> int:
        """See `EngineSession.undo`."""
        self._engine.check_alive()
        return await self._inner.undo(call)


@dataclass(slots=True)
class FaultyEngineSequence:
    """Factory that opens one `FaultyEngine` after the other, for `open_restarting_engine`.

    The last one does not die.
    """

    make_engine: Callable[[], FaultyEngine]
    chunks_until_crash: Sequence[int]
    """Number of chunks of each engine that dies."""
    engines: list[FaultyEngine] = field(default_factory=list, init=False)
    """All engines that were opened so far."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        """Open the next engine."""
        engine = self.make_engine()
        # Engines after the listed ones keep their default and do not die.
        if len(self.engines) < len(self.chunks_until_crash):
            engine.chunks_until_crash = self.chunks_until_crash[len(self.engines)]
        self.engines.append(engine)
        yield engine
