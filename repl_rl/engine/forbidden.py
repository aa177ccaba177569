"""Ids that a policy never samples: their probability is 0, in the sampler and in the trainer alike.

Which ids these are is the renderer's to say (`Renderer.forbidden_ids`). Here is how they are forbidden: their logits
are replaced by a number so low that its exponential is exactly 0. Log probabilities, entropy and gradients are then
those of one renormalised policy wherever they are computed.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from repl_rl.engine.logits import CAP
from repl_rl.errors import ConfigError

LOGIT = -1e30
"""Logit of a forbidden id. Finite: 0 times it is 0, and the entropy stays a number, where -inf would make it NaN."""


def silence(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`logits` (..., V), in place, with those of `ids` so low that their probability is 0."""
    return logits.index_fill_(-1, ids, max(LOGIT, torch.finfo(logits.dtype).min))


def present(ids: Iterable[int], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Those of `ids` that a model of so many ids has at all, as an index."""
    return torch.tensor(sorted(i for i in ids if i < vocabulary), dtype=torch.long, device=device)


def forbid(model: PreTrainedModel, ids: frozenset[int]) -> None:
    """Give `ids`, and only them, probability 0 from now on, in every forward pass of `model`; none: nothing is done.

    The output layer gets a fixed bias. A hook would not do: fused losses, ours and TRL's, read weight and bias of the
    output layer and never call it. The bias is no parameter and no part of the state: it takes no gradient, no
    optimizer sees it, and no checkpoint holds it. The gradient of a forbidden logit is exactly 0.

    Raises:
        ConfigError: logits are capped after the output layer, or that is no plain layer without a bias.
    """
    if not ids:
        return
    head = refuse_unforbiddable(model)
    bias = torch.zeros(head.weight.size(0), dtype=head.weight.dtype, device=head.weight.device)
    head._parameters.pop("bias", None)
    head.register_buffer("bias", silence(bias, present(ids, len(bias), bias.device)), persistent=False)


def refuse_unforbiddable(model: PreTrainedModel) -> nn.Linear:
    """The output layer of `model`, if ids can be forbidden there.

    Raises:
        ConfigError: logits are capped after it, or it is no plain layer without a bias.
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
