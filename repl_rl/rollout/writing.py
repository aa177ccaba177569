"""The engine's side of a rollout: what it was given, what it was not given yet, and how much still fits."""

import asyncio
from collections.abc import Callable, Sequence

from repl_rl.engine.base import Chunk, EngineSession, Watch
from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Line, Observed, Prompt
from repl_rl.rollout.renderer import Renderer

Watching = Callable[[], Watch | None]
"""Makes the watch of one call: it remembers what it has seen."""


class Writer:
    """Lets the policy write, one call at a time. Ids are only ever appended."""

    def __init__(
        self, engine: EngineSession, renderer: Renderer, prompt: Prompt, room: int, most: int | None = None
    ) -> None:
        """`room`: ids that fit into the context after the prompt. `most`: ids to sample; None: all of them."""
        self._before: Prompt | Observed | None = prompt
        self._context = room
        self._left = room if most is None else most
        self._engine = engine
        self._renderer = renderer
        self._pending: list[int] = []  # ids that the engine has not seen yet
        self._sampling: int | None = None  # how many ids the engine had before the call that is under way
        self._newest: asyncio.Task[Chunk] | None = None  # of several calls at one place, the one that stands
        self._found: list[Line] = []  # what those calls gave

    @property
    def room(self) -> int:
        """Ids that may still be sampled: that fit into the context, and are left of what was asked for."""
        return min(self._context, self._left)

    def give(self, observed: Observed) -> None:
        """Let the engine see an observation before it samples next."""
        self.restore(observed.token_ids)
        self._before = observed

    def restore(self, ids: Sequence[int]) -> None:
        """Let the engine see ids that were sampled before it samples next."""
        self._before = None
        self._pending.extend(ids)
        self._context -= len(ids)

    @property
    def before(self) -> Prompt | Observed | None:
        """The prompt or observation right before the next line; None: a line of the policy is."""
        return self._before

    async def line(self, wanted: int, stop_ids: frozenset[int], watch: Watch | None) -> Line:
        """What the policy writes next, of at most `wanted` ids, or as many as fit.

        Raises:
            ConfigError: `wanted` < 1, or another call is under way.
            EngineError: see `EngineSession.sample`.
        """
        budget = self._begin(wanted)
        chunk = await self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=watch)
        self._sampling, self._pending = None, []
        line = self._renderer.line(chunk, self._before)
        self._sampled(len(chunk.token_ids))
        return line

    async def several(self, count: int, wanted: int, stop_ids: frozenset[int], watching: Watching) -> Sequence[Line]:
        """`count` (>= 1) times what the policy writes next, each from the same ids; `take` one of them next.

        Raises:
            As `line`.
        """
        if count < 1:
            raise ConfigError("episode.choose(), count", count, "give at least 1")
        budget, self._found = self._begin(wanted), []
        for _ in range(count):
            if self._newest is not None:
                await self._engine.undo(self._newest)
            asked = self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=watching())
            self._newest = asyncio.create_task(asked)
            self._found.append(self._renderer.line(await self._newest, self._before))
        return tuple(self._found)

    async def take(self, at: int) -> None:
        """Go on from one of the lines of `several`."""
        assert self._newest is not None
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
        """Note that a call is under way. Returns how many ids it may write."""
        if self._sampling is not None:
            what = "called while another call is under way, or after one was interrupted"
            raise ConfigError("episode.sample()", what, "await each call to its end")
        if wanted < 1:
            raise ConfigError("max_tokens", wanted, "give at least 1")
        self._sampling = len(self._engine.ids)
        return min(wanted, self.room)

    @property
    def seen(self) -> Sequence[int]:
        """All ids that the engine was given or sampled. What a call sampled that never returned is nobody's."""
        ids = self._engine.ids
        return ids if self._sampling is None else ids[: self._sampling]
