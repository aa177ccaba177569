"""FSDP through accelerate: validation of its settings, and conversion between whole and sharded weights."""

import os
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor, distribute_tensor

from repl_rl.errors import ConfigError


def is_fsdp_requested() -> bool:
    """Return True if this process was launched with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def load_on_every_process() -> None:
    """Make every process load the whole model; call this before a model is loaded.

    Otherwise only the first process would have weights when the model is changed or copied before it is sharded, for
    example for the KL penalty.
    """
    if is_fsdp_requested():
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def validate_fsdp(processes: int, lora_rank: int) -> None:
    """Check that an FSDP run is supported.

    Raises:
        ConfigError: FSDP is requested in another version than 2, in one process, or with adapters.
    """
    if not is_fsdp_requested():
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        remedy = "only FSDP2 is supported: give --fsdp_version 2 to accelerate launch, or FSDP_VERSION=2"
        raise ConfigError("FSDP_VERSION", version, remedy)
    if processes == 1:
        raise ConfigError("processes", processes, "FSDP needs at least 2; start more, or leave FSDP out")
    if lora_rank:
        remedy = "adapters are not trained under FSDP; set it to 0, or leave FSDP out"
        raise ConfigError("trainer.lora_rank", lora_rank, remedy)


def enable_fsdp(accelerator: Accelerator) -> None:
    """Make accelerate shard models if FSDP is requested; on a CPU it would use DDP without a warning."""
    if not is_fsdp_requested():
        return
    state = accelerator.state
    # On a CPU the type is changed by hand, in both states of accelerate.
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if getattr(state, "fsdp_plugin", None) is not None:
        # With sharded state dicts, transformers would not save a model that can be loaded elsewhere.
        state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")


def check_model_sharded(model: torch.nn.Module) -> None:
    """Check that the model is sharded if FSDP is requested.

    Raises:
        ConfigError: FSDP is requested, and weights are not sharded.
    """
    if is_fsdp_requested() and not all(isinstance(weight, DTensor) for weight in model.parameters()):
        remedy = "accelerate has not sharded the weights; leave FSDP out, or start several processes"
        raise ConfigError("ACCELERATE_USE_FSDP", "true", remedy)


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` gathered from all its shards; all processes call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `saved`, which every process has whole, sharded as `like` is."""
    if not isinstance(like, DTensor) or saved.shape != like.shape:
        return saved
    moved = saved.to(device=like.device, dtype=like.dtype)
    # Without a source rank there is no broadcast: each process shards the copy that it has loaded.
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def shard_optimizer_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, object]) -> dict[str, object]:
    """Return the whole state of an optimizer, sharded as its weights are."""
    # Moments are numbered in the order of the weights in the parameter groups.
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = saved["state"]
    assert isinstance(state, Mapping)
    moments = {
        number: {
            name: shard_like(value, weights[number]) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for number, values in state.items()
    }
    return {**saved, "state": moments}
