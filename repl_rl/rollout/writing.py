"""Engine side of a rollout: ids already sent, ids still pending, and the remaining token budget."""

import asyncio
from collections.abc import Callable, Sequence

from repl_rl.engine.base import Chunk, EngineSession, Watch
from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Line, Observed, Prompt
from repl_rl.rollout.renderer import Renderer

Watching = Callable[[], Watch | None]
"""Function that makes the watch of one call. A watch keeps state, so each call needs a new one."""


class Writer:
    """Sampling interface of one rollout, with one engine call at a time. Ids are only ever appended."""

    def __init__(
        self, engine: EngineSession, renderer: Renderer, prompt: Prompt, room: int, most: int | None = None
    ) -> None:
        """Set the token budgets.

        Args:
            engine: session that samples.
            renderer: builder of lines from sampled ids.
            prompt: prompt of the session.
            room: number of ids that fit into the context after the prompt.
            most: number of ids that may be sampled; None means no limit besides `room`.
        """
        self._before: Prompt | Observed | None = prompt
        self._context = room
        self._left = room if most is None else most
        self._engine = engine
        self._renderer = renderer
        self._pending: list[int] = []  # ids that the engine has not seen yet
        self._sampling: int | None = None  # number of ids in the engine before the running call
        self._newest: asyncio.Task[Chunk] | None = None  # newest of several calls at one position
        self._found: list[Line] = []  # lines of those calls

    @property
    def room(self) -> int:
        """Number of ids that may still be sampled, limited by the context and by the sampling budget."""
        return min(self._context, self._left)

    def give(self, observed: Observed) -> None:
        """Append an observation; the engine sees it at the next call."""
        self.restore(observed.token_ids)
        self._before = observed

    def restore(self, ids: Sequence[int]) -> None:
        """Append ids that were sampled before; the engine sees them at the next call."""
        self._before = None
        self._pending.extend(ids)
        self._context -= len(ids)

    @property
    def before(self) -> Prompt | Observed | None:
        """Prompt or observation directly before the next line. None means that a sampled line comes before it."""
        return self._before

    async def line(self, wanted: int, stop_ids: frozenset[int], watch: Watch | None) -> Line:
        """Sample the next line, of at most `wanted` ids or as many as fit.

        Raises:
            ConfigError: `wanted` < 1, or another call is running.
            EngineError: see `EngineSession.sample`.
        """
        budget = self._begin(wanted)
        chunk = await self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=watch)
        self._sampling, self._pending = None, []
        line = self._renderer.line(chunk, self._before)
        self._sampled(len(chunk.token_ids))
        return line

    async def several(self, count: int, wanted: int, stop_ids: frozenset[int], watching: Watching) -> Sequence[Line]:
        """Sample `count` (>= 1) candidate lines from the same ids; call `take` next.

        Raises:
            ConfigError: `count` or `wanted` < 1, or another call is running.
            EngineError: see `EngineSession.sample`.
        """
        if count < 1:
            raise ConfigError("episode.choose(), count", count, "give at least 1")
        budget, self._found = self._begin(wanted), []
        for _ in range(count):
            # The engine holds one continuation only: undo the last candidate before it samples another one.
            if self._newest is not None:
                await self._engine.undo(self._newest)
            asked = self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=watching())
            self._newest = asyncio.create_task(asked)
            self._found.append(self._renderer.line(await self._newest, self._before))
        return tuple(self._found)

    async def take(self, at: int) -> None:
        """Continue from one of the lines of `several`, chosen by index."""
        assert self._newest is not None
        # The engine still holds the last candidate; the ids of any other one are sent again.
        if at == len(self._found) - 1:
            self._pending = []
        else:
            await self._engine.undo(self._newest)
            self._pending.extend(self._found[at].token_ids)
        self._sampling = self._newest = None
        self._sampled(len(self._found[at].token_ids))

    def _sampled(self, ids: int) -> None:
        self._before = None
        self._context -= ids
        self._left -= ids

    def _begin(self, wanted: int) -> int:
        """Record that a call is running, and return the number of ids that it may sample."""
        if self._sampling is not None:
            what = "called while another call is under way, or after one was interrupted"
            raise ConfigError("episode.sample()", what, "await each call to its end")
        if wanted < 1:
            raise ConfigError("max_tokens", wanted, "give at least 1")
        # This mark stays if the call is interrupted, so that `seen` can leave out its ids.
        self._sampling = len(self._engine.ids)
        return min(wanted, self.room)

    @property
    def seen(self) -> Sequence[int]:
        """All ids that the engine received or sampled. Ids of a call that never returned are left out."""
        ids = self._engine.ids
        return ids if self._sampling is None else ids[: self._sampling]
