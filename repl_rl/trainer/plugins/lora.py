"""LoRA adapters (PEFT): few weights are trained, and the sampler and the final folder get merged weights."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.models.hub import find_hub_name


def add_adapters(model: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """Return `model` with adapters of this rank; all other weights are frozen.

    Every linear layer gets an adapter, except the output layer and those of `find_untrained`. Adapters are drawn from
    `seed`, change nothing before the first step, and are scaled by 2. Saved adapters name their base model: its name
    on the hub with the commit, or else its folder.
    """
    from peft import LoraConfig, get_peft_model  # the import takes seconds, and PEFT is optional

    # The forked generator leaves the random numbers of the run as they are.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lora_config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=find_untrained(model) or None
        )
        adapted = get_peft_model(model, lora_config)
    config = adapted.peft_config["default"]
    folder = Path(model.name_or_path) if model.name_or_path else None
    if folder is not None and folder.is_dir():
        hub_name = find_hub_name(folder)
        config.base_model_name_or_path = hub_name.name if hub_name else str(folder.resolve())
        config.revision = hub_name.revision if hub_name else None
    return adapted


def find_untrained(model: PreTrainedModel) -> list[str]:
    """Find the output layers of Mamba mixers; PEFT refuses them, because fused kernels read only their weight."""
    attributes = ("A_log", "D", "conv1d", "out_proj")
    return [
        f"{name}.out_proj"
        for name, mixer in model.named_modules()
        if all(hasattr(mixer, attribute) for attribute in attributes)
    ]


@torch.no_grad()
def merge_adapter_state(state: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return `state` of `model` with adapters merged, under the names of the bare model; without adapters, `state`.

    The weights of `model` stay as they are. Merging in place and unmerging would add rounding errors at each step.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    if not layers:
        return state
    # Add each adapter's product to the weight below it, and drop PEFT's prefixes from the names.
    merged = {}
    for name, weight in state.items():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            # A new tensor, so that the layer keeps its own weight.
            weight = weight + layer.get_delta_weight("default").to(weight)
        merged[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = weight
    return merged


def merge_adapters(model: PreTrainedModel, folder: Path, main: bool) -> PreTrainedModel:
    """Return the model with merged adapters, after `main` has written the adapters alone to `folder`, as PEFT does."""
    model.save_pretrained(str(folder), is_main_process=main)
    return model.merge_and_unload()
