"""Comparison of tree attention (prefix sharing) with plain rows: log probabilities and gradients of one model.

Both are computed in the number format that the model uses. The tolerance comes from plain rows: one row per pass is
compared with several rows per pass. In bfloat16 this tolerance means little. Passes with the same kernels round alike,
and a tree rounds differently, so rounding can hide a mistake. A model with float32 weights is therefore compared in
float32 as well.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from repl_rl.trainer.paths import Ids, Tree

TIMES = 5.0
"""Largest allowed ratio of the distance between trees and rows to the distance between rows and rows."""
FLOORS = {torch.float16: (0.04, 0.01), torch.bfloat16: (0.3, 0.05)}
FLOOR = (1e-4, 1e-4)
"""Distances that are always allowed, per number format: log probability in nats, and gradient relative to its norm.

In float32, the smallest distance seen with an unsuitable model is 3e-4 nats. Both limits are equal there. A logit error
of d changes 1 - p, for a probability p, by a relative d, and with it the gradient.

In bfloat16, tokens of which the bundled policy is sure differ by up to 0.3 nats between any two ways to compute them
(docs/gpu.md: sampler and trainer). float16 has three more binary digits. A tree's gradient is rounded once, and the
gradients of rows are rounded once each. So the two gradients differ by a hundredth in bfloat16 without a mistake.
"""
_WATCHED = 2**24
"""Largest number of weights whose gradients are compared; the smallest tensors of all layers come first."""
FORBIDDEN = -1e20
"""Log probabilities below this one, in nats, belong to ids that are never sampled; their rounding is irrelevant."""

Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of a tree, and of several rows per pass, from one row per pass."""

    thing: str
    """Quantity that is compared, a log probability or a gradient, as the start of a message."""
    trees: float
    """Distance of the tree from one row per pass."""
    rows: float
    """Distance of several rows per pass from one row per pass."""
    floor: float
    """Distance that is always allowed."""

    @property
    def allowed(self) -> float:
        """Largest allowed distance of the tree."""
        return max(self.floor, TIMES * self.rows)

    @property
    def wrong(self) -> str | None:
        """Error message if the tree is further away than allowed, or None."""
        if self.trees <= self.allowed:
            return None
        return f"{self.thing} {self.trees:.2g} differently with them (tolerance {self.allowed:.2g})"


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows that go through a model in one pass."""

    ids: Tensor
    marks: Tensor
    positions: Tensor | None
    tree: Tree | None
    which: Tensor
    """(N,), index of each scored token of the rows, row by row, in the model's output."""

    @classmethod
    def of(cls, rows: Sequence[Ids], scored: Sequence[Tensor], device: torch.device) -> "_Call":
        """Build a pass over plain rows, padded on the right."""
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        marks = pad_sequence(list(scored), batch_first=True).to(device)
        return cls(ids, marks, None, None, torch.arange(int(marks.sum()), device=device))

    @classmethod
    def branched(cls, rows: Sequence[Ids], scored: Sequence[Tensor], device: torch.device) -> "_Call":
        """Build a pass over the tree of the rows."""
        tree = Tree.of(rows, device)
        marks, which = tree.marked(scored)
        return cls(tree.ids, marks, tree.positions, tree, which)


def compare(
    model: PreTrainedModel, rows: Sequence[Ids], scored: Sequence[Tensor], autocast: Autocast = nullcontext
) -> list[Distance]:
    """Return the distances of log probabilities and gradients between a tree of `rows` and the rows themselves.

    Args:
        model: the model after `install`, not wrapped.
        rows: rows of at least two tokens.
        scored: one (tokens,) bool tensor on the CPU per row, True at scored tokens; never True at the first one.
    """
    here = model.device
    # One row per pass is the reference for both other layouts.
    one_a_pass = [_Call.of([row], [marks], here) for row, marks in zip(rows, scored, strict=True)]
    single, gradient = _taken(model, one_a_pass, autocast)
    several, of_several = _taken(model, [_Call.of(rows, scored, here)], autocast)
    shared, of_shared = _taken(model, [_Call.branched(rows, scored, here)], autocast)
    size = max(float(gradient.norm()), 1e-30)
    of_trees, of_rows = (float((one - gradient).norm()) / size for one in (of_shared, of_several))
    of_gradient = Distance("its gradient is", of_trees, of_rows, floors(model, autocast)[1])
    return [nats(single, shared, several, floors(model, autocast)[0]), of_gradient]


def _taken(model: PreTrainedModel, calls: Sequence[_Call], autocast: Autocast) -> tuple[Tensor, Tensor]:
    """Return log probabilities, (N,), nats, and the gradient of their weighted sum for some of the model's weights.

    The model keeps no gradients. It is called without its wrapper, which would wait for the gradients of its weights.
    """
    weights = _watched(model)
    logprobs: list[Tensor] = []
    total = torch.zeros(sum(weight.numel() for weight in weights), device=model.device)
    every = sum(len(call.which) for call in calls)
    # All shares are positive. With both signs, equal rows would cancel out and leave only rounding.
    shares = torch.linspace(1, 2, every, device=model.device)
    for call in calls:
        with torch.enable_grad():
            with autocast():
                told, _ = model(input_ids=call.ids, sampled=call.marks, position_ids=call.positions, tree=call.tree)
            mine = told.float()[call.which]
            begun = sum(len(one) for one in logprobs)
            loss = (mine * shares[begun : begun + len(mine)]).sum()
        logprobs.append(mine.detach())
        if weights:
            found = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            total += torch.cat([one.float().flatten() for one in found])
    return torch.cat(logprobs), total


def _watched(model: PreTrainedModel) -> list[Tensor]:
    """Return the trained tensors whose gradients are compared: the smallest ones, and at least one."""
    trained = sorted(
        (weight for weight in model.parameters() if weight.requires_grad), key=lambda weight: weight.numel()
    )
    sizes = accumulate(weight.numel() for weight in trained)
    return [weight for weight, size in zip(trained, sizes, strict=True) if size <= _WATCHED or weight is trained[0]]


def nats(single: Tensor, shared: Tensor, several: Tensor, floor: float) -> Distance:
    """Return the distances of trees (`shared`) and of `several` rows per pass from one row per pass (`single`), nats.

    `floor` is the first value of `floors`.
    """
    # Ids that are never sampled are left out.
    told = single > FORBIDDEN
    of_trees, of_rows = (float((one - single)[told].abs().max()) if told.any() else 0.0 for one in (shared, several))
    return Distance("it scores a token, in nats,", of_trees, of_rows, floor)


def floors(model: PreTrainedModel, autocast: Autocast) -> tuple[float, float]:
    """Return the distances that are always allowed in the current number format: nats, and relative gradient."""
    return FLOORS.get(lowered(model, autocast), FLOOR)


def lowered(model: PreTrainedModel, autocast: Autocast) -> torch.dtype:
    """Return the number format of the computation: that of autocast, or else that of the weights."""
    with autocast():
        kind = model.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
