"""FSDP, as accelerate is asked for it: had, or refused; and weights that are in parts, made whole and put back."""

import os
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor, distribute_tensor

from repl_rl.errors import ConfigError


def asked() -> bool:
    """Whoever started this process wants FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def load_whole() -> None:
    """Have every process load the whole model, before one does: what is done to it before it is sharded, such as a copy
    for the KL term, would else be done to weights that only the first process has."""
    if asked():
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def refuse_unsharded(processes: int, lora_rank: int) -> None:
    """Refuse a run under FSDP that cannot be had.

    Raises:
        ConfigError: FSDP is asked for, of another version than 2, in one process, or with adapters.
    """
    if not asked():
        return
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        remedy = "weights are taken from FSDP2 alone: give --fsdp_version 2 to accelerate launch, or FSDP_VERSION=2"
        raise ConfigError("FSDP_VERSION", version, remedy)
    if processes == 1:
        raise ConfigError(
            "processes", processes, "FSDP is asked for, which needs at least 2; start more, or leave it out"
        )
    if lora_rank:
        remedy = "adapters are not trained under FSDP; set it to 0, or leave FSDP out"
        raise ConfigError("trainer.lora_rank", lora_rank, remedy)


def shard(accelerator: Accelerator) -> None:
    """Have models sharded where that is asked for: on a CPU accelerate takes DDP without a word."""
    if not asked():
        return
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if getattr(state, "fsdp_plugin", None) is not None:
        state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # else transformers saves no model that others load


def check_sharded(model: torch.nn.Module) -> None:
    """Hold the trainer to what was asked for.

    Raises:
        ConfigError: FSDP was, and weights are not in parts.
    """
    if asked() and not all(isinstance(weight, DTensor) for weight in model.parameters()):
        remedy = "accelerate has not sharded the weights; leave FSDP out, or start several processes"
        raise ConfigError("ACCELERATE_USE_FSDP", "true", remedy)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with all its parts; all processes call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parted(saved: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`saved`, which every process has whole, in parts as `like` is."""
    if not isinstance(like, DTensor) or saved.shape != like.shape:
        return saved
    here = saved.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)


def parted_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, object]) -> dict[str, object]:
    """The whole state of an optimizer, in parts as its weights are."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = saved["state"]
    assert isinstance(state, Mapping)
    moments = {
        number: {
            name: parted(value, weights[number]) if isinstance(value, torch.Tensor) else value
            for name, value in one.items()
        }
        for number, one in state.items()
    }
    return {**saved, "state": moments}
