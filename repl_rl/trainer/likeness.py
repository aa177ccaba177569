"""How far trees are from rows: log probabilities and gradients of one model, in the number format that it computes in.

What may be between them is taken from rows against rows: one a pass against several in one. In bfloat16 that says
little: two passes that take the same kernels round alike, and a tree rounds otherwise, which hides whether it is right.
So a model whose weights are float32 is tried in float32 as well, where nothing hides.
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
"""Trees may be so many times as far from rows as rows are from rows."""
FLOORS = {torch.float16: (0.04, 0.01), torch.bfloat16: (0.3, 0.05)}
FLOOR = (1e-4, 1e-4)
"""And so far in any case, by number format: a log probability, nats; a gradient, relative to its length. In float32
what was seen of models that do not fit begins at 3e-4 nats. Both are alike there: a logit that is off by d moves what a
probability lacks of 1, and with it the gradient, by a share of d. In bfloat16 single tokens of the bundled policy, of
which it is sure, are up to 0.3 nats off between any two ways of computing them (docs/gpu.md: sampler and trainer);
float16 has three more digits. A tree's gradient is rounded once where those of rows are once each, so in bfloat16 it is
a hundredth off where nothing is wrong."""
_WATCHED = 2**24
"""Weights whose gradients are compared, at most: the smallest tensors first, of all layers."""
FORBIDDEN = -1e20
"""Log probabilities below are those of ids that are never sampled, nats: their rounding says nothing."""

Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far trees are from rows one a pass."""

    thing: str
    """What is apart: a log probability, a gradient."""
    trees: float
    """Its distance."""
    rows: float
    """That of several rows a pass from one a pass."""
    floor: float
    """A distance that is always allowed."""

    @property
    def allowed(self) -> float:
        """The largest distance that is."""
        return max(self.floor, TIMES * self.rows)

    @property
    def wrong(self) -> str | None:
        """What there is to say against trees; None: nothing."""
        if self.trees <= self.allowed:
            return None
        return f"{self.thing} {self.trees:.2g} differently with them (tolerance {self.allowed:.2g})"


@dataclass(frozen=True, slots=True)
class _Call:
    """Rows that pass through a model together."""

    ids: Tensor
    marks: Tensor
    positions: Tensor | None
    tree: Tree | None
    which: Tensor
    """(N,), of the scored tokens of its rows, row by row: its number among those that the model gives."""

    @classmethod
    def of(cls, rows: Sequence[Ids], scored: Sequence[Tensor], device: torch.device) -> "_Call":
        """Rows as they are, padded on the right."""
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
        marks = pad_sequence(list(scored), batch_first=True).to(device)
        return cls(ids, marks, None, None, torch.arange(int(marks.sum()), device=device))

    @classmethod
    def branched(cls, rows: Sequence[Ids], scored: Sequence[Tensor], device: torch.device) -> "_Call":
        """Their tree."""
        tree = Tree.of(rows, device)
        marks, which = tree.marked(scored)
        return cls(tree.ids, marks, tree.positions, tree, which)


def compare(
    model: PreTrainedModel, rows: Sequence[Ids], scored: Sequence[Tensor], autocast: Autocast = nullcontext
) -> list[Distance]:
    """How far log probabilities and gradients of a tree of `rows` are from those of the rows.

    Args:
        model: after `install`, and not wrapped.
        rows: of at least two tokens.
        scored: which of their tokens, (tokens,) bool on the CPU, a tensor a row; never the first.
    """
    here = model.device
    one_a_pass = [_Call.of([row], [marks], here) for row, marks in zip(rows, scored, strict=True)]
    single, gradient = _taken(model, one_a_pass, autocast)
    several, of_several = _taken(model, [_Call.of(rows, scored, here)], autocast)
    shared, of_shared = _taken(model, [_Call.branched(rows, scored, here)], autocast)
    size = max(float(gradient.norm()), 1e-30)
    of_trees, of_rows = (float((one - gradient).norm()) / size for one in (of_shared, of_several))
    of_gradient = Distance("its gradient is", of_trees, of_rows, floors(model, autocast)[1])
    return [nats(single, shared, several, floors(model, autocast)[0]), of_gradient]


def _taken(model: PreTrainedModel, calls: Sequence[_Call], autocast: Autocast) -> tuple[Tensor, Tensor]:
    """Log probabilities, (N,), nats, and the gradient of a sum of them with different weights; of some of the weights.

    Nothing is left behind in the model. A wrapper would wait for the gradients of its weights, so it sees none of this.
    """
    weights = _watched(model)
    logprobs: list[Tensor] = []
    total = torch.zeros(sum(weight.numel() for weight in weights), device=model.device)
    every = sum(len(call.which) for call in calls)
    # All above 0: what equal rows say would cancel out, and only rounding be left.
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
    trained = sorted(
        (weight for weight in model.parameters() if weight.requires_grad), key=lambda weight: weight.numel()
    )
    sizes = accumulate(weight.numel() for weight in trained)
    return [weight for weight, size in zip(trained, sizes, strict=True) if size <= _WATCHED or weight is trained[0]]


def nats(single: Tensor, shared: Tensor, several: Tensor, floor: float) -> Distance:
    """How far log probabilities of trees, `shared`, are from those of rows one a pass and from several a pass.

    `floor` is that of `floors`.
    """
    told = single > FORBIDDEN
    of_trees, of_rows = (float((one - single)[told].abs().max()) if told.any() else 0.0 for one in (shared, several))
    return Distance("it scores a token, in nats,", of_trees, of_rows, floor)


def floors(model: PreTrainedModel, autocast: Autocast) -> tuple[float, float]:
    """What is always allowed in the number format that is computed in: nats, and of a gradient."""
    return FLOORS.get(lowered(model, autocast), FLOOR)


def lowered(model: PreTrainedModel, autocast: Autocast) -> torch.dtype:
    """The number format that is computed in."""
    with autocast():
        kind = model.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else model.dtype
