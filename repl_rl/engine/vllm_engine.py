"""vLLM in a separate process, controlled through `AsyncLLM`. On CPU the model runs in that process, with all cores
but one.

The parts in order: checks that vLLM can run a model on this machine, without starting its process; environment,
arguments, start and stop of the process; sessions; the engine.

A session is a streaming-input request that stays open between lines, or one request per line (`RequestMode`). Both give
the same ids under greedy decoding. `VllmSession` lists the facts about vLLM 0.32 that shape it.
"""

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import transformers
import vllm
from vllm import ModelRegistry
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.inputs import TokensInput, tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from repl_rl.engine.backend_configs import RequestMode, Vllm
from repl_rl.engine.base import (
    Chunk,
    ChunkEnd,
    EngineSession,
    PreemptionStats,
    ReadWriteLock,
    Sampling,
    Watch,
    compute_chunk_budget,
    copy_prompt_ids,
    find_chunk_end,
)
from repl_rl.engine.config import Dtype, EngineOptions, ModelInfo, read_model_folder
from repl_rl.engine.kv_admission import (
    AdmissionQueue,
    KvAdmission,
    KvBlockLayout,
    KvReservationHandle,
    SessionGrowthEstimator,
    shield_call,
)
from repl_rl.engine.transformers_kv_cache import keeps_running_state
from repl_rl.engine.vllm_subprocess import (
    SILENCE_S,
    USER_LOG_LEVEL,
    PendingCalls,
    SleepMode,
    get_log_variables,
    get_preload_variables,
    kill_when_silent,
    open_socket_folder,
    set_environment,
    set_vllm_log_level,
)
from repl_rl.errors import ConfigError, EngineDied, EngineError
from repl_rl.models.parameter_names import load_skeleton, read_config, resolve_causal_class
from repl_rl.models.safetensors_index import INDEX, WHOLE, validate_checkpoint_names
from repl_rl.utils.hardware import count_cores
from repl_rl.utils.processes import choose_gpu, get_local_world_size

T = TypeVar("T")

log = logging.getLogger(__name__)

_REMEDY = "choose another model, or --engine transformers"
_UNRELOADABLE = frozenset({"GptOssForCausalLM"})
"""Architectures whose vLLM loader bypasses the hooks of a weight reload. Old expert weights would silently remain."""
IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Executor that runs the model inside the engine's process. vLLM replaces the short name `uni` on CPU, but not this
path."""
CPU_BLOCK = 32
"""Ids per block on CPU. Other choices must be a multiple of it there."""
WHOLE_CHUNKS = 1 << 20
"""Stream interval longer than any chunk. vLLM then wakes the caller only for the first and the last id of a chunk."""
PROBE: tuple[tuple[int, ...], ...] = ((), (1, 2), ())
"""Observed ids before each chunk of the health check's session."""
PROBE_S = 60.0
"""Timeout of the health check at the start, seconds. After it, sessions count as broken."""
_POLL_S = 1.0
"""Interval of the checks that vLLM's process is alive, while a call waits for it, seconds."""


def validate_supported(folder: Path, dtype: Dtype) -> None:
    """Reject a model that vLLM has no class for, or whose class it cannot load or run here with this dtype.

    Raises:
        ConfigError: vLLM cannot run the model, or the folder has no index but more safetensors files than
            `model.safetensors`.
    """
    architectures = _read_architectures(folder)
    # Without an index, vLLM loads every safetensors file in the folder.
    unlisted = sorted({file.name for file in folder.glob("*.safetensors")} - {WHOLE})
    if unlisted and not (folder / INDEX).is_file():
        remedy = f"vLLM would load it in addition to {WHOLE}, because there is no {INDEX}; move it away"
        raise ConfigError(f"file in {folder}", unlisted[0], remedy)
    architecture = next((name for name in architectures if name in ModelRegistry.get_supported_archs()), None)
    if architecture is None:
        # Without its own class for the model, vLLM may still drive that of transformers.
        if not any(_can_run_transformers_class(name) for name in architectures):
            raise ConfigError(
                "architecture", ", ".join(architectures) or None, f"this vLLM has no such model; {_REMEDY}"
            )
    # On a GPU only vLLM's own process imports the model's module, because the module may touch the GPU.
    elif current_platform.is_cpu():
        try:
            ModelRegistry.models[architecture].load_model_cls()
        # A missing package can raise any exception here.
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError("architecture", architecture, f"this vLLM cannot load it: {reason}; {_REMEDY}") from error
        _validate_cpu_support(folder, architecture, dtype)


def validate_reloadable(folder: Path) -> None:
    """Reject a model that vLLM can sample, but whose weights it does not replace or that it computes too imprecisely.

    Raises:
        ConfigError: the model cannot be trained with vLLM on this machine.
    """
    unreloadable = _UNRELOADABLE.intersection(_read_architectures(folder))
    if unreloadable:
        raise ConfigError("architecture", min(unreloadable), f"this vLLM does not take new weights of it; {_REMEDY}")
    # Only models with latent attention (MLA) have this setting.
    latent = getattr(read_config(folder).get_text_config(), "kv_lora_rank", None)
    if latent and current_platform.is_cpu():
        remedy = f"vLLM's latent attention on a CPU is tenths of a nat from the trainer's; {_REMEDY}"
        raise ConfigError("kv_lora_rank", latent, remedy)


def validate_vllm_options(options: Vllm) -> None:
    """Reject options that have no effect, or are impossible, on this machine.

    Raises:
        ConfigError: `sleep` without a GPU, or on CPU a `block_size` that its kernels do not support.
    """
    if current_platform.is_cpu() and (options.block_size or CPU_BLOCK) % CPU_BLOCK:
        remedy = f"vLLM's kernels for CPUs take multiples of {CPU_BLOCK}"
        raise ConfigError("vllm.block_size", options.block_size, remedy)
    if options.sleep and not current_platform.is_sleep_mode_available():
        raise ConfigError(
            "vllm.sleep", options.sleep, "there is no GPU whose memory the update could use; leave it out"
        )


def _validate_cpu_support(folder: Path, architecture: str, dtype: Dtype) -> None:
    """Reject layers that vLLM's CPU kernels compute differently, or cannot compute.

    Raises:
        ConfigError: the model has such layers.
    """
    kind, config = resolve_causal_class(read_config(folder))
    text = config.get_text_config()
    if hasattr(text, "linear_key_head_dim"):
        if dtype != "bfloat16":
            remedy = "vLLM computes linear attention on a CPU in bfloat16 alone; use a GPU, or --engine transformers"
            raise ConfigError(f"architecture {architecture} with dtype", dtype, remedy)
    elif keeps_running_state(kind, config):
        remedy = "vLLM loses its running state on a CPU when several rollouts are under way; use a GPU, or "
        remedy += "--engine transformers"
        raise ConfigError("architecture", architecture, remedy)


def _read_architectures(folder: Path) -> list[str]:
    names: list[str] | None = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    return names or []


def _can_run_transformers_class(name: str) -> bool:
    """Return True if vLLM can drive transformers' class `name`."""
    kind = getattr(transformers, name, None)
    return kind is not None and issubclass(kind, transformers.PreTrainedModel) and bool(kind.is_backend_compatible())


def start_vllm(
    opening: EngineOptions,
    info: ModelInfo,
    options: Vllm,
    variables: Mapping[str, str],
    cache_blocks: int | None = None,
) -> AsyncLLM:
    """Start vLLM's process and wait until it has loaded the model. Blocks for seconds.

    The process gets the environment `variables` in addition to its own. `cache_blocks`: see `open_vllm`.
    """
    set_vllm_log_level()
    arguments = {**build_vllm_arguments(opening, info, options), "num_gpu_blocks_override": cache_blocks}
    with set_environment({**build_process_environment(options), **variables}):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def stop_vllm(llm: AsyncLLM) -> None:
    """End vLLM's process and wait until it is gone, even if the caller is cancelled."""
    if llm.output_handler is not None:
        # The handler would log the end of the process as a crash.
        llm.output_handler.cancel()
    await asyncio.shield(asyncio.to_thread(llm.shutdown))
    # vLLM shuts down again when the object is collected, which logs errors at the end of the interpreter.
    llm.shutdown = _skip_shutdown


def get_process_ids(llm: AsyncLLM) -> Sequence[int]:
    """Return the ids of an engine's processes on this machine."""
    manager = llm.engine_core.resources.engine_manager
    return [process.pid for process in manager.processes if process.pid is not None]


def build_vllm_arguments(opening: EngineOptions, info: ModelInfo, options: Vllm) -> dict[str, object]:
    """Return vLLM's arguments for a model. They fit `AsyncEngineArgs` and `vllm.LLM`."""
    on_cpu = current_platform.is_cpu()
    dtype = ("float32" if on_cpu else "bfloat16") if opening.dtype == "auto" else opening.dtype
    gib = options.kv_cache_gib or (1 if on_cpu else None)
    return {
        "model": str(opening.folder),
        # Load the files of the index, not Mistral's consolidated files, whose names no weight sync uses.
        "load_format": "hf",
        # Prompts and results are ids.
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": opening.seed,
        "max_model_len": info.context_tokens,
        "max_num_seqs": opening.max_sessions,
        "enable_prefix_caching": True,
        # Log probabilities at temperature 1, as `Chunk` requires.
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
        "enforce_eager": on_cpu,
        "use_tqdm_on_load": bool(USER_LOG_LEVEL),
        # Ignore the sampling defaults in the model's generation_config.json.
        "generation_config": "vllm",
        "worker_extension_cls": "repl_rl.engine.vllm_worker_extension.PolicyWorkerExtension",
        "kv_cache_memory_bytes": None if gib is None else gib << 30,
        "block_size": options.block_size or (CPU_BLOCK if on_cpu else None),
        "distributed_executor_backend": IN_CORE if on_cpu else None,
        "enable_sleep_mode": options.sleep,
    }


def build_process_environment(options: Vllm) -> Mapping[str, str]:
    """Return the environment variables for the engine's process."""
    if not current_platform.is_cpu():
        device_environment = get_device_environment(
            current_platform.device_control_env_var, torch.accelerator.device_count()
        )
        return {**get_log_variables(), **get_exact_float_environment(), **device_environment}
    return {
        **get_log_variables(),
        **get_preload_variables(Path(vllm.__file__).parent.parent),
        "OMP_NUM_THREADS": str(options.cpu_threads or max(1, count_cores() - 1)),
        # Idle threads that spin would occupy the cores of the trainer and the consoles.
        "OMP_WAIT_POLICY": "PASSIVE",
        # The sampler compiles a helper at the first request. This takes seconds and gains nothing on CPU.
        "TORCH_COMPILE_DISABLE": "1",
    }


def get_exact_float_environment() -> Mapping[str, str]:
    """Return the variable that makes float32 of vLLM on a GPU as exact as that of the trainer.

    vLLM 0.32 computes attention in float32 with Triton's kernels. Their default is TF32 products, with ten binary
    digits. Single log probabilities then differed by up to 0.006 nats on an H200, and the trainer allows 0.001.
    """
    return {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "ieee")}


def get_device_environment(variable: str, count: int) -> Mapping[str, str]:
    """Return the variable that shows the engine only the GPU on which this process trains.

    It is empty unless several processes were started together.

    Args:
        variable: the environment variable that lists the GPUs of a process.
        count: number of GPUs that this process sees.
    """
    if get_local_world_size() == 1 or count < 1:
        return {}
    # The variable may already restrict this process to some GPUs. Without it, GPUs are numbered from 0.
    visible = [name for name in os.environ.get(variable, "").split(",") if name] or [str(n) for n in range(count)]
    return {variable: visible[choose_gpu(len(visible))]}


def _skip_shutdown(timeout: float | None = None) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ChunkParams:
    """Parameters of one chunk; also the key of the cache in `SamplingParamsCache`."""

    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    interval: int


class SamplingParamsCache:
    """Cache of vLLM's parameter objects, one per kind of chunk."""

    def __init__(self) -> None:
        self._params: dict[ChunkParams, SamplingParams] = {}

    def get(self, key: ChunkParams) -> SamplingParams:
        """Return the parameters of one chunk."""
        params = self._params.get(key)
        if params is None:
            # Limit the cache, since chunks may differ in length at every call.
            if len(self._params) >= 1024:
                self._params.clear()
            params = self._params[key] = SamplingParams(
                max_tokens=key.max_tokens,
                stop_token_ids=sorted(key.stop_ids),
                temperature=key.temperature,
                stream_interval=key.interval,
                # Only that of the sampled id.
                logprobs=0,
                flat_logprobs=True,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,
            )
        return params


@dataclass(slots=True)
class PartialChunk:
    """Chunk in progress."""

    max_tokens: int
    stop_ids: frozenset[int]
    watch: Watch | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: ChunkEnd | None = None
    slice_end: int = 0
    """Largest number of ids that the chunk has when vLLM's current request is done."""

    def add(self, output: RequestOutput) -> None:
        """Append ids that vLLM sampled, up to the id that ends the chunk; later ids are dropped.

        Raises:
            EngineError: vLLM stopped before the end of the chunk, or gave no log probability.
        """
        completion = output.outputs[0]
        logprobs = completion.logprobs
        if not isinstance(logprobs, FlatLogprobs) or len(logprobs.logprobs) != len(completion.token_ids):
            raise EngineError("vLLM returned ids without one log probability each; its version does not fit repl_rl")
        for token_id, logprob in zip(completion.token_ids, logprobs.logprobs, strict=True):
            self.token_ids.append(token_id)
            # Rounding can give values of up to 1e-7 above 0.
            self.logprobs.append(min(logprob, 0.0))
            self.end = find_chunk_end(token_id, len(self.token_ids), self.max_tokens, self.stop_ids, self.watch)
            if self.end is not None:
                return
        # A finish reason alone does not count, since it can be that of the previous chunk.
        if completion.finish_reason is not None and len(self.token_ids) < self.slice_end:
            raise EngineError(
                f"vLLM ended a chunk after {len(self.token_ids)} of {self.max_tokens} ids "
                f"({completion.finish_reason}); the session was aborted or does not fit its cache"
            )

    def to_chunk(self, policy_step: int) -> Chunk:
        """Return the finished chunk."""
        assert self.end is not None
        return Chunk(tuple(self.token_ids), tuple(self.logprobs), self.end, policy_step)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Loaded weights, and the salt of keys and values that may be used with them."""

    policy_step: int
    """Number of optimizer steps applied to the weights: the policy version."""
    cache_salt: str | None
    """Salt of the prefix cache; requests with different salts share no blocks.

    None means that the prefix cache is emptied whenever weights are loaded.
    """


@dataclass(frozen=True, slots=True)
class EngineState:
    """Objects that all sessions of one engine share."""

    context_tokens: int
    request_mode: RequestMode
    sampling_params: SamplingParamsCache
    lock: ReadWriteLock
    get_loaded_weights: Callable[[], LoadedWeights]
    """Function that returns the current weights; they do not change while a call holds `lock`."""
    pending_calls: PendingCalls = field(default_factory=PendingCalls)
    """Counter of the calls that wait for vLLM's process."""
    slice_ids: int = 256
    """Ids that a session samples before it asks for more blocks (>= 1). It reserves blocks for that many and may not
    need all of them."""


class VllmSession:
    """Engine session of one rollout on vLLM. Facts about vLLM 0.32 that shape it:

    - The scheduler forgets the last sampled id of a chunk, so the next chunk starts with it.
    - A chunk that asks for 0 ids kills the engine's process, so `compute_chunk_budget` rejects it.
    - A chunk's finish reason can be that of the previous chunk, so the end of a chunk is derived from its ids.
    - A session keeps its blocks while it waits for input, and vLLM cannot preempt it. Other sessions that lack blocks
      would wait forever.
    - A running session can be preempted. If that hits the last step of a chunk, asynchronous scheduling forgets all of
      its ids.

    `KvReservationHandle.acquire_blocks` before every slice of a chunk prevents the last two.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        ids: list[int],
        sampling: Sampling,
        state: EngineState,
        reservation: KvReservationHandle,
    ) -> None:
        self.ids = ids
        self._llm = llm
        self._name = name
        self._sampling = sampling
        self._state = state
        self._requests = 0
        self._outputs: AsyncGenerator[RequestOutput, None] | None = None
        self._inputs: asyncio.Queue[StreamingInput] = asyncio.Queue()
        self._closed = False
        self._oldest_weights: LoadedWeights | None = None
        """Weights of its oldest keys and values."""
        self._call_start = len(ids)
        self._draft: PartialChunk | None = None
        self._reservation = reservation
        self._preempt_lock = asyncio.Lock()
        reservation.preempt = self.preempt

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        """See `EngineSession.sample`."""
        async with self._state.lock.read():
            return await self._sample(observed, max_tokens, stop_ids, watch)

    async def _sample(
        self, observed: Sequence[int], max_tokens: int, stop_ids: frozenset[int], watch: Watch | None
    ) -> Chunk:
        if self._closed:
            raise EngineError("the session is closed, or its last call failed; open a new one")
        # With a salt, keys and values survive a load, so the first weights stay the oldest.
        if self._oldest_weights is None or self._oldest_weights.cache_salt is None:
            self._oldest_weights = self._state.get_loaded_weights()
        budget = compute_chunk_budget(len(self.ids), observed, max_tokens, self._state.context_tokens)
        streamed = self._state.request_mode is RequestMode.SESSION
        draft = self._draft = PartialChunk(budget, stop_ids, watch)
        self._call_start = len(self.ids)
        # vLLM forgets the last id of a chunk, so send that id again.
        last = self.ids[-1:]
        self.ids.extend(observed)
        try:
            await (self._sample_streaming([*last, *observed], draft) if streamed else self._sample_with_request(draft))
        except EngineDeadError as error:
            raise EngineDied("the vLLM process is gone") from error
        except ValueError as error:
            raise EngineError(f"vLLM refused the request: {error}") from error
        finally:
            self.ids.extend(draft.token_ids)
            # Without an end, the call failed or was cancelled.
            if draft.end is None:
                await self.close()
            elif streamed:
                await self._pause_stream(draft)
        return draft.to_chunk(self._oldest_weights.policy_step)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        """See `EngineSession.undo`. The prefix cache keeps earlier ids, in whole blocks."""
        undone = 0 if self._draft is None else len(self._draft.token_ids)
        if not call.done():
            undone += self._count_held_back_ids()
            call.cancel()
            await asyncio.wait({call})
        # vLLM cannot remove ids from a request, so the next call opens a new one.
        await self.preempt()
        del self.ids[self._call_start :]
        self._closed = False
        return undone

    def _count_held_back_ids(self) -> int:
        """Return the number of ids that vLLM has sampled but not delivered, because it delivers whole chunks only."""
        processor = self._llm.output_processor
        names = processor.external_req_ids.get(f"{self._name}.{self._requests}", ())
        states = [processor.request_states[name] for name in names if name in processor.request_states]
        return sum(s.detokenizer.num_output_tokens() - s.sent_tokens_offset for s in states if s.detokenizer)

    async def close(self) -> None:
        """Free the request in the engine. A second call does nothing."""
        self._closed = True
        await self.preempt()

    async def _sample_streaming(self, appended: list[int], draft: PartialChunk) -> None:
        """Sample in the streaming request, slice by slice, as far as there are blocks."""
        while True:
            size = min(self._state.slice_ids, draft.max_tokens - len(draft.token_ids))
            draft.slice_end = len(draft.token_ids) + size
            # One id more than the slice, since vLLM may already compute the id after its end.
            await self._reservation.acquire_blocks(min(len(self.ids) + draft.slice_end + 1, self._state.context_tokens))
            await self._continue_stream(appended, self._make_chunk_params(size, draft), draft)
            if draft.end is not None:
                return
            # As between chunks, the next slice starts with the last id of this one.
            appended = draft.token_ids[-1:]
            self._reservation.release_unused(len(self.ids) + len(draft.token_ids))

    async def _pause_stream(self, draft: PartialChunk) -> None:
        """Keep the computed keys and values, unless a watch ended the chunk early.

        vLLM continues to sample after the watched id, and it cannot remove ids from a session.
        """
        self._reservation.release_unused(len(self.ids))
        if draft.end is ChunkEnd.WATCH and len(draft.token_ids) < draft.slice_end:
            await self.preempt()

    async def _continue_stream(self, appended: list[int], params: ChunkParams, draft: PartialChunk) -> None:
        """Sample in the streaming request to the end of the slice. If there is no request, open one with all ids."""
        parameters = self._state.sampling_params.get(params)
        if self._outputs is None:
            appended = [*self.ids, *draft.token_ids]
            self._inputs = asyncio.Queue()
            self._outputs = self._llm.generate(_feed_inputs(self._inputs), parameters, self._make_request_name())
        self._inputs.put_nowait(StreamingInput(self._make_prompt(appended), parameters))
        await self._collect_ids(self._outputs, draft)

    async def _sample_with_request(self, draft: PartialChunk) -> None:
        """Sample with a separate request, which keeps no blocks. vLLM may preempt it, which costs time only.

        A watch that stops early aborts the request, so that no further ids are sampled.
        """
        await self.preempt()
        draft.slice_end = draft.max_tokens
        parameters = self._state.sampling_params.get(self._make_chunk_params(draft.max_tokens, draft))
        self._outputs = self._llm.generate(self._make_prompt(self.ids.copy()), parameters, self._make_request_name())
        try:
            await self._collect_ids(self._outputs, draft)
        finally:
            await self.preempt()

    def _make_prompt(self, ids: list[int]) -> TokensInput:
        return tokens_input(ids, cache_salt=self._oldest_weights.cache_salt if self._oldest_weights else None)

    def _make_chunk_params(self, max_tokens: int, draft: PartialChunk) -> ChunkParams:
        # A watch must see each id before the next ones are sampled.
        interval = WHOLE_CHUNKS if draft.watch is None else 1
        return ChunkParams(max_tokens, draft.stop_ids, self._sampling.temperature, interval)

    async def _collect_ids(self, outputs: AsyncGenerator[RequestOutput, None], draft: PartialChunk) -> None:
        """Collect ids until the chunk or its slice is complete."""
        with self._state.pending_calls.track():
            async for output in outputs:
                draft.add(output)
                if draft.end is not None or len(draft.token_ids) >= draft.slice_end:
                    return
        raise EngineError("vLLM closed the stream of a session that still wanted ids")

    async def preempt(self) -> None:
        """Give up keys and values in the engine. The next call computes them again from all ids."""
        await shield_call(self._preempt())

    async def _preempt(self) -> None:
        # A second caller waits until the blocks are free.
        async with self._preempt_lock:
            outputs, self._outputs = self._outputs, None
            if outputs is not None:
                await outputs.aclose()
            self._reservation.mark_dropped()

    def _make_request_name(self) -> str:
        self._requests += 1
        return f"{self._name}.{self._requests}"


async def _feed_inputs(inputs: asyncio.Queue[StreamingInput]) -> AsyncGenerator[StreamingInput, None]:
    while True:
        yield await inputs.get()


class VllmEngine:
    """A running vLLM. Open it with `open_engine("vllm", model=folder)`."""

    name = "vllm"
    seeds_sessions = False
    """Always False. vLLM's seeded requests kill its process on CPU when a prefill is split, and cost a generator each.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        opening: EngineOptions,
        context_tokens: int,
        options: Vllm,
        cache: KvBlockLayout,
    ) -> None:
        self.context_tokens = context_tokens
        self.forbidden_ids = opening.forbidden_ids
        self.policy_step = 0
        self.fallback_reason: str | None = None
        """Reason for one request per line although sessions were requested. None means that there is no fallback."""
        self.kv_layout = cache
        """Size of its KV cache. The number of open sessions depends on the lengths that they reach."""
        self._llm = llm
        self._folder = opening.folder
        self._keeps_kv = opening.kv_on_sync == "keep"
        self._load_count = 0
        self._state = EngineState(
            context_tokens, options.request_mode, SamplingParamsCache(), ReadWriteLock(), self._get_loaded_weights
        )
        self._sessions: set[VllmSession] = set()
        self._sleep_mode = SleepMode(llm, options.sleep)
        growth = SessionGrowthEstimator(context_tokens, opening.max_growth_tokens)
        self._admission_queue = AdmissionQueue(KvAdmission(cache, growth), opening.max_sessions)
        self._session_numbers = count()

    @property
    def request_mode(self) -> RequestMode:
        """Current request mode."""
        return self._state.request_mode

    @property
    def preemptions(self) -> PreemptionStats:
        """Preemption counts of streaming sessions, see `HasPreemptionStats.preemptions`. vLLM reports none in request
        mode."""
        return self._admission_queue.preemptions

    def set_request_mode(self, mode: RequestMode) -> None:
        """Switch the request mode, as the fallback and comparisons do.

        Raises:
            EngineError: a session is open.
        """
        if self._sessions:
            raise EngineError(f"{len(self._sessions)} sessions are open; close them before changing the request mode")
        self._state = replace(self._state, request_mode=mode)

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        """See `Engine.session`. `sampling.seed` has no effect."""
        return self._session(copy_prompt_ids(prompt_ids), sampling)

    @asynccontextmanager
    async def _session(self, ids: list[int], sampling: Sampling) -> AsyncIterator[EngineSession]:
        async with self._admission_queue.reserve(len(ids), sampling.nested) as reservation:
            with detect_engine_death():
                await self._sleep_mode.wake()
            session = VllmSession(self._llm, str(next(self._session_numbers)), ids, sampling, self._state, reservation)
            self._sessions.add(session)
            try:
                yield session
            finally:
                self._sessions.remove(session)
                await session.close()

    async def sleep(self) -> None:
        """Release the GPU's memory, if `sleep` is set, until a session is opened or weights are loaded."""
        if not self._sessions:
            with detect_engine_death():
                await self._sleep_mode.enter()

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        """See `Engine.load_weights`."""
        policy = await asyncio.to_thread(load_skeleton, self._folder)
        validate_checkpoint_names(folder, policy.trained_shapes, policy.checkpoint_shapes)
        async with self._state.lock.write():
            await self._load(folder)
            self.policy_step = policy_step
            self._load_count += 1

    def _get_loaded_weights(self) -> LoadedWeights:
        # The prefix cache cannot be emptied while a session waits in vLLM. Kept keys and values are distinguished by
        # their salt.
        return LoadedWeights(self.policy_step, f"{self._load_count}" if self._keeps_kv else None)

    async def _load(self, folder: Path) -> None:
        try:
            await self._sleep_mode.wake()
            # Sessions that open meanwhile have nothing in vLLM yet.
            for session in () if self._keeps_kv else tuple(self._sessions):
                await session.preempt()
            with self._state.pending_calls.track():
                await await_or_raise_death(
                    self._llm, self._llm.collective_rpc("policy_reload_weights", args=(str(folder),))
                )
                dropped = self._keeps_kv or await await_or_raise_death(self._llm, self._llm.reset_prefix_cache())
        except (EngineDeadError, EngineDied) as error:
            raise EngineDied("the vLLM process is gone; its weights cannot be replaced") from error
        except Exception as error:
            raise EngineError(f"vLLM could not load {folder}: {error}") from error
        if not dropped:
            raise EngineError("vLLM kept keys and values of the old weights; a request is still running in it")

    @asynccontextmanager
    async def watch_silence(self, silence_s: float) -> AsyncIterator[None]:
        """Kill vLLM's process if it hangs for `silence_s` seconds within the block."""
        guard = asyncio.create_task(kill_when_silent(get_process_ids(self._llm), self._state.pending_calls, silence_s))
        try:
            yield
        finally:
            guard.cancel()

    async def check_step(self, error_file: Path) -> None:
        """Sample one id, because vLLM loads some models that it cannot run here.

        vLLM's process writes the reason of a failure to the given file.

        Raises:
            ConfigError: vLLM cannot run this model.
            EngineDied: its process died for another reason.
        """
        await self._llm.collective_rpc("policy_report_errors", args=(str(error_file),))
        await self._llm.collective_rpc("policy_silence_stderr", args=(True,))
        # Silence both processes. A failure is reported as one error, without vLLM's traceback.
        vllm_log = logging.getLogger("vllm")
        level = vllm_log.level
        vllm_log.setLevel(logging.CRITICAL)
        try:
            async with self._admission_queue.reserve(1) as reservation:
                state = replace(self._state, request_mode=RequestMode.REQUEST)
                session = VllmSession(self._llm, "first step", [1], Sampling(temperature=0.0), state, reservation)
                try:
                    await session.sample((), max_tokens=1, stop_ids=frozenset())
                finally:
                    await session.close()
        except EngineDied as error:
            reason = await asyncio.to_thread(_read_text_head, error_file)
            # Lack of memory may be temporary, so this is not an error of the configuration.
            if not reason or "out of memory" in reason.lower():
                raise
            remedy = f"vLLM cannot run it here: {reason}; choose another model, or --engine transformers"
            raise ConfigError("model", str(self._folder), remedy) from error
        finally:
            vllm_log.setLevel(level)
        await self._llm.collective_rpc("policy_silence_stderr", args=(False,))

    async def check_streaming(self) -> None:
        """Check that a streaming session gives the same ids as one request per line; if not, fall back to requests."""
        if self.request_mode is RequestMode.REQUEST:
            return
        # One request per line is the reference.
        requested = await self._sample_greedy(RequestMode.REQUEST)
        try:
            async with asyncio.timeout(PROBE_S):
                streamed = await self._sample_greedy(RequestMode.SESSION)
        except EngineDied:
            raise
        except (EngineError, TimeoutError) as error:
            self._fall_back(str(error) or f"a streaming session gave no answer in {PROBE_S} s")
            return
        if streamed != requested:
            self._fall_back(
                f"greedy ids of a streaming session are {streamed}, those of one request per line {requested}"
            )

    async def _sample_greedy(self, mode: RequestMode) -> list[int]:
        state = replace(self._state, request_mode=mode)
        async with self._admission_queue.reserve(1) as reservation:
            session = VllmSession(self._llm, f"probe {mode}", [1], Sampling(temperature=0.0), state, reservation)
            try:
                for observed in PROBE:
                    await session.sample(observed, max_tokens=2, stop_ids=frozenset())
            finally:
                await session.close()
        return session.ids

    def _fall_back(self, reason: str) -> None:
        log.warning("streaming sessions do not work with this vLLM (%s); using one request per line instead", reason)
        self.fallback_reason = reason
        self.set_request_mode(RequestMode.REQUEST)


@asynccontextmanager
async def open_vllm(
    opening: EngineOptions, options: Vllm, cache_blocks: int | None = None, silence_s: float = SILENCE_S
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
    info = read_model_folder(opening)
    with open_socket_folder() as variables:
        try:
            llm = await asyncio.to_thread(start_vllm, opening, info, options, variables, cache_blocks)
        except Exception as error:
            raise EngineError(f"vLLM did not start: {error}; set VLLM_LOGGING_LEVEL=INFO to see its log") from error
        try:
            await llm.collective_rpc("policy_ignore_signals")
            # Forbid ids before the first request is sampled.
            await llm.collective_rpc("policy_forbid_ids", args=(sorted(opening.forbidden_ids),))
            engine = VllmEngine(
                llm, opening, info.context_tokens, options, await _read_kv_layout(llm, info.context_tokens)
            )
            async with engine.watch_silence(silence_s):
                # Check that the model runs here, then that streaming sessions work.
                await engine.check_step(Path(variables["VLLM_RPC_BASE_PATH"]) / "died.txt")
                await engine.check_streaming()
                yield engine
        finally:
            await stop_vllm(llm)


@contextmanager
def detect_engine_death() -> Iterator[None]:
    """Convert vLLM's EngineDeadError in the block to EngineDied.

    Raises:
        EngineDied: the process died within the block, or before it.
    """
    try:
        yield
    except EngineDeadError as error:
        raise EngineDied("the vLLM process is gone") from error


class HasErrored(Protocol):
    """Object that reports its own death."""

    @property
    def errored(self) -> bool: ...


async def await_or_raise_death(llm: HasErrored, call: Coroutine[object, object, T]) -> T:
    """Return the result of a call to vLLM's process. vLLM never answers a call during which its process died.

    Raises:
        EngineDied: the process is dead.
    """
    task = asyncio.ensure_future(call)
    try:
        # Wake up regularly to check that the process is alive.
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            if llm.errored:
                raise EngineDied("the vLLM process is gone; it died during a call")
        return task.result()
    finally:
        task.cancel()


async def _read_kv_layout(llm: AsyncLLM, context_tokens: int) -> KvBlockLayout:
    """Return the size of vLLM's KV cache.

    Raises:
        ConfigError: not even one full context fits.
    """
    # Each worker answers, with the same layout.
    (layout, *_) = await llm.collective_rpc("policy_read_kv_layout")
    blocks, groups = layout
    cache = KvBlockLayout(blocks, tuple((size, max_blocks) for size, max_blocks in groups))
    needed = cache.count_blocks(context_tokens)
    if needed > cache.blocks:
        capacity = f"room for {context_tokens * cache.blocks // needed} ids"
        raise ConfigError("vllm.kv_cache_gib", capacity, f"one context has {context_tokens} ids; increase it")
    return cache


def _read_text_head(file: Path) -> str:
    """Return the beginning of a text file, or "" without a file."""
    return file.read_text(encoding="utf-8")[:300] if file.is_file() else ""
