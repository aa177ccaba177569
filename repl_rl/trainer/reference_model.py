"""Reference model of the KL penalty: a frozen copy of the policy at the start of training."""

import copy

from accelerate import Accelerator
from transformers import PreTrainedModel
from trl.models import prepare_deepspeed, prepare_fsdp


def copy_frozen(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Return a frozen copy of `model`, with all changes that were made to it.

    The copy is prepared as the policy is: on its device, in its number format, and sharded if the policy is sharded.
    """
    frozen = copy.deepcopy(model).eval()
    frozen.requires_grad_(False)
    kind = str(accelerator.distributed_type.value)
    if kind == "DEEPSPEED":
        return prepare_deepspeed(frozen, accelerator)
    if kind == "FSDP":
        return prepare_fsdp(frozen, accelerator)
    return accelerator.prepare_model(frozen, evaluation_mode=True)
