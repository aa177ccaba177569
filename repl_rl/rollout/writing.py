"""The engine's side of a rollout: what it was given, what it was not given yet, and how much still fits."""

from collections.abc import Sequence

from repl_rl.engine.ahead import AheadSession, Guess
from repl_rl.engine.base import ChunkEnd, EngineSession, Watch
from repl_rl.errors import ConfigError
from repl_rl.record.console import prompt
from repl_rl.record.trajectory import Line, LineEnd
from repl_rl.rollout.renderer import Renderer

_ENDS = {ChunkEnd.STOP_ID: LineEnd.NEWLINE, ChunkEnd.WATCH: LineEnd.MATCH, ChunkEnd.LENGTH: LineEnd.LENGTH}


class Writer:
    """Lets the policy write, one call at a time. Ids are only ever appended."""

    def __init__(self, engine: EngineSession, renderer: Renderer, room: int) -> None:
        self.room = room
        """Ids that still fit into the context."""
        self._engine = engine
        self._renderer = renderer
        self._pending: list[int] = []  # ids that the engine has not seen yet
        self._sampling: int | None = None  # how many ids the engine had before the call that is under way

    def give(self, ids: Sequence[int]) -> None:
        """Ids that the engine sees before it samples next."""
        self._pending.extend(ids)
        self.room -= len(ids)

    async def line(self, wanted: int, stop_ids: frozenset[int], watch: Watch | None) -> Line:
        """What the policy writes next, of at most `wanted` ids, or as many as fit.

        Raises:
            ConfigError: `wanted` < 1, or another call is under way.
            EngineError: see `EngineSession.sample`.
        """
        if self._sampling is not None:
            what = "called while another call is under way, or after one was interrupted"
            raise ConfigError("episode.sample()", what, "await each call to its end")
        if wanted < 1:
            raise ConfigError("max_tokens", wanted, "give at least 1")
        budget = min(wanted, self.room)
        self._sampling = len(self._engine.ids)
        chunk = await self._engine.sample(self._pending, max_tokens=budget, stop_ids=stop_ids, watch=watch)
        self._sampling, self._pending = None, []
        self.room -= len(chunk.token_ids)
        return self._renderer.line(chunk.token_ids, chunk.logprobs, _ENDS[chunk.end])

    @property
    def seen(self) -> Sequence[int]:
        """All ids that the engine was given or sampled. What a call sampled that never returned is nobody's."""
        ids = self._engine.ids
        return ids if self._sampling is None else ids[: self._sampling]

    @property
    def looks_ahead(self) -> bool:
        """True for an engine session that can sample before it is asked."""
        return isinstance(self._engine, AheadSession)

    def guess(self, most: int) -> None:
        """Let the engine go on as if a prompt were all that is observed, with at most `most` ids."""
        observed = self._renderer.encode(prompt(False))
        room = self.room - len(observed)
        if room >= 1 and isinstance(self._engine, AheadSession):
            self._engine.guess(Guess(observed, min(most, room), self._renderer.stop_ids))
