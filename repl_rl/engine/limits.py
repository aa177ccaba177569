"""Limits that all engines share: size and end of a chunk, and a lock between sampling and weight loads."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from repl_rl.engine.base import ChunkEnd, Watch
from repl_rl.errors import EngineError


def room(held: int, observed: Sequence[int], max_tokens: int, context_tokens: int) -> int:
    """Return the number of ids that the next chunk may sample, 1 to `max_tokens`.

    It is smaller than `max_tokens` if the context ends before. `held` is the number of ids in the session, without
    `observed`.

    Raises:
        EngineError: `max_tokens` is below 1 (such a request kills vLLM's process), or the context is full.
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
    """Return the reason why a chunk ends with `token_id`, or None if the chunk continues.

    `sampled` counts the ids of the chunk, including `token_id`, and `most` is its limit. The watch sees every id,
    including the last one. A stop id takes precedence over the watch, and both over the length.
    """
    # Call the watch before the stop check, so that it sees a stop id as well.
    watched = watch is not None and watch(token_id)
    if token_id in stop_ids:
        return ChunkEnd.STOP_ID
    if watched:
        return ChunkEnd.WATCH
    return ChunkEnd.LENGTH if sampled >= most else None


def first_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Return `prompt_ids` as a list that belongs to the session.

    Raises:
        EngineError: `prompt_ids` is empty.
    """
    if not prompt_ids:
        raise EngineError("the prompt has 0 ids; a session starts from at least 1")
    return list(prompt_ids)


class Gate:
    """Lock between changes of weights and calls of `sample`: calls run together, a change runs alone.

    A waiting change lets running calls finish and blocks new ones.
    """

    def __init__(self) -> None:
        self._door = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Hold the lock for one call of `sample`, together with other calls."""
        # Released before the call runs. A change holds the door, so new calls wait here.
        async with self._door:
            self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._empty.set()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Hold the lock alone, after running calls have finished."""
        # Keep the door for the whole change: no call enters while running ones finish, or during the change.
        async with self._door:
            while self._inside:
                self._empty.clear()
                await self._empty.wait()
            yield
