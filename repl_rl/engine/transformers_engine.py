"""Engine with a transformers model in this process, which decodes all waiting sessions together.

It is the fallback where vLLM does not run. `Decoder` computes one step for many rows of different lengths.
`TransformersEngine` collects the running calls of its sessions, and decodes them step by step in a separate thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from repl_rl.engine.base import (
    Chunk,
    ChunkEnd,
    EngineSession,
    ReadWriteLock,
    Sampling,
    Watch,
    compute_chunk_budget,
    copy_prompt_ids,
    find_chunk_end,
)
from repl_rl.engine.config import EngineOptions, KvOnSync, read_model_folder
from repl_rl.engine.transformers_kv_cache import KvCache, takes_states_alone, validate_cacheable
from repl_rl.errors import EngineError
from repl_rl.models.parameter_names import copy_with_weights, read_config, resolve_causal_class
from repl_rl.models.safetensors_index import list_checkpoint_files
from repl_rl.models.transform_logits import LogitsTransform, choose_attention, forbid_ids
from repl_rl.utils.processes import choose_gpu

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of weights and cache, by name."""


@dataclass(slots=True)
class DecodeRow:
    """Input of one session for the next step."""

    slot: int
    ids: list[int]
    """All ids of the session. The decoder only reads them."""
    computed: int
    """Number of `ids` that were fed and have keys, values and states in the cache; fewer than all."""
    temperature: float
    generator: torch.Generator | None
    """Random stream of this session. None draws from the engine's stream."""
    undo_mark: int = 0
    """Value of `computed` at the start of the current call, to which `undo` may go back."""


@dataclass(frozen=True, slots=True)
class FeedIds:
    """Ids of a row for the next forward pass. They are a copy, because the session may change the row meanwhile."""

    slot: int
    start: int
    """Number of ids before them."""
    ids: list[int]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled id and its log probability in nats under the raw policy."""

    token_id: int
    logprob: float


class Decoder:
    """Causal language model with a cache of keys, values and recurrent states."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        seed: int,
        forbidden_ids: frozenset[int] = frozenset(),
        device: torch.device | None = None,
    ) -> None:
        """Load the model in `folder`. None as `device` means this process's GPU, or the CPU without a GPU."""
        self.device = choose_device() if device is None else device
        torch_dtype = DTYPES[("float32" if self.device.type == "cpu" else "bfloat16") if dtype == "auto" else dtype]
        config = read_config(folder)
        attention = choose_attention(*resolve_causal_class(config))
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch_dtype, attn_implementation=attention, trust_remote_code=False
        )
        self.model: PreTrainedModel = loaded.to(self.device).eval()
        self._forbidden_ids = forbidden_ids
        forbid_ids(self.model, forbidden_ids)
        # `compute_logprobs` applies the output layer and the operations after it itself.
        self._logits = LogitsTransform.from_config(self.model.config)
        self._states_alone = takes_states_alone(type(self.model))
        self.kv_cache = KvCache(self.model.config, torch_dtype, self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def make_generator(self, seed: int) -> torch.Generator:
        """Return a random stream for one session."""
        return torch.Generator(self.device).manual_seed(seed)

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodeRow]) -> list[SampledToken]:
        """Feed each row its ids that are not computed yet, and draw one id per row, in order.

        Rows with one id to feed and rows with several pass through the model separately, so that one long prompt does
        not pad all rows. Padding would become part of recurrent states. So in models with such states, only rows with
        equal numbers of ids to feed share a pass.
        """
        draws: dict[int, SampledToken] = {}
        feeds = [self.get_uncomputed_ids(row) for row in rows]
        for indices in self.split_by_length(feeds):
            logprobs = self.compute_logprobs([feeds[index] for index in indices])
            draws.update(zip(indices, self._draw([rows[index] for index in indices], logprobs), strict=True))
        return [draws[index] for index in range(len(rows))]

    def get_uncomputed_ids(self, row: DecodeRow) -> FeedIds:
        """Return the ids of a row that are not computed yet."""
        start = self.kv_cache.resume_slot(row.slot, row.computed, row.undo_mark)
        return FeedIds(row.slot, start, row.ids[start:])

    def split_by_length(self, feeds: Sequence[FeedIds]) -> list[list[int]]:
        """Return the indices of the feeds that share a forward pass, per pass. Feeds with a single id come first."""
        passes: dict[tuple[int, bool], list[int]] = {}
        for index, feed in enumerate(feeds):
            count = len(feed.ids)
            # With padding there are two passes: one id, or several. Recurrent states need equal counts, and all rows of
            # a pass either have an earlier state or none.
            key = (min(count, 2), False) if self.kv_cache.supports_padding else (count, feed.start == 0)
            passes.setdefault(key, []).append(index)
        return [passes[key] for key in sorted(passes)]

    def load_weights(self, folder: Path) -> None:
        """Replace the weights by those of the checkpoint in `folder`.

        Raises:
            EngineError: there is no checkpoint, or it does not have exactly this model's weights.
        """
        # Build a second model, so that a failure leaves the open one unchanged.
        files = list_checkpoint_files(folder)
        try:
            state = {name: w for file in files for name, w in load_file(file, device=str(self.device)).items()}
            fresh = copy_with_weights(self.model, state)
        except (EngineError, SafetensorError) as error:
            raise EngineError(f"{folder} does not fit the open model: {error}") from error
        forbid_ids(fresh, self._forbidden_ids)
        self.model = fresh

    def compute_logprobs(self, feeds: Sequence[FeedIds]) -> torch.Tensor:
        """Return log probabilities (B, V) of the id after each feed. `feeds` share a forward pass."""
        if self.kv_cache.single_token_steps and feeds[0].start:
            # The scan would drop the state before several ids, so feed them one by one.
            for number in range(len(feeds[0].ids)):
                hidden = self._forward([FeedIds(f.slot, f.start + number, f.ids[number : number + 1]) for f in feeds])
        else:
            hidden = self._forward(feeds)
        return torch.log_softmax(self._logits(self.model.get_output_embeddings()(hidden)).float(), dim=-1)

    def _forward(self, feeds: Sequence[FeedIds]) -> torch.Tensor:
        """Return the last hidden state (B, H) of each feed."""
        lengths = [len(feed.ids) for feed in feeds]
        longest = max(lengths)
        positions, mask = self.kv_cache.set_write_positions(
            [feed.slot for feed in feeds], [feed.start for feed in feeds], lengths
        )
        # Repeat the last id as padding. Its result is ignored.
        padded = [[*feed.ids, *[feed.ids[-1]] * (longest - len(feed.ids))] for feed in feeds]
        inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.kv_cache}
        if self._states_alone:
            inputs = {"cache_params": self.kv_cache}
        ids = torch.tensor(padded, device=self.device)
        # Skip the model's own head: only the last position of a row needs logits.
        hidden: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=True, **inputs).last_hidden_state
        self.kv_cache.commit_recurrent_states()
        return hidden[torch.arange(len(feeds), device=self.device), torch.tensor(lengths, device=self.device) - 1]

    def _draw(self, rows: Sequence[DecodeRow], logprobs: torch.Tensor) -> list[SampledToken]:
        # argmax(p / e) with exponential e draws from p. Greedy rows use their log probabilities unchanged.
        noise = torch.empty_like(logprobs).exponential_(generator=self.generator)
        for index, row in enumerate(rows):
            if row.generator is not None:
                # A seeded row must not depend on the rows that share its step.
                noise[index].exponential_(generator=row.generator)
        temperatures = torch.tensor([row.temperature for row in rows], device=self.device).unsqueeze(1)
        # Clamped, because greedy rows would divide by 0. Their result is not used.
        drawn = logprobs / temperatures.clamp(min=torch.finfo(torch.float32).tiny) - noise.log()
        token_ids = torch.where(temperatures > 0, drawn, logprobs).argmax(dim=-1, keepdim=True)
        values = logprobs.gather(-1, token_ids).squeeze(-1).clamp(max=0.0)
        return [SampledToken(*pair) for pair in zip(token_ids.squeeze(-1).tolist(), values.tolist(), strict=True)]


def choose_device() -> torch.device:
    """Return this process's GPU, or the CPU without a GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", choose_gpu(torch.cuda.device_count()))


def validate_decodable(folder: Path) -> None:
    """Reject a model that this engine cannot decode, based on its configuration alone.

    Raises:
        ConfigError: transformers does not know the model, or its past or its logits are of an unsupported kind.
    """
    kind, config = resolve_causal_class(read_config(folder))
    validate_cacheable(kind, config)
    LogitsTransform.from_config(config)


@dataclass(slots=True, eq=False)
class DecodeJob:
    """One running call of `sample`."""

    row: DecodeRow
    max_tokens: int
    stop_ids: frozenset[int]
    watch: Watch | None
    done: asyncio.Future[ChunkEnd]
    logprobs: list[float] = field(default_factory=list)

    def accept(self, draw: SampledToken) -> bool:
        """Append one sampled id. Return True if the job is done: the chunk has ended, or its watch raised an error."""
        # The step has fed all ids except the one that it drew.
        self.row.computed = len(self.row.ids)
        self.row.ids.append(draw.token_id)
        self.logprobs.append(draw.logprob)
        try:
            end = find_chunk_end(draw.token_id, len(self.logprobs), self.max_tokens, self.stop_ids, self.watch)
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
        self.lock = ReadWriteLock()
        self._kv_on_sync = kv_on_sync
        self._sessions: set[TransformersSession] = set()
        self._decoder = decoder
        self._session_slots = asyncio.Semaphore(max_sessions)
        self._jobs: list[DecodeJob] = []
        self._work = asyncio.Event()
        # With one thread, forward passes never overlap, so the slot of a closed session can be used again at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`."""
        return self._session(copy_prompt_ids(prompt_ids), sampling)

    def close(self) -> None:
        """Stop the decoding thread."""
        self._thread.shutdown(wait=False)

    @asynccontextmanager
    async def _session(self, ids: list[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        async with self._session_slots:
            slot = await self._run_in_thread(self._decoder.kv_cache.allocate_slot)
            generator = None if sampling.seed is None else self._decoder.make_generator(sampling.seed)
            session = TransformersSession(self, DecodeRow(slot, ids, 0, sampling.temperature, generator))
            self._sessions.add(session)
            try:
                yield session
            finally:
                session.closed = True
                self._sessions.remove(session)
                self._decoder.kv_cache.release_slot(slot)

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`."""
        async with self.lock.write():
            await self._run_in_thread(self._decoder.load_weights, folder)
            for session in self._sessions if self._kv_on_sync == "drop" else ():
                session.drop_cache()
            self.policy_step = policy_step

    async def decode(self, job: DecodeJob) -> ChunkEnd:
        """Decode `job`, together with all others, to its end."""
        self._jobs.append(job)
        self._work.set()
        try:
            return await job.done
        finally:
            self._remove_job(job)

    async def run_decode_loop(self) -> None:
        """Decode forever. Each step takes all current jobs, so a new one joins at the next token."""
        while True:
            await self._work.wait()
            jobs = list(self._jobs)
            if not jobs:
                self._work.clear()
                continue
            try:
                draws = await self._run_in_thread(self._decoder.step, [job.row for job in jobs])
            except Exception as error:
                # The step failed for all its rows. The engine continues with later jobs.
                failure = EngineError(f"the model failed in the middle of a step: {error}")
                failure.__cause__ = error
                self.fail_jobs(failure, jobs)
                continue
            for job, draw in zip(jobs, draws, strict=True):
                # A job may have been cancelled during the step.
                if not job.done.done() and job.accept(draw):
                    self._remove_job(job)

    def fail_jobs(self, error: EngineError, jobs: Sequence[DecodeJob] | None = None) -> None:
        """End `jobs` with `error`. None means all of them."""
        for job in list(self._jobs if jobs is None else jobs):
            self._remove_job(job)
            if not job.done.done():
                job.done.set_exception(error)

    def _remove_job(self, job: DecodeJob) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    async def _run_in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))


class TransformersSession:
    """Engine session of one rollout, with a slot in the KV cache."""

    def __init__(self, engine: TransformersEngine, row: DecodeRow) -> None:
        self.closed = False
        self._engine = engine
        self._row = row
        self._call_start = self._chunk_start = len(row.ids)
        self._oldest_step = 0
        """Policy step of its oldest keys, values and states."""

    @property
    def ids(self) -> Sequence[int]:
        """See `EngineSession.ids`."""
        return self._row.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        async with self._engine.lock.read():
            return await self._sample(observed, max_tokens, stop_ids, watch)

    def drop_cache(self) -> None:
        """Give up keys, values and states. The next call computes them again from all ids."""
        self._row.computed = 0

    async def _sample(
        self, observed: Sequence[int], max_tokens: int, stop_ids: frozenset[int], watch: Watch | None
    ) -> Chunk:
        if self.closed:
            raise EngineError("the session is closed; open a new one")
        # All keys and values will come from the loaded weights.
        if self._row.computed == 0:
            self._oldest_step = self._engine.policy_step
        ids = self._row.ids
        budget = compute_chunk_budget(len(ids), observed, max_tokens, self._engine.context_tokens)
        self._call_start, self._row.undo_mark = len(ids), self._row.computed
        ids.extend(observed)
        start = self._chunk_start = len(ids)
        job = DecodeJob(self._row, budget, stop_ids, watch, asyncio.get_running_loop().create_future())
        # Decoding appends the sampled ids to the row.
        end = await self._engine.decode(job)
        return Chunk(tuple(ids[start:]), tuple(job.logprobs), end, self._oldest_step)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """See `EngineSession.undo`. A seeded session does not repeat the draws that were taken back."""
        call.cancel()
        await asyncio.wait({call})
        row = self._row
        # A new row, since the decoding thread may still read the old one. At least its last id must be fed again.
        self._row = replace(row, ids=row.ids[: self._call_start], computed=min(row.computed, self._call_start - 1))
        return len(row.ids) - self._chunk_start


@asynccontextmanager
async def open_transformers(opening: EngineOptions) -> AsyncIterator[TransformersEngine]:
    """Load a model and serve it until the block ends.

    Raises:
        ConfigError: the folder holds no model, or a model that cannot forbid an id.
    """
    info = read_model_folder(opening)
    decoder = await asyncio.to_thread(Decoder, opening.folder, opening.dtype, opening.seed, opening.forbidden_ids)
    engine = TransformersEngine(
        decoder, info.context_tokens, opening.max_sessions, opening.forbidden_ids, opening.kv_on_sync
    )
    task = asyncio.create_task(engine.run_decode_loop(), name="transformers engine")
    try:
        yield engine
    finally:
        task.cancel()
        engine.fail_jobs(EngineError("the engine was closed while a session was sampling"))
        await asyncio.gather(task, return_exceptions=True)
        engine.close()
