"""Computation of logits after a model's output layer.

Engine and trainer apply the output layer themselves, to few positions. So the operations that the model applies after
that layer must be repeated here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from repl_rl.errors import ConfigError

CAP = "final_logit_softcapping"
_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda given: given,
    "output_multiplier": lambda given: given,
    "lm_head_multiplier": lambda given: given,
    "logits_scaling": lambda given: 1 / given,
}
"""Names of a factor of the logits in configurations, with a function from the configured value to the factor."""
_MULTIPLIED = frozenset({"hyperclovax", "hyperclovax_vision_v2"})
"""Models that multiply by `logits_scaling`; all others divide by it."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Operations on the product of hidden state and output layer: a factor `scale`, then a soft cap to (-cap, cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Logits":
        """Return the operations of a model with this configuration.

        Raises:
            ConfigError: a factor is not a number, or is 0.
        """
        text = config.get_text_config()
        scale = 1.0
        for name, factor in _SCALES.items():
            given = getattr(text, name, None)
            if given is None:
                continue
            if not isinstance(given, int | float) or not given:
                raise ConfigError(name, given, "only a number other than 0 is understood; choose another model")
            scale *= given if text.model_type in _MULTIPLIED else factor(given)
        cap = getattr(text, CAP, None)
        return cls(scale, None if cap is None else float(cap))

    def __call__(self, product: Tensor) -> Tensor:
        """Return the logits for `product`, the product of hidden states and output layer, of any shape."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


def attention(kind: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """Return the fastest implementation of attention that computes the attention of this model correctly.

    Fused implementations ignore a cap of attention weights (Gemma 2). The choice in config.json is ignored, since it
    may name kernels to download.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if kind._supports_sdpa and not capped else "eager"
