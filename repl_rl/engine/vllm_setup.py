"""Start and stop of vLLM: environment variables of its process, its arguments, and a quiet shutdown."""

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
"""Executor that runs the model inside the engine's process. vLLM replaces the short name `uni` on CPU, but not this
path."""
CPU_BLOCK = 32
"""Ids per block on CPU. Other choices must be a multiple of it there."""


def core_environment(options: Vllm) -> Mapping[str, str]:
    """Return the environment variables for the engine's process."""
    if not current_platform.is_cpu():
        own = own_device(current_platform.device_control_env_var, torch.accelerator.device_count())
        return {**log_level(), **exact(), **own}
    return {
        **log_level(),
        **preloads(Path(vllm.__file__).parent.parent),
        "OMP_NUM_THREADS": str(options.threads or max(1, cores() - 1)),
        # Idle threads that spin would occupy the cores of the trainer and the consoles.
        "OMP_WAIT_POLICY": "PASSIVE",
        # The sampler compiles a helper at the first request. This takes seconds and gains nothing on CPU.
        "TORCH_COMPILE_DISABLE": "1",
    }


def exact() -> Mapping[str, str]:
    """Return the variable that makes float32 of vLLM on a GPU as exact as that of the trainer.

    vLLM 0.32 computes attention in float32 with Triton's kernels. Their default is TF32 products, with ten binary
    digits. Single log probabilities then differed by up to 0.006 nats on an H200, and the trainer allows 0.001.
    """
    return {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "ieee")}


def own_device(variable: str, count: int) -> Mapping[str, str]:
    """Return the variable that shows the engine only the GPU on which this process trains.

    It is empty unless several processes were started together.

    Args:
        variable: the environment variable that lists the GPUs of a process.
        count: number of GPUs that this process sees.
    """
    if local_processes() == 1 or count < 1:
        return {}
    seen = [name for name in os.environ.get(variable, "").split(",") if name] or [str(n) for n in range(count)]
    return {variable: seen[own_gpu(len(seen))]}


def arguments(opening: Opening, facts: ModelFacts, options: Vllm) -> dict[str, object]:
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
        "max_model_len": facts.context_tokens,
        "max_num_seqs": opening.max_sessions,
        "enable_prefix_caching": True,
        # Log probabilities at temperature 1, as `Chunk` requires.
        "logprobs_mode": "raw_logprobs",
        "disable_log_stats": True,
        "enforce_eager": on_cpu,
        "use_tqdm_on_load": bool(ASKED_LEVEL),
        # Ignore the sampling defaults in the model's generation_config.json.
        "generation_config": "vllm",
        "worker_extension_cls": "repl_rl.engine.vllm_worker.PolicyWorker",
        "kv_cache_memory_bytes": None if gib is None else gib << 30,
        "block_size": options.block_size or (CPU_BLOCK if on_cpu else None),
        "distributed_executor_backend": IN_CORE if on_cpu else None,
        "enable_sleep_mode": options.sleep,
    }


def refuse_unfit(options: Vllm) -> None:
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


def start(
    opening: Opening,
    facts: ModelFacts,
    options: Vllm,
    variables: Mapping[str, str],
    cache_blocks: int | None = None,
) -> AsyncLLM:
    """Start vLLM's process and wait until it has loaded the model. Blocks for seconds.

    The process gets the environment `variables` in addition to its own. `cache_blocks`: see `open_vllm`.
    """
    hush()
    told = {**arguments(opening, facts, options), "num_gpu_blocks_override": cache_blocks}
    with environment({**core_environment(options), **variables}):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**told))


def process_ids(llm: AsyncLLM) -> Sequence[int]:
    """Return the ids of an engine's processes on this machine."""
    manager = llm.engine_core.resources.engine_manager
    return [process.pid for process in manager.processes if process.pid is not None]


async def stop(llm: AsyncLLM) -> None:
    """End vLLM's process and wait until it is gone, even if the caller is cancelled."""
    if llm.output_handler is not None:
        # The handler would log the end of the process as a crash.
        llm.output_handler.cancel()
    await asyncio.shield(asyncio.to_thread(llm.shutdown))
    # vLLM shuts down again when the object is collected, which logs errors at the end of the interpreter.
    llm.shutdown = _nothing


def _nothing(timeout: float | None = None) -> None:
    pass
