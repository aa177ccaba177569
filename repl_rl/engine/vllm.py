"""vLLM in a separate process, controlled through `AsyncLLM`.

On CPU the model runs in the engine's process with all cores but one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from repl_rl.engine.base import EngineSession, Pressure, Sampling
from repl_rl.engine.checkpoint import refuse_other
from repl_rl.engine.kinds import Drive, Vllm
from repl_rl.engine.limits import Gate, first_ids
from repl_rl.engine.names import outline
from repl_rl.engine.options import Opening, read_model_folder
from repl_rl.engine.seating import Seating
from repl_rl.engine.seats import Cache, Growth, Seats
from repl_rl.engine.variables import sockets
from repl_rl.engine.vllm_session import Loaded, Parameters, Shared, VllmSession
from repl_rl.engine.vllm_setup import process_ids, start, stop
from repl_rl.engine.vllm_silence import SILENCE_S, end_where_silent
from repl_rl.engine.vllm_sleep import Nap
from repl_rl.errors import ConfigError, EngineDied, EngineError

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE: tuple[tuple[int, ...], ...] = ((), (1, 2), ())
"""Observed ids before each chunk of the health check's session."""
_LOOK_S = 1.0
"""Interval of the checks that vLLM's process is alive, while a call waits for it, seconds."""
PROBE_S = 60.0
"""Timeout of the health check at the start, seconds. After it, sessions count as broken."""


class VllmEngine:
    """A running vLLM. Open it with `open_engine("vllm", model=folder)`."""

    name = "vllm"
    seeds_sessions = False
    """Always False. vLLM's seeded requests kill its process on CPU when a prefill is split, and cost a generator each.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        opening: Opening,
        context_tokens: int,
        options: Vllm,
        cache: Cache,
    ) -> None:
        self.context_tokens = context_tokens
        self.forbidden_ids = opening.forbidden_ids
        self.policy_step = 0
        self.fallback_reason: str | None = None
        """Reason for one request per line although sessions were requested. None means that there is no fallback."""
        self.cache = cache
        """Size of its KV cache. The number of open sessions depends on the lengths that they reach."""
        self._llm = llm
        self._folder = opening.folder
        self._keeps = opening.kv_on_sync == "keep"
        self._loads = 0
        self._shared = Shared(context_tokens, options.drive, Parameters(), Gate(), self._loaded)
        self._open: set[VllmSession] = set()
        self._nap = Nap(llm, options.sleep)
        growth = Growth(context_tokens, opening.growth_tokens)
        self._seating = Seating(Seats(cache, growth), opening.max_sessions)
        self._names = count()

    @property
    def drive(self) -> Drive:
        """Current request mode."""
        return self._shared.drive

    @property
    def pressure(self) -> Pressure:
        """Preemption counts of streaming sessions, see `Seated.pressure`. vLLM reports none in request mode."""
        return self._seating.pressure

    def use(self, drive: Drive) -> None:
        """Switch the request mode, as the fallback and comparisons do.

        Raises:
            EngineError: a session is open.
        """
        if self._open:
            raise EngineError(f"{len(self._open)} sessions are open; close them before changing the drive")
        self._shared = replace(self._shared, drive=drive)

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`. `sampling.seed` has no effect."""
        return self._session(first_ids(prompt_ids), sampling)

    @asynccontextmanager
    async def _session(self, ids: list[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        async with self._seating.place(len(ids), sampling.nested) as place:
            with dying():
                await self._nap.end()
            session = VllmSession(self._llm, str(next(self._names)), ids, sampling, self._shared, place)
            self._open.add(session)
            try:
                yield session
            finally:
                self._open.remove(session)
                await session.close()

    async def rest(self) -> None:
        """Release the GPU's memory, if `sleep` is set, until a session is opened or weights are loaded."""
        if not self._open:
            with dying():
                await self._nap.begin()

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`."""
        policy = await asyncio.to_thread(outline, self._folder)
        refuse_other(folder, policy.trained, policy.stored)
        async with self._shared.gate.change():
            await self._load(folder)
            self.policy_step = policy_step
            self._loads += 1

    def _loaded(self) -> Loaded:
        # The prefix cache cannot be emptied while a session waits in vLLM. Kept keys and values are distinguished by
        # their salt.
        return Loaded(self.policy_step, f"{self._loads}" if self._keeps else None)

    async def _load(self, folder: Path) -> None:
        try:
            await self._nap.end()
            # Sessions that open meanwhile have nothing in vLLM yet.
            for session in () if self._keeps else tuple(self._open):
                await session.hang_up()
            with self._shared.waiting.one():
                await answered(self._llm, self._llm.collective_rpc("policy_reload", args=(str(folder),)))
                dropped = self._keeps or await answered(self._llm, self._llm.reset_prefix_cache())
        except (EngineDeadError, EngineDied) as error:
            raise EngineDied("the vLLM process is gone; its weights cannot be replaced") from error
        except Exception as error:
            raise EngineError(f"vLLM could not load {folder}: {error}") from error
        if not dropped:
            raise EngineError("vLLM kept keys and values of the old weights; a request is still running in it")

    @asynccontextmanager
    async def guarded(self, silence_s: float) -> AsyncIterator[None]:
        """Kill vLLM's process if it hangs for `silence_s` seconds within the block."""
        guard = asyncio.create_task(end_where_silent(process_ids(self._llm), self._shared.waiting, silence_s))
        try:
            yield
        finally:
            guard.cancel()

    async def try_step(self, told: Path) -> None:
        """Sample one id, because vLLM loads some models that it cannot run here.

        vLLM's process writes the reason of a failure to the given file.

        Raises:
            ConfigError: vLLM cannot run this model.
            EngineDied: its process died for another reason.
        """
        await self._llm.collective_rpc("policy_tell", args=(str(told),))
        await self._llm.collective_rpc("policy_quiet", args=(True,))
        # Silence both processes. A failure is reported as one error, without vLLM's traceback.
        vllm_log = logging.getLogger("vllm")
        level = vllm_log.level
        vllm_log.setLevel(logging.CRITICAL)
        try:
            async with self._seating.place(1) as place:
                shared = replace(self._shared, drive=Drive.REQUEST)
                session = VllmSession(self._llm, "first step", [1], Sampling(temperature=0.0), shared, place)
                try:
                    await session.sample((), max_tokens=1, stop_ids=frozenset())
                finally:
                    await session.close()
        except EngineDied as error:
            reason = await asyncio.to_thread(_read, told)
            # Lack of memory may be temporary, so this is not an error of the configuration.
            if not reason or "out of memory" in reason.lower():
                raise
            remedy = f"vLLM cannot run it here: {reason}; choose another model, or --engine transformers"
            raise ConfigError("model", str(self._folder), remedy) from error
        finally:
            vllm_log.setLevel(level)
        await self._llm.collective_rpc("policy_quiet", args=(False,))

    async def probe(self) -> None:
        """Check that a streaming session gives the same ids as one request per line; if not, fall back to requests."""
        if self.drive is Drive.REQUEST:
            return
        requested = await self._greedy(Drive.REQUEST)
        try:
            async with asyncio.timeout(PROBE_S):
                streamed = await self._greedy(Drive.SESSION)
        except EngineDied:
            raise
        except (EngineError, TimeoutError) as error:
            self._fall_back(str(error) or f"a streaming session gave no answer in {PROBE_S} s")
            return
        if streamed != requested:
            self._fall_back(f"greedy ids of a streaming session are {streamed}, those of a request a line {requested}")

    async def _greedy(self, drive: Drive) -> list[int]:
        shared = replace(self._shared, drive=drive)
        async with self._seating.place(1) as place:
            session = VllmSession(self._llm, f"probe {drive}", [1], Sampling(temperature=0.0), shared, place)
            try:
                for observed in PROBE:
                    await session.sample(observed, max_tokens=2, stop_ids=frozenset())
            finally:
                await session.close()
        return session.ids

    def _fall_back(self, reason: str) -> None:
        log.warning("streaming sessions do not work with this vLLM (%s); using a request a line instead", reason)
        self.fallback_reason = reason
        self.use(Drive.REQUEST)


def _read(file: Path) -> str:
    """Return the beginning of a text file, or "" without a file."""
    return file.read_text(encoding="utf-8")[:300] if file.is_file() else ""


@contextmanager
def dying() -> Iterator[None]:
    """Convert vLLM's EngineDeadError in the block to EngineDied.

    Raises:
        EngineDied: the process died within the block, or before it.
    """
    try:
        yield
    except EngineDeadError as error:
        raise EngineDied("the vLLM process is gone") from error


class Mortal(Protocol):
    """Object that reports its own death."""

    @property
    def errored(self) -> bool: ...


async def answered(llm: Mortal, call: Coroutine[object, object, T]) -> T:
    """Return the result of a call to vLLM's process. vLLM never answers a call over which its process died.

    Raises:
        EngineDied: the process is dead.
    """
    calling = asyncio.ensure_future(call)
    try:
        # Wake up regularly to check that the process is alive.
        while not (await asyncio.wait({calling}, timeout=_LOOK_S))[0]:
            if llm.errored:
                raise EngineDied("the vLLM process is gone; it died over a call")
        return calling.result()
    finally:
        calling.cancel()


async def _cache(llm: AsyncLLM, context_tokens: int) -> Cache:
    """Return the size of vLLM's KV cache.

    Raises:
        ConfigError: not even one full context fits.
    """
    (said, *_) = await llm.collective_rpc("policy_cache")
    blocks, groups = said
    cache = Cache(blocks, tuple((size, most) for size, most in groups))
    needed = cache.taken(context_tokens)
    if needed > cache.blocks:
        room = f"room for {context_tokens * cache.blocks // needed} ids"
        raise ConfigError("vllm.kv_cache_gib", room, f"a context takes {context_tokens}; give more")
    return cache


@asynccontextmanager
async def open_vllm(
    opening: Opening, options: Vllm, cache_blocks: int | None = None, silence_s: float = SILENCE_S
) -> AsyncIterator[VllmEngine]:
    """Start vLLM on a model; its process is gone when the block ends.

    Args:
        opening: the model, and the options of all engines.
        options: options of vLLM.
        cache_blocks: blocks of the KV cache (>= 2, one of them reserved by vLLM), for tests. None means as many as fit
            into the memory.
        silence_s: seconds (> 0) that its process may hang while calls wait for it.

    Raises:
        ConfigError: the folder holds no model or one that vLLM cannot run here, or no context fits into the cache.
        EngineError: vLLM did not start.
    """
    facts = read_model_folder(opening)
    with sockets() as variables:
        try:
            llm = await asyncio.to_thread(start, opening, facts, options, variables, cache_blocks)
        except Exception as error:
            raise EngineError(f"vLLM did not start: {error}; set VLLM_LOGGING_LEVEL=INFO to see its log") from error
        try:
            await llm.collective_rpc("policy_settle")
            # Forbid ids before the first request is sampled.
            await llm.collective_rpc("policy_forbid", args=(sorted(opening.forbidden_ids),))
            engine = VllmEngine(llm, opening, facts.context_tokens, options, await _cache(llm, facts.context_tokens))
            async with engine.guarded(silence_s):
                # Check that the model runs here, then that streaming sessions work.
                await engine.try_step(Path(variables["VLLM_RPC_BASE_PATH"]) / "died.txt")
                await engine.probe()
                yield engine
        finally:
            await stop(llm)
