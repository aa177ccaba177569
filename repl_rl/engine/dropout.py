"""Dropout and router noise of a model, turned off for training.

The sampler computes without them. With them the trainer's log probabilities would be those of another policy.
"""

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

_RANDOM = ("drop", "jitter")
"""What names of such shares have in them: attention_dropout, resid_pdrop, layerdrop, router_jitter_noise, ..."""


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every share of `model` that is drawn at random in training to 0, in its modules and its configuration."""
    configs: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _clear(module)
        for config in _configs(getattr(module, "config", None)):
            configs[id(config)] = config
    for config in configs.values():
        _clear(config)


def _clear(holder: nn.Module | PretrainedConfig) -> None:
    for name, value in list(vars(holder).items()):
        # A count or a flag, such as ESM's token_dropout, is no share.
        if isinstance(value, float) and value and any(part in name for part in _RANDOM):
            setattr(holder, name, 0.0)


def _configs(found: object) -> Iterator[PretrainedConfig]:
    """A configuration and all that are in it."""
    if isinstance(found, PretrainedConfig):
        yield found
        for value in vars(found).values():
            yield from _configs(value)
