"""Minimum GPU memory of a run, checked before anything opens."""

import os
import subprocess
import sys
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from repl_rl.engine import ENGINES, EngineKind, Transformers, Vllm
from repl_rl.engine.names import outline
from repl_rl.engine.options import Dtype
from repl_rl.errors import ConfigError
from repl_rl.machine.launched import own_gpu, processes
from repl_rl.settings.named import Named
from repl_rl.trainer import choices, sharded
from repl_rl.trainer.apart import sampler_dtype
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.grpo_config import loaded_dtype
from repl_rl.trainer.lora import find_untrained
from repl_rl.world import World

_GIB = 1 << 30
_VLLM_SHARE = 0.92
"""Share of the GPU's memory that must be free when vLLM 0.32 starts, and that it takes without `kv_cache_gib`. See
`gpu_memory_utilization`, and `request_memory` in `vllm/v1/worker/utils.py`."""
_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "auto": 2}
_STATES = {"adamw_torch_fused": 8, "adamw_torch": 8, "adamw_8bit": 2, "lion_32bit": 4, "lion_8bit": 1, "rmsprop": 4}
"""Bytes of optimizer state per trained parameter, without momentum. Paged optimizers may leave the GPU, and Adafactor
keeps hardly any state."""


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
    ask = f"import torch; print(*torch.cuda.mem_get_info({own_gpu(torch.cuda.device_count())}))"
    asked = subprocess.run([sys.executable, "-P", "-c", ask], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = (asked.stderr.strip().splitlines() or ["no error message"])[-1]
        raise ConfigError("GPU", said, "PyTorch cannot use it; see nvidia-smi, or hide it with CUDA_VISIBLE_DEVICES=")
    return GpuMemory(*map(int, asked.stdout.split()))


def validate_gpu_memory(
    world: World, config: TrainerConfig, local: bool = True, memory: GpuMemory | None = None
) -> None:
    """Refuse a run whose weights, gradients, optimizer, reference model and KV cache exceed the GPU's free memory.

    Activations are not counted. Nothing is checked on a CPU, or under FSDP and DeepSpeed, which shard the weights.

    Args:
        world: rollout config with the policy and its engine.
        config: settings of the update.
        local: True if this process samples rollouts.
        memory: memory of the GPU. None reads it.

    Raises:
        ConfigError: the free memory is too small, or vLLM would not start.
    """
    memory = memory or read_gpu_memory()
    if memory is None or sharded.asked() or os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return
    engine = ENGINES.chosen(world.engine) if local else None
    vllm, thing, free = isinstance(engine, Vllm), "free memory of the GPU", f"{memory.free / _GIB:.4g} GiB"
    # vLLM compares free memory with its share at the start, even if `kv_cache_gib` limits what it takes.
    if vllm and memory.free < _VLLM_SHARE * memory.total:
        remedy = f"vLLM starts only where {_VLLM_SHARE:.0%} of {memory.total / _GIB:.4g} GiB are free; end what else "
        raise ConfigError(thing, free, f"{remedy}runs there, or choose --engine transformers")
    model, sleeps = outline(world.model_folder).model, isinstance(engine, Vllm) and engine.sleep
    weights = sum(w.numel() for w in model.parameters()) * _BYTES[sampler_dtype(config.dtype, world.dtype)]
    trainer, sampler = count_trainer_bytes(model, config), _count_sampler_bytes(engine, weights, memory.total)
    # A vLLM that sleeps leaves the GPU to the trainer during the update, so gradients and vLLM never need room at once.
    # The run needs the larger of the two phases.
    awake = trainer | sampler | ({"gradients": 0} if sleeps else {})
    parts = max(trainer, awake, key=lambda parts: sum(parts.values()))
    needed = sum(parts.values())
    # Name each part, and suggest only remedies that apply to this run.
    if needed > memory.free:
        listed = ", ".join(f"{name} {size / _GIB:.3g}" for name, size in parts.items() if size)
        options = ["--vllm.sleep"] if vllm and not (sleeps or config.ahead) else []
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
    loaded, optimizer = numbers * loaded_dtype(config).itemsize, Named.read("trainer.optimizer", config.optimizer)
    # With adapters the reference is the model with its adapters disabled, which takes no more memory.
    reference = bool(choices.kl(config.kl)["beta"]) and not config.lora_rank
    return {
        "weights": loaded + (4 * trained if config.lora_rank else 0),
        "reference": loaded if reference else 0,
        "optimizer": trained * (_STATES.get(optimizer.name, 0) + (4 if optimizer.options.get("momentum") else 0)),
        "gradients": 4 * trained * (2 if processes() > 1 else 1),  # DDP copies them into buckets
    }


def _count_sampler_bytes(engine: EngineKind | None, weights: int, total: int) -> dict[str, int]:
    if not isinstance(engine, Vllm):
        return {"weights of transformers": weights} if isinstance(engine, Transformers) else {}
    if engine.kv_cache_gib is None:
        return {"vllm": int(_VLLM_SHARE * total)}
    return {"weights of vllm": weights, "cache of vllm": engine.kv_cache_gib * _GIB}
