"""How vLLM is started and stopped: the environment of its process, its arguments, and a quiet end."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from repl_rl.engine.kinds import Vllm
from repl_rl.engine.options import ModelFacts, Opening
from repl_rl.engine.variables import ASKED_LEVEL, environment, hush, log_level, preloads
from repl_rl.errors import ConfigError
from repl_rl.machine.cores import cores
from repl_rl.machine.launched import local_processes, own_gpu

IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model inside the engine's process. Given as a path because vLLM replaces the short name `uni` on CPU."""
CPU_BLOCK = 32
"""Ids a block on CPU, and what other choices must be a multiple of there."""


def core_environment(options: Vllm) -> Mapping[str, str]:
    """Environment variables for the engine's process."""
    if not current_platform.is_cpu():
        own = own_device(current_platform.device_control_env_var, torch.accelerator.device_count())
        return {**log_level(), **exact(), **own}
    return {
        **log_level(),
        **preloads(Path(vllm.__file__).parent.parent),
        "OMP_NUM_THREADS": str(options.threads or max(1, cores() - 1)),
        # idle threads that spin would take the cores of the trainer and of the consoles
        "OMP_WAIT_POLICY": "PASSIVE",
        # the sampler compiles a helper at the first request, which costs seconds and gains nothing on CPU
        "TORCH_COMPILE_DISABLE": "1",
    }


def exact() -> Mapping[str, str]:
    """What makes vLLM's float32 on a GPU that of the trainer.

    vLLM 0.32 attends in float32 by Triton's kernels, whose products of float32 are by default those of TF32, with ten
    binary digits: single log probabilities were up to 0.006 nats off on an H200, where the trainer allows 0.001.
    """
    return {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "ieee")}


def own_device(variable: str, count: int) -> Mapping[str, str]:
    """What shows the engine the GPU that this process trains on, among processes that were started together.

    Args:
        variable: the environment variable that says which GPUs a process sees.
        count: how many this process sees.
    """
    if local_processes() == 1 or count < 1:
        return {}
    seen = [name for name in os.environ.get(variable, "").split(",") if name] or [str(n) for n in range(count)]
    return {variable: seen[own_gpu(len(seen))]}


def arguments(opening: Opening, facts: ModelFacts, options: Vllm) -> dict[str, object]:
    """vLLM's arguments for a model: those of `AsyncEngineArgs` and of `vllm.LLM` alike."""
    on_cpu = current_platform.is_cpu()
    dtype = ("float32" if on_cpu else "bfloat16") if opening.dtype == "auto" else opening.dtype
    gib = options.kv_cache_gib or (1 if on_cpu else None)
    return {
        "model": str(opening.folder),
        # what the index names, and not Mistral's consolidated files beside it, whose names no weight sync has
        "load_format": "hf",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": opening.seed,
        "max_model_len": facts.context_tokens,
        "max_num_seqs": opening.max_sessions,
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
        "enforce_eager": on_cpu,
        "use_tqdm_on_load": bool(ASKED_LEVEL),
        "generation_config": "vllm",
        "worker_extension_cls": "repl_rl.engine.vllm_worker.PolicyWorker",
        "kv_cache_memory_bytes": None if gib is None else gib << 30,
        "block_size": options.block_size or (CPU_BLOCK if on_cpu else None),
        "distributed_executor_backend": IN_CORE if on_cpu else None,
        "enable_sleep_mode": options.sleep,
    }


def refuse_unfit(options: Vllm) -> None:
    """Refuse options that have no effect, or cannot be had, on this machine.

    Raises:
        ConfigError: `sleep` without a GPU, or on CPU a `block_size` that its kernels do not take.
    """
    if current_platform.is_cpu() and (options.block_size or CPU_BLOCK) % CPU_BLOCK:
        remedy = f"vLLM's kernels for CPUs take multiples of {CPU_BLOCK}"
        raise ConfigError("vllm.block_size", options.block_size, remedy)
    if options.sleep and not current_platform.is_sleep_mode_available():
        raise ConfigError(
            "vllm.sleep", options.sleep, "there is no GPU whose memory the update could use; leave it out"
        )


def start(
    opening: Opening,
    facts: ModelFacts,
    options: Vllm,
    variables: Mapping[str, str],
    cache_blocks: int | None = None,
) -> AsyncLLM:
    """Start vLLM's process, with environment `variables` beside its own, and wait until it has loaded the model.

    Blocks for seconds. `cache_blocks`: see `open_vllm`.
    """
    hush()
    told = {**arguments(opening, facts, options), "num_gpu_blocks_override": cache_blocks}
    with environment({**core_environment(options), **variables}):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**told))


def process_ids(llm: AsyncLLM) -> Sequence[int]:
    """The processes of an engine on this machine."""
    manager = llm.engine_core.resources.engine_manager
    return [process.pid for process in manager.processes if process.pid is not None]


async def stop(llm: AsyncLLM) -> None:
    """End vLLM's process and wait until it is gone; a cancellation does not stop that half-way."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()  # it would take the end of the process for a crash and log that
    await asyncio.shield(asyncio.to_thread(llm.shutdown))
    # vLLM shuts down once more when the object is collected, which fails noisily at the interpreter's end
    llm.shutdown = _nothing


def _nothing(timeout: float | None = None) -> None:
    pass
