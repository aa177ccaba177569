"""The policy that training began with, to which the KL term holds the one that is trained."""

import copy

from accelerate import Accelerator
from transformers import PreTrainedModel
from trl.models import prepare_deepspeed, prepare_fsdp


def frozen(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """A copy of `model` as it is, with all that was done to it, which nothing changes any more.

    It is where the policy will be: on its device, in its number format, sharded if that is.
    """
    made = copy.deepcopy(model).eval()
    made.requires_grad_(False)
    kind = str(accelerator.distributed_type.value)
    if kind == "DEEPSPEED":
        return prepare_deepspeed(made, accelerator)
    if kind == "FSDP":
        return prepare_fsdp(made, accelerator)
    return accelerator.prepare_model(made, evaluation_mode=True)
