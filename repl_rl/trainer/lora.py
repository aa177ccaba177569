"""Low-rank adapters (PEFT's LoRA): few weights to train; sampler and final folder get whole weights all the same."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.errors import ConfigError
from repl_rl.origin.hub import named


def require_peft(rank: int, found: Callable[[str], object] = find_spec) -> None:
    """Refuse adapters where PEFT is not installed.

    Raises:
        ConfigError: it is not.
    """
    if found("peft") is None:
        raise ConfigError("lora_rank", rank, "it needs the package peft: pip install 'repl_rl[lora]', or set it to 0")


def adapted(model: PreTrainedModel, rank: int, seed: int) -> PreTrainedModel:
    """`model` with adapters of this rank on every linear layer but the output and those of `find_untrained`. All
    else is frozen.

    They are drawn from `seed`, change nothing before the first step, and are scaled by 2. What they are saved as names
    their base: the model of the hub with its commit, or else its folder.
    """
    # imported here: it takes seconds, and is not always installed
    from peft import LoraConfig, get_peft_model

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
    """Find the output layers of Mamba mixers: fused kernels multiply by their weight alone, so PEFT refuses them."""
    parts = ("A_log", "D", "conv1d", "out_proj")
    return [f"{name}.out_proj" for name, mixer in model.named_modules() if all(hasattr(mixer, part) for part in parts)]


@torch.no_grad()
def merged(state: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """`state` of `model` as that of a model without adapters; `state` itself if it has none.

    The weights of `model` are left as they are: merging and taking back would wear them out by rounding, step by step.
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
            weight = weight + layer.get_delta_weight("default").to(weight)
        whole[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = weight
    return whole


def whole(model: PreTrainedModel, folder: Path, main: bool) -> PreTrainedModel:
    """The model with its adapters merged into its weights, after `main` wrote them alone to `folder`, as PEFT does."""
    model.save_pretrained(str(folder), is_main_process=main)
    return model.merge_and_unload()
