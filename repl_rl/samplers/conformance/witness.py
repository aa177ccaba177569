"""Recording engine: it plays scripts and records the ids that it sampled and was given, for checks of trajectories."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from repl_rl.engine.base import Chunk, EngineSession, Sampling, Watch
from repl_rl.engine.scripted import ScriptedEngine
from repl_rl.record.trajectory import LineStatus, Prompt, Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import RolloutSampler
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession
from repl_rl.tasks import Task


@dataclass(frozen=True, slots=True)
class Taken:
    """Chunk that was sampled and taken back."""

    at: int
    """Position of its first id."""
    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(slots=True)
class Seen:
    """Record of one session: each id after the prompt with its log probability (nats), or None for an observed id."""

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    chunks: int = 0
    taken: list[Taken] = field(default_factory=list)

    def give(self, ids: Sequence[int]) -> None:
        """Record given ids.

        They are observed, unless they start with a chunk that was taken back here. That chunk was then chosen.
        """
        here = (t for t in self.taken if t.at == len(self.ids) and t.ids == (*ids[: len(t.ids)],))
        own = max((t.logprobs for t in here), key=len, default=())
        self.ids += ids
        self.logprobs += [*own, *[None] * (len(ids) - len(own))]

    def take_back(self, at: int) -> None:
        """Remove the newest chunk, which began at `at`, from the session."""
        self.taken.append(Taken(at, tuple(self.ids[at:]), tuple(self.logprobs[at:])))
        del self.ids[at:], self.logprobs[at:]

    def sampled_at(self, at: int) -> list[tuple[tuple[int, ...], tuple[float | None, ...]]]:
        """Return ids and log probabilities that were sampled at a position and taken back."""
        return [(t.ids[at - t.at :], t.logprobs[at - t.at :]) for t in self.taken if t.at <= at]


class Pause:
    """Point at which a session waits forever."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    async def wait(self) -> None:
        """Signal that it was reached, and never return."""
        self.reached.set()
        await asyncio.Event().wait()


Trouble = Callable[[int], Exception | Pause | None]
"""Function from the number of a chunk, from 1, to an error to raise, a pause, or None."""


def no_trouble(chunk: int) -> None:
    """Return None, so that every chunk succeeds."""


def at(number: int, trouble: Exception | Pause) -> Trouble:
    """Return a function with trouble at one chunk."""
    return lambda chunk: trouble if chunk == number else None


class Witness:
    """Scripted engine that records every id. Log probabilities differ from token to token."""

    name = "witness"
    policy_step = 0
    fallback_reason: str | None = None
    seeds_sessions = True

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        context_tokens: int,
        trouble: Trouble = no_trouble,
        forbidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.inner = ScriptedEngine(scripts, context_tokens=context_tokens, forbidden_ids=forbidden_ids)
        self.context_tokens = context_tokens
        self.forbidden_ids = forbidden_ids
        self.trouble = trouble
        self.seen: list[Seen] = []

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`."""
        return self._session(prompt_ids, sampling)

    @asynccontextmanager
    async def _session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        seen = Seen(tuple(prompt_ids))
        self.seen.append(seen)
        async with self.inner.session(prompt_ids, sampling) as session:
            yield _WitnessSession(session, seen, self.trouble)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`."""
        await self.inner.load_weights(folder, policy_step)


class _WitnessSession:
    def __init__(self, inner: EngineSession, seen: Seen, trouble: Trouble) -> None:
        self._inner = inner
        self._seen = seen
        self._trouble = trouble
        self._before = 0

    @property
    def ids(self) -> Sequence[int]:
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        seen = self._seen
        seen.chunks += 1
        trouble = self._trouble(seen.chunks)
        if isinstance(trouble, Exception):
            raise trouble
        if trouble is not None:
            await trouble.wait()
        given = tuple(observed)
        self._before = len(seen.ids)
        chunk = await self._inner.sample(given, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)
        start = len(seen.ids) + len(given)
        # A value that depends on position and id, so that exchanged log probabilities are noticed.
        logprobs = tuple(-((at + token) % 97 + 1) / 128 for at, token in enumerate(chunk.token_ids, start))
        seen.give(given)
        seen.ids += chunk.token_ids
        seen.logprobs += logprobs
        return replace(chunk, logprobs=logprobs)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        # The record of the session must lose the same chunk.
        sampled = await self._inner.undo(call)
        self._seen.take_back(self._before)
        return sampled


class Watched(RolloutSampler):
    """Sampler that plays a rollout as another sampler, and records if that ended without an error."""

    def __init__(self, inner: RolloutSampler) -> None:
        self._inner = inner
        self.returned = False

    def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
        """Return the prompt of the other sampler."""
        return self._inner.prompt(task, renderer, template, version)

    async def on_start(self, episode: Episode) -> None:
        """Call `on_start` of the other sampler."""
        await self._inner.on_start(episode)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Call `on_end` of the other sampler."""
        await self._inner.on_end(rollout, result)

    async def rollout(self, episode: Episode) -> None:
        await self._inner.rollout(episode)
        self.returned = True


class FaultySandbox:
    """Sandbox whose consoles fail with a sandbox fault at their first line."""

    name = "faulty"

    def __init__(self, like: Sandbox) -> None:
        self.python_version = like.python_version
        self.sessions = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """See `Sandbox.session`."""
        self.sessions += 1
        yield _FaultySession()


class _FaultySession:
    ended = False

    async def push(self, line: str) -> PushResult:
        self.ended = True
        return PushResult("", False, LineStatus.SANDBOX_FAULT, None, 0.0)
