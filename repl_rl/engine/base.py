"""Interfaces of inference engines, and limits that all engines share.

An engine session takes observed ids and samples new ones. Engines handle token ids only. They know neither text, nor
lines, nor consoles.

Every engine uses the functions and the lock below the interfaces: size and end of a chunk, a copy of the prompt, and
`ReadWriteLock` between sampling and weight loads.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, EngineError

Watch = Callable[[int], bool]
"""Callback that gets each sampled id in order; True stops sampling after that id."""


class ChunkEnd(StrEnum):
    """Reason for the end of a chunk."""

    STOP_ID = "stop_id"
    """The last id is one of the requested stop ids."""
    WATCH = "watch"
    """The watch returned True for the last id."""
    LENGTH = "length"
    """`max_tokens` ids were sampled."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ids that the policy sampled in one call; never empty. `logprobs` are nats under the raw policy, each <= 0.

    The raw policy has temperature 1 and gives the engine's forbidden ids probability 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: ChunkEnd
    policy_step: int
    """Number of optimizer steps applied to the weights that sampled the chunk: the policy version. If keys and values
    were kept across a change of weights, it is the version that computed the oldest of them."""

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise EngineError(
                f"the engine returned {len(self.token_ids)} ids with {len(self.logprobs)} log probabilities; "
                "a chunk has at least one id and one log probability for each"
            )
        # Lists would make a frozen chunk mutable.
        for name in ("token_ids", "logprobs"):
            if not isinstance(getattr(self, name), tuple):
                raise EngineError(f"Chunk.{name} is {getattr(self, name)!r}; give a tuple")
        for logprob in self.logprobs:
            # NaN fails this comparison as well.
            if not -math.inf < logprob <= 0.0:
                raise EngineError(f"the engine returned the log probability {logprob!r}; it is finite and <= 0")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a session.

    `temperature` 0 is greedy. Log probabilities are always those of the raw policy (temperature 1), so training needs
    temperature 1. Other values are for evaluation.
    """

    temperature: float = 1.0
    seed: int | None = None
    """Seed of this session's draws, if the engine has `seeds_sessions`. None uses the engine's random stream."""
    nested: bool = False
    """True if the caller already holds another open session. Such a session is admitted without waiting for room in the
    KV cache."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError("temperature", self.temperature, "give a finite number, 0 or more; 0 is greedy")


class EngineSession(Protocol):
    """One rollout's growing sequence of ids in the engine. Ids are only appended, unless `undo` takes a call back."""

    @property
    def ids(self) -> Sequence[int]:
        """All ids of this session in order, as the engine got or sampled them: prompt, sampled, observed."""

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """Append `observed` ids (may be empty), then sample until a stop id, the watch, or `max_tokens` (>= 1).

        The stopping id is part of the chunk. Ids past it never appear, here or in `ids`.

        Raises:
            EngineDied: the engine's process is gone. A `HasRestarts` engine replaces it.
            EngineError: the context is full, or the engine refused the request.
        """

    async def undo(self, call: "asyncio.Task[Chunk]") -> int:
        """Take back the last call of `sample`, running or done, and restore the ids from before it.

        Args:
            call: the task of that call, which has started; it is cancelled.

        Returns:
            The number of ids that the call sampled.
        """


@runtime_checkable
class SupportsSleep(Protocol):
    """Engine that can release its memory to the trainer between rollouts."""

    async def sleep(self) -> None:
        """Release the memory until a session is opened or weights are loaded. Does nothing while a session is open."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class PreemptionStats:
    """Preemption counts: the cost of a KV cache that is too small for all open sessions."""

    preempted: int = 0
    """Number of times that a session lost its keys and values to others."""
    recomputed: int = 0
    """Number of ids whose keys and values were lost this way. They are computed again when the session continues."""

    def subtract(self, before: "PreemptionStats") -> "PreemptionStats":
        """Return the counts after `before`, an earlier value."""
        return PreemptionStats(self.preempted - before.preempted, self.recomputed - before.recomputed)

    def add(self, before: "PreemptionStats") -> "PreemptionStats":
        """Return the sum of both counts."""
        return PreemptionStats(self.preempted + before.preempted, self.recomputed + before.recomputed)


@runtime_checkable
class HasPreemptionStats(Protocol):
    """Engine whose sessions share a KV cache that can be too small for them."""

    @property
    def preemptions(self) -> PreemptionStats | None:
        """Preemption counts since the engine was opened. None means that it has no such cache."""


@runtime_checkable
class HasRestarts(Protocol):
    """Engine that restarts after its process dies.

    Sessions that are open at that time raise `EngineDied`, at the latest when they are closed. Later sessions use the
    new process, which has the same weights as the old one.
    """

    @property
    def crash_count(self) -> int:
        """Number of times that the engine died."""


class Engine(Protocol):
    """Open engine. `open_engine` opens and closes it."""

    name: str
    policy_step: int
    """Number of optimizer steps applied to the loaded weights: the policy version."""
    context_tokens: int
    """Longest sequence in tokens, prompt included."""
    fallback_reason: str | None
    """Reason for a slower request mode than the requested one. None means that there is no fallback."""
    forbidden_ids: frozenset[int]
    """Ids that the policy never samples, with any weights. Their probability is 0."""
    seeds_sessions: bool
    """True if `Sampling.seed` alone decides what a session draws."""

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """Open a session that starts from `prompt_ids` (at least one id)."""

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """Replace the weights by those of the checkpoint in `folder`.

        No later session gets keys or values of the old weights. Open sessions stay open. Running calls of `sample`
        finish first. Later calls wait, then sample from the new weights. They compute keys and values again from all
        ids, unless the engine was opened to keep them.

        The folder must stay unchanged until the next call, since a `HasRestarts` engine may need it again.
        """


def compute_chunk_budget(used: int, observed: Sequence[int], max_tokens: int, context_tokens: int) -> int:
    """Return the number of ids that the next chunk may sample, 1 to `max_tokens`.

    It is smaller than `max_tokens` if the context ends before. `used` is the number of ids in the session, without
    `observed`.

    Raises:
        EngineError: `max_tokens` is below 1 (such a request kills vLLM's process), or the context is full.
    """
    if max_tokens < 1:
        raise EngineError(f"max_tokens is {max_tokens}; a chunk samples at least 1 id")
    # The observed ids enter the context before any sampled one.
    remaining = context_tokens - used - len(observed)
    if remaining < 1:
        raise EngineError(
            f"the context is full: {used} ids and {len(observed)} observed ones leave no room in {context_tokens}; "
            "end the rollout, cut observations, or raise context_tokens"
        )
    return min(max_tokens, remaining)


def find_chunk_end(
    token_id: int, sampled: int, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None
) -> ChunkEnd | None:
    """Return the reason why a chunk ends with `token_id`, or None if the chunk continues.

    `sampled` counts the ids of the chunk, including `token_id`, and `max_tokens` is its limit. The watch sees every id,
    including the last one. A stop id takes precedence over the watch, and both over the length.
    """
    # Call the watch before the stop check, so that it sees a stop id as well.
    watched = watch is not None and watch(token_id)
    if token_id in stop_ids:
        return ChunkEnd.STOP_ID
    if watched:
        return ChunkEnd.WATCH
    return ChunkEnd.LENGTH if sampled >= max_tokens else None


def copy_prompt_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Return `prompt_ids` as a list that belongs to the session.

    Raises:
        EngineError: `prompt_ids` is empty.
    """
    if not prompt_ids:
        raise EngineError("the prompt has 0 ids; a session starts from at least 1")
    return list(prompt_ids)


class ReadWriteLock:
    """Lock between changes of weights and calls of `sample`: calls run together, a change runs alone.

    A waiting change lets running calls finish and blocks new ones.
    """

    def __init__(self) -> None:
        self._entry_lock = asyncio.Lock()
        self._readers = 0
        self._no_readers = asyncio.Event()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        """Hold the lock for one call of `sample`, together with other calls."""
        # The entry lock is released before the call runs. A change holds it, so new calls wait here.
        async with self._entry_lock:
            self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._no_readers.set()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[None]:
        """Hold the lock alone, after running calls have finished."""
        # Keep the entry lock for the whole change: no call enters while running ones finish, or during the change.
        async with self._entry_lock:
            while self._readers:
                self._no_readers.clear()
                await self._no_readers.wait()
            yield
