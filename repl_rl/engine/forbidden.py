"""Ids that a policy never samples: their probability is 0, in the sampler and in the trainer.

The renderer decides which ids these are (`Renderer.forbidden_ids`). This module replaces their logits by a number so
low that its exponential is exactly 0. So log probabilities, entropy and gradients are everywhere those of the same
renormalized policy.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from repl_rl.engine.logits import CAP
from repl_rl.errors import ConfigError

LOGIT = -1e30
"""Logit of a forbidden id. It is finite, because 0 times -inf would make the entropy NaN."""


def silence(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return `logits` (..., V) with those of `ids` set, in place, so low that their probability is 0."""
    return logits.index_fill_(-1, ids, max(LOGIT, torch.finfo(logits.dtype).min))


def present(ids: Iterable[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return those of `ids` that are in a vocabulary of this size, as an index."""
    return torch.tensor(sorted(i for i in ids if i < vocabulary), dtype=torch.long, device=device)


def forbid(model: PreTrainedModel, ids: frozenset[int]) -> None:
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
    head = refuse_unforbiddable(model)
    bias = torch.zeros(head.weight.size(0), dtype=head.weight.dtype, device=head.weight.device)
    # A layer without a bias has a parameter `bias` that is None; a buffer of that name would clash with it.
    head._parameters.pop("bias", None)
    head.register_buffer("bias", silence(bias, present(ids, len(bias), bias.device)), persistent=False)


def refuse_unforbiddable(model: PreTrainedModel) -> nn.Linear:
    """Return the output layer of `model`, if ids can be forbidden there.

    Raises:
        ConfigError: logits are capped after it, or it is not a plain layer, or it has a bias.
    """
    head = model.get_output_embeddings()
    capped = getattr(model.config.get_text_config(), CAP, None)
    if capped is not None:
        remedy = "a capped logit cannot be forbidden; use --overshoot carry"
        raise ConfigError(f"overshoot forbid with a model that sets {CAP}", capped, remedy)
    if not isinstance(head, nn.Linear) or head._parameters.get("bias") is not None:
        layer = type(head).__name__
        remedy = "it takes a plain layer without a bias; use --overshoot carry"
        raise ConfigError("overshoot forbid with an output layer", layer, remedy)
    return head
