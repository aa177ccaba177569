"""What an inference engine is to a rollout: a session that takes observed ids and gives sampled ones.

Engines deal in token ids only. They know neither text, nor lines, nor consoles.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from repl_rl.errors import ConfigError, EngineError

Watch = Callable[[int], bool]
"""Called with each sampled id in order; True asks to stop after that id."""


class ChunkEnd(StrEnum):
    """Why the engine stopped sampling a chunk."""

    STOP_ID = "stop_id"
    """The last id is one of the asked-for stop ids."""
    WATCH = "watch"
    """The watch returned True for the last id."""
    LENGTH = "length"
    """`max_tokens` ids were sampled."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ids that the policy sampled in one go; never empty. `logprobs` are nats under the raw policy, each <= 0.

    The raw policy is that of temperature 1 in which the engine's forbidden ids have probability 0.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: ChunkEnd
    policy_step: int
    """Optimizer steps behind the weights that all of it was sampled from; with keys and values that were kept when
    weights changed, behind those of the oldest."""

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.logprobs):
            raise EngineError(
                f"the engine returned {len(self.token_ids)} ids with {len(self.logprobs)} log probabilities; "
                "a chunk has at least one id and one log probability for each"
            )
        for name in ("token_ids", "logprobs"):
            if not isinstance(getattr(self, name), tuple):
                raise EngineError(f"Chunk.{name} is {getattr(self, name)!r}; give a tuple")
        for logprob in self.logprobs:
            if not -math.inf < logprob <= 0.0:
                raise EngineError(f"the engine returned the log probability {logprob!r}; it is finite and <= 0")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How ids are drawn.

    `temperature` 0 is greedy. Log probabilities are always those of the raw policy (temperature 1), so
    training needs temperature 1; other values are for evaluation.
    """

    temperature: float = 1.0
    seed: int | None = None
    """Seeds this session's draws if the engine `seeds_sessions`; None: the engine's own random stream."""
    nested: bool = False
    """Somebody waits for this session who has one open: it is not kept waiting until the cache has room for it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError("temperature", self.temperature, "give a finite number, 0 or more; 0 is greedy")


class EngineSession(Protocol):
    """One rollout's conversation with the engine. Ids are only ever appended."""

    @property
    def ids(self) -> Sequence[int]:
        """Every id of this session in order, as the engine saw or sampled them: prompt, sampled, observed."""

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """Append `observed` ids (may be empty), then sample until a stop id, the watch, or `max_tokens` (>= 1).

        The stopping id is part of the chunk. Ids past it never appear, here or in `ids`.

        Raises:
            EngineDied: the engine's process is gone; of a `Lasting` engine, another one takes its place.
            EngineError: the context is full, or the engine refused the request.
        """

    async def undo(self, call: "asyncio.Task[Chunk]") -> int:
        """Take back the last call of `sample`, under way or done: ids are what they were before it.

        Args:
            call: the task of that call, begun; it is cancelled.

        Returns:
            How many ids it had sampled.
        """


@runtime_checkable
class Resting(Protocol):
    """An engine that can leave its memory to the trainer between rollouts."""

    async def rest(self) -> None:
        """Do so until a session is opened or weights are loaded; nothing while a session is open."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What it cost that a cache of keys and values was too small for all sessions that were open."""

    preempted: int = 0
    """Times that a session lost its keys and values to others."""
    recomputed: int = 0
    """Ids whose keys and values were lost so, and computed again where that session went on."""

    def since(self, before: "Pressure") -> "Pressure":
        """What came after `before`."""
        return Pressure(self.preempted - before.preempted, self.recomputed - before.recomputed)

    def after(self, before: "Pressure") -> "Pressure":
        """Both together."""
        return Pressure(self.preempted + before.preempted, self.recomputed + before.recomputed)


@runtime_checkable
class Seated(Protocol):
    """An engine whose sessions share a cache that can be too small for them."""

    @property
    def pressure(self) -> Pressure | None:
        """Since it was opened; None: there is no such cache after all."""


@runtime_checkable
class Lasting(Protocol):
    """An engine that is opened again where its process has died.

    Sessions that were open then raise `EngineDied`, at the latest when they are closed; sessions that are opened
    later are those of the new one, which has the weights that the old one had.
    """

    @property
    def deaths(self) -> int:
        """How often that has happened."""


class Engine(Protocol):
    """An open engine. Closing it is the business of `open_engine`."""

    name: str
    policy_step: int
    """Optimizer steps behind the loaded weights."""
    context_tokens: int
    """Longest sequence, prompt included."""
    fallback_reason: str | None
    """Why it is driven in a slower way than asked for; None: it is not."""
    forbidden_ids: frozenset[int]
    """Ids that its policy never samples, whatever weights are loaded: their probability is 0."""
    seeds_sessions: bool
    """True when `Sampling.seed` alone decides what a session draws."""

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """Open a session that starts from `prompt_ids` (at least one id)."""

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """Replace the weights by those of the checkpoint in `folder`. No later session gets keys or values of the old.

        Open sessions stay open: calls of `sample` under way end first, the next ones wait and sample from the new
        weights, with keys and values computed afresh from all ids, unless the engine was opened to keep them. The
        folder stays as it is until the next call: a `Lasting` engine may need it again.
        """
