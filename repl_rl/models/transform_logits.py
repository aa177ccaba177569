"""Output layer of a model: operations on its logits, and ids that a policy never samples.

Engine and trainer apply the output layer themselves, to few positions. So `LogitsTransform` repeats the operations that
the model applies after that layer.

The renderer decides which ids are forbidden (`Renderer.forbidden_ids`). Their probability is 0, in the sampler and in
the trainer: their logits are replaced by a number so low that its exponential is exactly 0. So log probabilities,
entropy and gradients are everywhere those of the same renormalized policy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from repl_rl.errors import ConfigError

CAP = "final_logit_softcapping"
"""Name of the cap of the logits in configurations."""
_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda given: given,
    "output_multiplier": lambda given: given,
    "lm_head_multiplier": lambda given: given,
    "logits_scaling": lambda given: 1 / given,
}
"""Names of a factor of the logits in configurations, with a function from the configured value to the factor."""
_MULTIPLIED = frozenset({"hyperclovax", "hyperclovax_vision_v2"})
"""Models that multiply by `logits_scaling`; all others divide by it."""
LOGIT = -1e30
"""Logit of a forbidden id. It is finite, because 0 times -inf would make the entropy NaN."""


@dataclass(frozen=True, slots=True)
class LogitsTransform:
    """Operations on the product of hidden state and output layer: a factor `scale`, then a soft cap to (-cap, cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> "LogitsTransform":
        """Return the operations of a model with this configuration.

        Raises:
            ConfigError: a factor is not a number, or is 0.
        """
        text = config.get_text_config()
        scale = 1.0
        for name, factor in _SCALES.items():
            value = getattr(text, name, None)
            # Most models have none of these factors.
            if value is None:
                continue
            if not isinstance(value, int | float) or not value:
                raise ConfigError(name, value, "only a number other than 0 is understood; choose another model")
            scale *= value if text.model_type in _MULTIPLIED else factor(value)
        cap = getattr(text, CAP, None)
        return cls(scale, None if cap is None else float(cap))

    def __call__(self, product: Tensor) -> Tensor:
        """Return the logits for `product`, the product of hidden states and output layer, of any shape."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


def forbid_ids(model: PreTrainedModel, ids: frozenset[int]) -> None:
    """Give `ids`, and only them, probability 0 in every later forward pass of `model`. Does nothing without ids.

    The output layer gets a fixed bias. A hook would not work: fused losses, ours and TRL's, read weight and bias of the
    output layer and never call it.

    The bias is neither a parameter nor part of the state_dict. So it gets no gradient, no optimizer sees it, and no
    checkpoint holds it. The gradient of a forbidden logit is exactly 0.

    Raises:
        ConfigError: logits are capped after the output layer, or that layer is not plain or has a bias.
    """
    if not ids:
        return
    head = get_maskable_output_layer(model)
    bias = torch.zeros(head.weight.size(0), dtype=head.weight.dtype, device=head.weight.device)
    # A layer without a bias has a parameter `bias` that is None; a buffer of that name would clash with it.
    head._parameters.pop("bias", None)
    head.register_buffer("bias", mask_logits(bias, select_existing_ids(ids, len(bias), bias.device)), persistent=False)


def get_maskable_output_layer(model: PreTrainedModel) -> nn.Linear:
    """Return the output layer of `model`, if ids can be forbidden there.

    Raises:
        ConfigError: logits are capped after it, or it is not a plain layer, or it has a bias.
    """
    head = model.get_output_embeddings()
    # A cap would raise the logit of a forbidden id to `-cap`.
    cap = getattr(model.config.get_text_config(), CAP, None)
    if cap is not None:
        remedy = "a capped logit cannot be forbidden; use --newline-tokens carry"
        raise ConfigError(f"newline_tokens forbid with a model that sets {CAP}", cap, remedy)
    # The bias of the forbidden ids needs the place of the layer's own bias.
    if not isinstance(head, nn.Linear) or head._parameters.get("bias") is not None:
        layer = type(head).__name__
        remedy = "forbid needs an output layer of class nn.Linear without a bias; use --newline-tokens carry"
        raise ConfigError("newline_tokens forbid with an output layer", layer, remedy)
    return head


def mask_logits(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return `logits` (..., V) with those of `ids` set, in place, so low that their probability is 0."""
    return logits.index_fill_(-1, ids, max(LOGIT, torch.finfo(logits.dtype).min))


def select_existing_ids(ids: Iterable[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return those of `ids` that are in a vocabulary of this size, as an index."""
    return torch.tensor(sorted(i for i in ids if i < vocabulary), dtype=torch.long, device=device)


def choose_attention(model_class: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """Return the fastest implementation of attention that computes the attention of this model correctly.

    Fused implementations ignore a cap of attention weights (Gemma 2). The choice in config.json is ignored, since it
    may name kernels to download.
    """
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if model_class._supports_sdpa and not has_cap else "eager"
