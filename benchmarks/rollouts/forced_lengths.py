"""Rollouts of a random policy with forced line lengths: tokens are sampled, but the end of each line is given.

Only two parts are wrapped; everything between them is that of training. The engine ends each chunk at a given length,
and the renderer replaces the text of each line by a valid one. Half of these texts print 18 digits, half print nothing.
So an observation has ten tokens on average with the bundled tokenizer.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.engine.base import Chunk, ChunkEnd, Engine, EngineSession, Sampling, Watch
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox.base import Sandbox, SandboxSession
from repl_rl.trajectory.console_text import PS1

SHORTEST, LONGEST = 8, 20
"""Tokens of a line; 14 on average."""
_LEAST_DIGITS = 10**17


@dataclass(frozen=True, slots=True)
class Plan:
    """Number and lengths of the lines of each rollout, equal for all contenders."""

    rollouts: int
    """Concurrent rollouts (>= 1)."""
    lines: int
    """Lines per rollout (>= 1)."""

    def lengths(self) -> list[list[int]]:
        """Return the tokens of each line of each rollout."""
        rng = random.Random(0)
        return [[rng.randint(SHORTEST, LONGEST) for _ in range(self.lines)] for _ in range(self.rollouts)]

    def code(self, ids: Sequence[int]) -> str:
        """Return the physical line that replaces the sampled `ids`."""
        # Equal ids give the same line, so that a line that is decoded twice does not change.
        number = _LEAST_DIGITS + random.Random(hash(tuple(ids))).randrange(_LEAST_DIGITS)
        return f"x = {number}" if number % 2 else f"print({number})"

    def known(self) -> list[list[str]]:
        """Return observations with the same lengths as those of the replaced lines."""
        rng = random.Random(1)
        printed = f"{_LEAST_DIGITS}\n{PS1}"
        return [[printed if rng.random() < 0.5 else PS1 for _ in range(self.lines)] for _ in range(self.rollouts)]


class ForcedRenderer(Renderer):
    """Renderer that replaces the text of sampled ids by a valid line. It still decodes them, at the usual cost."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._plain = Renderer.from_folder(folder)
        self._plan = plan
        super().__init__(self._plain.tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset()

    def encode(self, text: str) -> tuple[int, ...]:
        """As `Renderer.encode`."""
        return self._plain.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that replaces a line."""
        # Pay the cost of decoding, then replace the text.
        super().decode(ids)
        return self._plan.code(ids) + "\n"


class TimedSession:
    """Engine session that measures its time."""

    def __init__(self, inner: EngineSession) -> None:
        self.engine_s = 0.0
        """Wall clock spent in `sample`, seconds."""
        self._inner = inner

    @property
    def ids(self) -> Sequence[int]:
        """As `EngineSession.ids`."""
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """As `EngineSession.sample`."""
        started = time.perf_counter()
        try:
            return await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        finally:
            self.engine_s += time.perf_counter() - started

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """As `EngineSession.undo`."""
        return await self._inner.undo(call)


class ForcedSession(TimedSession):
    """Engine session that ends each chunk at a given length, as if its last id were a newline."""

    def __init__(self, inner: EngineSession, lengths: Sequence[int]) -> None:
        super().__init__(inner)
        self._left = list(reversed(lengths))
        self._length = 0

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """As `EngineSession.sample`, but `max_tokens`, `stop_ids` and `watch` have no effect."""
        self._length = self._left.pop()
        chunk = await super().sample(observed, max_tokens=self._length, stop_ids=frozenset())
        return replace(chunk, end=ChunkEnd.STOP_ID)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """As `EngineSession.undo`."""
        # The line is sampled again, so its length is needed again.
        self._left.append(self._length)
        return await super().undo(call)


class TimedEngine:
    """Engine whose sessions measure their time and, given a plan's lengths, are forced, in the plan's order."""

    def __init__(self, inner: Engine, lengths: Sequence[Sequence[int]] | None = None) -> None:
        self.name = inner.name
        self.policy_step = inner.policy_step
        self.context_tokens = inner.context_tokens
        self.fallback_reason = inner.fallback_reason
        self.seeds_sessions = inner.seeds_sessions
        self.forbidden_ids = inner.forbidden_ids
        self.sessions: list[TimedSession] = []
        """All sessions that were opened."""
        self._inner = inner
        self._lengths = None if lengths is None else iter(lengths)

    @property
    def engine_s(self) -> float:
        """Wall clock spent in the engine, summed over sessions, seconds."""
        return sum(session.engine_s for session in self.sessions)

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """As `Engine.session`."""
        return self._session(prompt_ids, sampling)

    @asynccontextmanager
    async def _session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        async with self._inner.session(prompt_ids, sampling) as inner:
            session = ForcedSession(inner, next(self._lengths)) if self._lengths is not None else TimedSession(inner)
            self.sessions.append(session)
            yield session

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """As `Engine.load_weights`."""
        await self._inner.load_weights(folder, policy_step)
        self.policy_step = policy_step


class Leased:
    """Sandbox of consoles that open before and close after a measurement, so that no figure includes their start."""

    def __init__(self, sandbox: Sandbox, sessions: list[SandboxSession]) -> None:
        self.name = sandbox.name
        self.python_version = sandbox.python_version
        self._sessions = sessions

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """As `Sandbox.session`."""
        yield self._sessions.pop()


@asynccontextmanager
async def leased(sandbox: Sandbox, count: int) -> AsyncIterator[Leased]:
    """Open `count` consoles for the block."""
    async with AsyncExitStack() as stack:
        yield Leased(sandbox, [await stack.enter_async_context(sandbox.session()) for _ in range(count)])
