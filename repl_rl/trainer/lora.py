"""LoRA adapters (PEFT): few weights are trained, and the sampler and the final folder get merged weights."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.origin.hub import named


def adapted(model: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """Return `model` with adapters of this rank; all other weights are frozen.

    Every linear layer gets an adapter, except the output layer and those of `find_untrained`. Adapters are drawn from
    `seed`, change nothing before the first step, and are scaled by 2. Saved adapters name their base model: its name
    on the hub with the commit, or else its folder.
    """
    # Imported here, because the import takes seconds and PEFT is optional.
    from peft import LoraConfig, get_peft_model

    # The forked generator leaves the random numbers of the run as they are.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        chosen = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=find_untrained(model) or None
        )
        made = get_peft_model(model, chosen)
    config = made.peft_config["default"]
    folder = Path(model.name_or_path) if model.name_or_path else None
    if folder is not None and folder.is_dir():
        of_hub = named(folder)
        config.base_model_name_or_path = of_hub.name if of_hub else str(folder.resolve())
        config.revision = of_hub.revision if of_hub else None
    return made


def find_untrained(model: PreTrainedModel) -> list[str]:
    """Find the output layers of Mamba mixers; PEFT refuses them, because fused kernels read only their weight."""
    parts = ("A_log", "D", "conv1d", "out_proj")
    return [f"{name}.out_proj" for name, mixer in model.named_modules() if all(hasattr(mixer, part) for part in parts)]


@torch.no_grad()
def merged(state: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return `state` of `model` with adapters merged, under the names of the bare model; without adapters, `state`.

    The weights of `model` stay as they are. Merging in place and unmerging would add rounding errors at each step.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    if not layers:
        return state
    whole = {}
    for name, weight in state.items():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            # A new tensor, so that the layer keeps its own weight.
            weight = weight + layer.get_delta_weight("default").to(weight)
        whole[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = weight
    return whole


def whole(model: PreTrainedModel, folder: Path, main: bool) -> PreTrainedModel:
    """Return the model with merged adapters, after `main` has written the adapters alone to `folder`, as PEFT does."""
    model.save_pretrained(str(folder), is_main_process=main)
    return model.merge_and_unload()
