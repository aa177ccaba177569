"""Fallback engine: a transformers model in this process, which decodes all waiting sessions together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from repl_rl.engine.base import Chunk, ChunkEnd, EngineSession, Sampling, Watch
from repl_rl.engine.decoder import Decoder, Draw, Row
from repl_rl.engine.limits import Gate, ending, first_ids, room
from repl_rl.engine.options import KvOnSync, Opening, read_model_folder
from repl_rl.errors import EngineError

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Job:
    """One running call of `sample`."""

    row: Row
    most: int
    stop_ids: frozenset[int]
    watch: Watch | None
    done: asyncio.Future[ChunkEnd]
    logprobs: list[float] = field(default_factory=list)

    def accept(self, draw: Draw) -> bool:
        """Append one sampled id. Return True if the chunk is over."""
        # The step has fed all ids except the one that it drew.
        self.row.computed = len(self.row.ids)
        self.row.ids.append(draw.token_id)
        self.logprobs.append(draw.logprob)
        try:
            end = ending(draw.token_id, len(self.logprobs), self.most, self.stop_ids, self.watch)
        except Exception as error:
            # The watch is code of the caller, so the caller gets its error.
            self.done.set_exception(error)
            return True
        if end is not None:
            self.done.set_result(end)
        return end is not None


class TransformersEngine:
    """Engine with the model in this process. Open it with `open_engine("transformers", model=folder)`."""

    name = "transformers"
    seeds_sessions = True
    fallback_reason: str | None = None

    def __init__(
        self,
        decoder: Decoder,
        context_tokens: int,
        max_sessions: int,
        forbidden_ids: frozenset[int] = frozenset(),
        kv_on_sync: KvOnSync = "drop",
    ) -> None:
        self.context_tokens = context_tokens
        self.forbidden_ids = forbidden_ids
        self.policy_step = 0
        self.gate = Gate()
        self._kv_on_sync = kv_on_sync
        self._open: set[TransformersSession] = set()
        self._decoder = decoder
        self._seats = asyncio.Semaphore(max_sessions)
        self._jobs: list[Job] = []
        self._work = asyncio.Event()
        # With one thread, forward passes never overlap, so the slot of a closed session can be used again at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`."""
        return self._session(first_ids(prompt_ids), sampling)

    def close(self) -> None:
        """Stop the decoding thread."""
        self._thread.shutdown(wait=False)

    @asynccontextmanager
    async def _session(self, ids: list[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        async with self._seats:
            slot = await self._in_thread(self._decoder.arena.take)
            generator = None if sampling.seed is None else self._decoder.generator_for(sampling.seed)
            session = TransformersSession(self, Row(slot, ids, 0, sampling.temperature, generator))
            self._open.add(session)
            try:
                yield session
            finally:
                session.closed = True
                self._open.remove(session)
                self._decoder.arena.give(slot)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`."""
        async with self.gate.change():
            await self._in_thread(self._decoder.load, folder)
            for session in self._open if self._kv_on_sync == "drop" else ():
                session.forget()
            self.policy_step = policy_step

    async def run(self, job: Job) -> ChunkEnd:
        """Decode `job`, together with all others, to its end."""
        self._jobs.append(job)
        self._work.set()
        try:
            return await job.done
        finally:
            self._drop(job)

    async def serve(self) -> None:
        """Decode forever. Each step takes all current jobs, so a new one joins at the next token."""
        while True:
            await self._work.wait()
            jobs = list(self._jobs)
            if not jobs:
                self._work.clear()
                continue
            try:
                draws = await self._in_thread(self._decoder.step, [job.row for job in jobs])
            except Exception as error:
                # The step failed for all its rows. The engine continues with later jobs.
                failure = EngineError(f"the model failed in the middle of a step: {error}")
                failure.__cause__ = error
                self.fail(failure, jobs)
                continue
            for job, draw in zip(jobs, draws, strict=True):
                # A job may have been cancelled during the step.
                if not job.done.done() and job.accept(draw):
                    self._drop(job)

    def fail(self, error: EngineError, jobs: Sequence[Job] | None = None) -> None:
        """End `jobs` with `error`. None means all of them."""
        for job in list(self._jobs if jobs is None else jobs):
            self._drop(job)
            if not job.done.done():
                job.done.set_exception(error)

    def _drop(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    async def _in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))


class TransformersSession:
    """Engine session of one rollout, with a slot in the arena."""

    def __init__(self, engine: TransformersEngine, row: Row) -> None:
        self.closed = False
        self._engine = engine
        self._row = row
        self._before = self._start = len(row.ids)
        self._since = 0
        """Policy step of its oldest keys, values and states."""

    @property
    def ids(self) -> Sequence[int]:
        """See `EngineSession.ids`."""
        return self._row.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        async with self._engine.gate.call():
            return await self._sample(observed, max_tokens, stop_ids, watch)

    def forget(self) -> None:
        """Give up keys, values and states. The next call computes them again from all ids."""
        self._row.computed = 0

    async def _sample(
        self, observed: Sequence[int], max_tokens: int, stop_ids: frozenset[int], watch: Watch | None
    ) -> Chunk:
        if self.closed:
            raise EngineError("the session is closed; open a new one")
        if self._row.computed == 0:
            self._since = self._engine.policy_step
        ids = self._row.ids
        most = room(len(ids), observed, max_tokens, self._engine.context_tokens)
        self._before, self._row.mark = len(ids), self._row.computed
        ids.extend(observed)
        start = self._start = len(ids)
        job = Job(self._row, most, stop_ids, watch, asyncio.get_running_loop().create_future())
        end = await self._engine.run(job)
        return Chunk(tuple(ids[start:]), tuple(job.logprobs), end, self._since)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """See `EngineSession.undo`. A seeded session does not repeat the draws that were taken back."""
        call.cancel()
        await asyncio.wait({call})
        row = self._row
        # A new row, since the decoding thread may still read the old one. At least its last id must be fed again.
        self._row = replace(row, ids=row.ids[: self._before], computed=min(row.computed, self._before - 1))
        return len(row.ids) - self._start


@asynccontextmanager
async def open_transformers(opening: Opening) -> AsyncIterator[TransformersEngine]:
    """Load a model and serve it until the block ends.

    Raises:
        ConfigError: the folder holds no model, or a model that cannot forbid an id.
    """
    facts = read_model_folder(opening)
    decoder = await asyncio.to_thread(Decoder, opening.folder, opening.dtype, opening.seed, opening.forbidden_ids)
    engine = TransformersEngine(
        decoder, facts.context_tokens, opening.max_sessions, opening.forbidden_ids, opening.kv_on_sync
    )
    serving = asyncio.create_task(engine.serve(), name="transformers engine")
    try:
        yield engine
    finally:
        serving.cancel()
        engine.fail(EngineError("the engine was closed while a session was sampling"))
        await asyncio.gather(serving, return_exceptions=True)
        engine.close()
