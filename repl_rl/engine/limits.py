"""What every engine shares: how much room a chunk has, where it ends, and who may pass while weights change."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from repl_rl.engine.base import ChunkEnd, Watch
from repl_rl.errors import EngineError


def room(held: int, observed: Sequence[int], max_tokens: int, context_tokens: int) -> int:
    """How many ids the next chunk may sample, 1 to `max_tokens`: fewer where the context ends before.

    `held` is how many ids the session has, without `observed`.

    Raises:
        EngineError: `max_tokens` is below 1 (such a request kills vLLM's process), or no id fits any more.
    """
    if max_tokens < 1:
        raise EngineError(f"max_tokens is {max_tokens}; a chunk samples at least 1 id")
    left = context_tokens - held - len(observed)
    if left < 1:
        raise EngineError(
            f"the context is full: {held} ids and {len(observed)} observed ones leave no room in {context_tokens}; "
            "end the rollout, cut observations, or raise context_tokens"
        )
    return min(max_tokens, left)


def ending(token_id: int, sampled: int, most: int, stop_ids: frozenset[int], watch: Watch | None) -> ChunkEnd | None:
    """Why a chunk of `sampled` ids ends with `token_id`, or None when it goes on.

    The watch sees every id, the last one included; a stop id wins over the watch, and both over the length.
    """
    watched = watch is not None and watch(token_id)
    if token_id in stop_ids:
        return ChunkEnd.STOP_ID
    if watched:
        return ChunkEnd.WATCH
    return ChunkEnd.LENGTH if sampled >= most else None


def first_ids(prompt_ids: Sequence[int]) -> list[int]:
    """`prompt_ids` as a session's own list.

    Raises:
        EngineError: there is no id to start from.
    """
    if not prompt_ids:
        raise EngineError("the prompt has 0 ids; a session starts from at least 1")
    return list(prompt_ids)


class Gate:
    """Keeps a change of weights and calls of `sample` apart: any number of calls pass together, a change passes alone.

    A change that waits lets those inside leave and nobody else in.
    """

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Pass beside other calls."""
        async with self._door:
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._empty.set()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Pass alone, after the calls under way have ended."""
        async with self._door:
            while self._inside:
                self._empty.clear()
                await self._empty.wait()
            yield
