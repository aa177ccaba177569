"""Validation of a training run before an engine starts and before anything is written.

`validate_run` checks settings, machine and model, and `validate_gpu_memory` the minimum GPU memory of the run.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from repl_rl.engine import ENGINES, EngineConfig, Transformers, Vllm
from repl_rl.engine.config import Dtype
from repl_rl.errors import ConfigError
from repl_rl.models.disable_dropout import validate_deterministic_model
from repl_rl.models.parameter_names import load_skeleton
from repl_rl.models.transform_logits import LogitsTransform, get_maskable_output_layer
from repl_rl.ray.config import parse_workers
from repl_rl.rollout_config import RolloutConfig
from repl_rl.settings.component_registry import NameWithOptions
from repl_rl.trainer.config import TrainerConfig, choose_sampler_dtype, parse_kl
from repl_rl.trainer.plugins.fsdp import is_fsdp_requested, validate_fsdp
from repl_rl.trainer.plugins.lora import find_untrained
from repl_rl.trainer.trl_arguments import build_credit_config, check_machine, loaded_dtype
from repl_rl.trainer.weight_sync import find_folder_with_space
from repl_rl.utils.processes import choose_gpu, get_world_size

_GIB = 1 << 30
_VLLM_SHARE = 0.92
"""Share of the GPU's memory that must be free when vLLM 0.32 starts. vLLM takes this share if `kv_cache_gib` is not
set. See `gpu_memory_utilization`, and `request_memory` in `vllm/v1/worker/utils.py`."""
_DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}
"""Bytes per number. "auto" means bfloat16 on a GPU."""
_OPTIMIZER_BYTES = {
    "adamw_torch_fused": 8,
    "adamw_torch": 8,
    "adamw_8bit": 2,
}
"""Bytes of optimizer state per trained parameter, without the momentum of `sgd`. Any other optimizer counts as 0:
paged state can leave the GPU, and Adafactor keeps hardly any state."""


def validate_run(rollouts: RolloutConfig, config: TrainerConfig, tasks: int, workers: str = "local") -> None:
    """Check that a run can be trained.

    Args:
        rollouts: policy, tasks, engine, sandbox and limits of the rollouts.
        config: settings of the update.
        tasks: number of tasks to draw from.
        workers: place of the rollouts, `local` or `ray`.

    Raises:
        ConfigError: there are too few tasks; sampler, prompt and policy do not fit each other; a setting of the update
            is not available, in general or on this machine; or `validate_model` raises it.
    """
    # Cheap checks come first: the last ones load the tokenizer, and the names and shapes of the weights.
    if tasks < config.prompts_per_step:
        remedy = f"a step takes {config.prompts_per_step} different ones; give more tasks, or lower it"
        raise ConfigError("training tasks", tasks, f"{remedy} (--trainer.prompts-per-step)")
    _validate_async_setup(rollouts, config)
    _validate_gpu_use(rollouts, workers)
    check_machine(config)
    config.compute_batch_shape(get_world_size())
    validate_fsdp(get_world_size(), config.lora_rank)
    # A group judge compares the rollouts of a group, which therefore must run in one process.
    if rollouts.group_judges and config.prompts_per_step % get_world_size():
        remedy = (
            f"each of {get_world_size()} processes must play whole groups; give a multiple of that many prompts a step"
        )
        raise ConfigError("group_judge with prompts_per_step", config.prompts_per_step, remedy)
    build_credit_config(config)
    _, renderer = rollouts.load_sampler_and_renderer()
    validate_model(rollouts.model_folder, ENGINES.resolve(rollouts.engine), config, lambda: renderer.forbidden_ids)


def _validate_async_setup(rollouts: RolloutConfig, config: TrainerConfig) -> None:
    """Check that sampler and trainer can work at the same time if rollouts are async.

    Without async rollouts, check that no setting is given that only they use.
    """
    engine = ENGINES.resolve(rollouts.engine)
    if rollouts.kv_on_sync == "keep" and not config.max_staleness_steps:
        remedy = (
            "without trainer.max_staleness_steps no rollout is in flight at a sync; give that too, or leave this out"
        )
        raise ConfigError("kv_on_sync", rollouts.kv_on_sync, remedy)
    # Find a reason that sampler and trainer cannot run at the same time.
    without = None
    if get_world_size() > 1:
        without = f"{get_world_size()} processes play one step at a time; train in one"
    elif isinstance(engine, Vllm) and engine.sleep:
        without = "vLLM cannot sleep while it samples; leave vllm.sleep out"
    if config.max_staleness_steps and without:
        raise ConfigError("trainer.max_staleness_steps", config.max_staleness_steps, f"{without}, or leave it at 0")


def _validate_gpu_use(rollouts: RolloutConfig, workers: str) -> None:
    """Check that the engine leaves no GPU of a worker idle; the needs of user-defined engines are unknown."""
    engine, chosen = ENGINES.resolve(rollouts.engine), parse_workers(workers)
    if chosen is not None and chosen.gpus_per_worker > 1 and isinstance(engine, Vllm | Transformers):
        remedy = (
            f"the engine {engine.kind} samples on one GPU, and the other GPUs of a worker would be idle; leave it at 1"
        )
        raise ConfigError("workers.gpus_per_worker", chosen.gpus_per_worker, remedy)


def validate_model(
    folder: Path, engine: EngineConfig, config: TrainerConfig, forbidden_ids: Callable[[], frozenset[int]]
) -> None:
    """Check that a model can be trained, from its configuration and the names and shapes of its weights.

    This includes a dry run of the weight sync. The trainer would write the same names and shapes that the checkpoint
    has, so an engine that has loaded the checkpoint can load a sync. It takes less than a second.

    Args:
        folder: folder of the model.
        engine: the engine that samples.
        config: settings of the update.
        forbidden_ids: returns the ids that are never sampled; called only if forbidding one could fail.

    Raises:
        ConfigError: transformers does not know the model; its weights are incomplete or would be saved differently. Its
            logits are not supported, or it chooses experts at random in training. The engine cannot load new weights,
            an id cannot be forbidden, or no folder has room for a weight sync.
    """
    found = load_skeleton(folder)
    validate_deterministic_model(found.model.config)
    engine.check_sync(folder)
    # With `fast_logprobs`, the trainer computes logits itself, so it must know their transform.
    if config.fast_logprobs:
        LogitsTransform.from_config(found.model.config)
    # A model that cannot forbid an id is fine if no id is forbidden.
    try:
        get_maskable_output_layer(found.model)
    except ConfigError:
        if forbidden_ids():
            raise
    # Async rollouts alternate between two folders of weights.
    find_folder_with_space(
        loaded_dtype(config).itemsize
        * sum(map(math.prod, found.trained_shapes.values()))
        * (2 if config.max_staleness_steps else 1)
    )


class GpuMemory(NamedTuple):
    """Memory of a GPU before the run takes any, bytes."""

    free: int
    total: int


def read_gpu_memory() -> GpuMemory | None:
    """Read the memory of the GPU that this process trains on; None means that there is no GPU.

    Raises:
        ConfigError: PyTorch cannot use the GPU.
    """
    if not torch.cuda.is_available():
        return None
    # Query in a subprocess: it would initialize CUDA here, and vLLM would then start its process in another way.
    query = f"import torch; print(*torch.cuda.mem_get_info({choose_gpu(torch.cuda.device_count())}))"
    answer = subprocess.run([sys.executable, "-P", "-c", query], capture_output=True, text=True, check=False)
    if answer.returncode:
        # The last line of a traceback names the error.
        message = (answer.stderr.strip().splitlines() or ["no error message"])[-1]
        raise ConfigError(
            "GPU", message, "PyTorch cannot use it; see nvidia-smi, or hide it with CUDA_VISIBLE_DEVICES="
        )
    return GpuMemory(*map(int, answer.stdout.split()))


def validate_gpu_memory(
    rollouts: RolloutConfig, config: TrainerConfig, local: bool = True, memory: GpuMemory | None = None
) -> None:
    """Refuse a run whose weights, gradients, optimizer, reference model and KV cache exceed the GPU's free memory.

    Activations are not counted. Nothing is checked on a CPU, or under FSDP and DeepSpeed, which shard the weights.

    Args:
        rollouts: rollout config with the policy and its engine.
        config: settings of the update.
        local: True if this process samples rollouts.
        memory: memory of the GPU. None reads it.

    Raises:
        ConfigError: the free memory is too small, or vLLM would not start.
    """
    memory = memory or read_gpu_memory()
    if memory is None or is_fsdp_requested() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return
    # None: workers sample, so this GPU holds no engine.
    engine = ENGINES.resolve(rollouts.engine) if local else None
    vllm, thing, free = isinstance(engine, Vllm), "free memory of the GPU", f"{memory.free / _GIB:.4g} GiB"
    # vLLM compares free memory with its share at the start, even if `kv_cache_gib` limits what it takes.
    if vllm and memory.free < _VLLM_SHARE * memory.total:
        remedy = f"vLLM starts only where {_VLLM_SHARE:.0%} of {memory.total / _GIB:.4g} GiB are free; end what else "
        raise ConfigError(thing, free, f"{remedy}runs there, or choose --engine transformers")
    model, sleeps = load_skeleton(rollouts.model_folder).model, isinstance(engine, Vllm) and engine.sleep
    weights = (
        sum(w.numel() for w in model.parameters()) * _DTYPE_BYTES[choose_sampler_dtype(config.dtype, rollouts.dtype)]
    )
    trainer, sampler = count_trainer_bytes(model, config), _count_sampler_bytes(engine, weights, memory.total)
    # A vLLM that sleeps leaves the GPU to the trainer during the update, so gradients and vLLM never need room at once.
    # The run needs the larger of the two phases.
    awake = trainer | sampler | ({"gradients": 0} if sleeps else {})
    parts = max(trainer, awake, key=lambda parts: sum(parts.values()))
    needed = sum(parts.values())
    # Name each part, and suggest only remedies that apply to this run.
    if needed > memory.free:
        listed = ", ".join(f"{name} {size / _GIB:.3g}" for name, size in parts.items() if size)
        options = ["--vllm.sleep"] if vllm and not (sleeps or config.max_staleness_steps) else []
        options += ["a smaller --vllm.kv-cache-gib"] if vllm else []
        options += ["a smaller model"] if config.lora_rank else ["--trainer.lora-rank", "a smaller model"]
        remedy = f"the run takes {needed / _GIB:.4g} GiB without activations ({listed}); choose {', '.join(options)}"
        raise ConfigError(thing, free, f"{remedy} or a GPU with more memory")


def count_trainer_bytes(model: PreTrainedModel, config: TrainerConfig) -> dict[str, int]:
    """Count the bytes of weights, reference model, optimizer and gradients; adapters on experts are left out."""
    numbers = trained = sum(weight.numel() for weight in model.parameters())
    # An adapter has two matrices per linear layer: rank x inputs and outputs x rank.
    if config.lora_rank:
        skipped, head = {*find_untrained(model)}, model.get_output_embeddings()
        linear = (m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name not in skipped)
        trained = config.lora_rank * sum(m.in_features + m.out_features for m in linear if m is not head)
    loaded = numbers * loaded_dtype(config).itemsize
    optimizer = NameWithOptions.parse("trainer.optimizer", config.optimizer)
    # With adapters the reference is the model with its adapters disabled, which takes no more memory.
    reference = bool(parse_kl(config.kl)["beta"]) and not config.lora_rank
    # Trained weights, their gradients and momentum are float32, 4 bytes per number.
    return {
        "weights": loaded + (4 * trained if config.lora_rank else 0),
        "reference": loaded if reference else 0,
        "optimizer": trained
        * (_OPTIMIZER_BYTES.get(optimizer.name, 0) + (4 if optimizer.options.get("momentum") else 0)),
        "gradients": 4 * trained * (2 if get_world_size() > 1 else 1),  # DDP copies them into buckets
    }


def _count_sampler_bytes(engine: EngineConfig | None, weights: int, total: int) -> dict[str, int]:
    """Count the bytes of the sampler's weights and KV cache; user-defined engines count as 0."""
    if not isinstance(engine, Vllm):
        return {"weights of transformers": weights} if isinstance(engine, Transformers) else {}
    if engine.kv_cache_gib is None:
        return {"vllm": int(_VLLM_SHARE * total)}
    return {"weights of vllm": weights, "cache of vllm": engine.kv_cache_gib * _GIB}
