"""Dropout and router noise of a model, which are turned off for training.

The sampler computes without them. With them, the trainer's log probabilities would be those of another policy.
"""

from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from repl_rl.errors import ConfigError

_RANDOM = ("drop", "jitter")
"""Substrings of dropout and noise setting names: attention_dropout, resid_pdrop, layerdrop, router_jitter_noise, ..."""

_ROUTING = {"phimoe": "router_jitter_noise"}
"""Setting that makes the router draw experts at random in training, by model type. These models read the setting in
sampling too."""


def validate_deterministic_model(config: PretrainedConfig) -> None:
    """Reject a model that draws at random in training, if its sampling depends on the same setting.

    Raises:
        ConfigError: the model draws experts at random.
    """
    for part in _iterate_configs(config):
        field = _ROUTING.get(part.model_type, "")
        if field and (value := getattr(part, field, 0.0)):
            reason = f"{part.model_type} draws experts at random in training by it, and samples by it too"
            raise ConfigError(field, value, f"{reason}, so trainer and sampler are two policies; train another model")


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every random probability of `model` in training to 0, in its modules and its configuration.

    Raises:
        ConfigError: as `validate_deterministic_model`.
    """
    validate_deterministic_model(model.config)
    configs: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        # All kinds of dropout layers share this base class.
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _clear_random_fields(module)
        for config in _iterate_configs(getattr(module, "config", None)):
            # Modules share configurations, so collect each one once.
            configs[id(config)] = config
    for config in configs.values():
        _clear_random_fields(config)


def _clear_random_fields(target: nn.Module | PretrainedConfig) -> None:
    for name, value in list(vars(target).items()):
        # A count or a flag, such as ESM's token_dropout, is not a probability.
        if isinstance(value, float) and value and any(part in name for part in _RANDOM):
            setattr(target, name, 0.0)


def _iterate_configs(config: object) -> Iterator[PretrainedConfig]:
    """Yield a configuration and all configurations inside it."""
    if isinstance(config, PretrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _iterate_configs(value)
