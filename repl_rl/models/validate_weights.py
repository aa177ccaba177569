"""Check of a model's config against its weight files, before memory is taken for what the config claims."""

import json
from collections.abc import Mapping
from pathlib import Path

import transformers

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "block_count")
_SPARE = 1 << 26
"""Allowance for values that are in no weight file, such as computed buffers: 2^26 values, 256 MiB in float32."""


class ClaimError(ValueError):
    """A config claims more than the weight files hold. The message completes a sentence about the model."""


def validate_layer_count(claims: Mapping[str, object], tensors: int) -> None:
    """Check that the numbers of layers in a config are at most the number of tensors, since each layer has one.

    Raises:
        ClaimError: it claims more layers.
    """
    for key, value in claims.items():
        if key.rpartition(".")[2] in _LAYERS and isinstance(value, int) and value > tensors:
            raise ClaimError(f"its config claims {value} layers, and its files hold {tensors} weights")
        if isinstance(value, Mapping):
            validate_layer_count(value, tensors)


def build_skeleton(config: "transformers.PretrainedConfig", value_count: int) -> "transformers.PreTrainedModel":
    """Return the model of `config` without memory for its weights.

    Raises:
        ClaimError: it has more than twice `value_count` values, so that memory stays in proportion to the files.
    """
    # Import here, because it takes seconds and a conversion happens once.
    import torch

    with torch.device("meta"):
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    claimed_count = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if claimed_count > 2 * value_count + _SPARE:
        raise ClaimError(
            f"weights are missing or of another shape than it says: its config claims {claimed_count} values, "
            f"and its files hold at most {value_count}"
        )
    return model


def load_validated_config(folder: Path) -> "transformers.PretrainedConfig":
    """Return the config of the model in `folder`, checked against its safetensors files.

    Raises:
        ClaimError: it claims more than they hold.
        Exception: transformers cannot read it.
    """
    # Import here, because it takes seconds and a merge happens once.
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    tensors = 0
    for file in files:
        with safe_open(file, "pt") as tensor_file:
            tensors += len(tensor_file.keys())
    claims = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    validate_layer_count(claims if isinstance(claims, dict) else {}, tensors)
    config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # A stranger's config may name kernels, which transformers would download from the hub.
    config._attn_implementation = config._experts_implementation = None
    # A value of quantized weights may take less than a byte.
    build_skeleton(config, 2 * sum(file.stat().st_size for file in files))
    return config
