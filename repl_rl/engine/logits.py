"""How a model's logits come of its output layer. Engine and trainer apply that layer themselves, to few positions, so
what the model does after it must be done here too."""

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
"""Names under which configurations have a factor of the logits -> the factor."""
_MULTIPLIED = frozenset({"hyperclovax", "hyperclovax_vision_v2"})
"""Models that multiply by `logits_scaling`, which all others divide by."""


@dataclass(frozen=True, slots=True)
class Logits:
    """What is done to the product of hidden state and output layer: times `scale`, then bent to (-cap, cap)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Logits":
        """What a model so configured does.

        Raises:
            ConfigError: a factor is no number.
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
        """`product` of hidden states and output layer, of any shape, as logits."""
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


def attention(kind: type[PreTrainedModel], config: PretrainedConfig) -> str:
    """The fastest implementation of attention that computes what a model of `kind`, so configured, means.

    Fused ones ignore that attention weights are capped (Gemma 2). What config.json says of it is not asked: it may name
    kernels to download.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "sdpa" if kind._supports_sdpa and not capped else "eager"
