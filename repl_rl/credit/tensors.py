"""Conversion of lines to padded tensors, which happens only here.

`trajectory.spread` expands lines to tokens. Here its rows are padded to one length. Suffixes: `_B` has one row per
rollout, `_T` one column per completion token, padded on the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repl_rl.errors import InvariantError
from repl_rl.record.trajectory import Trajectory, spread


@dataclass(frozen=True, slots=True)
class Columns:
    """Token lists of a batch, one row per rollout, in the form of TRL's rollout hook."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    """Sampled log probabilities, nats. Observed tokens have the placeholder 0.0, which the mask removes."""
    mask: list[list[int]]
    """1 if the policy sampled the token and may learn from it, otherwise 0."""

    def __post_init__(self) -> None:
        rows = {len(rows) for rows in (self.prompt_ids, self.completion_ids, self.logprobs, self.mask)}
        if len(rows) > 1:
            raise InvariantError(f"columns of a batch have {sorted(rows)} rows; give a row a rollout in each")
        for b, ids in enumerate(self.completion_ids):
            if not len(ids) == len(self.logprobs[b]) == len(self.mask[b]):
                counts = f"{len(ids)} ids, {len(self.logprobs[b])} log probabilities and a mask of {len(self.mask[b])}"
                raise InvariantError(f"row {b} of a batch has {counts}; give one of each per token")


def columns(trajectories: Sequence[Trajectory], pad_id: int) -> Columns:
    """Return the token lists of a batch. A rollout that may not be trained on is a single masked padding token."""
    return Columns(
        [list(t.prompt.token_ids) for t in trajectories],
        [list(t.completion_ids) if t.trainable else [pad_id] for t in trajectories],
        [list(t.logprobs_T()) if t.trainable else [0.0] for t in trajectories],
        [[int(sampled) for sampled in t.loss_mask] if t.trainable else [0] for t in trajectories],
    )


def widen(values_B_L: Sequence[Sequence[float]], trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Expand one value per line to one value per token: float32, shape (B, T) with T = `width`.

    Observations and padding are 0.

    Raises:
        InvariantError: the values do not match the lines, or a completion is longer than `width`.
    """
    rows = [spread(values_L, t) for values_L, t in zip(values_B_L, trajectories, strict=True)]
    return _padded(rows, trajectories, width, 0.0, torch.float32)


def line_numbers(trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return the index of each token's line: int64, shape (B, T); -1 at observations and padding."""
    rows = [spread(range(len(t.lines)), t, observed=-1) for t in trajectories]
    return _padded(rows, trajectories, width, -1, torch.int64)


def policy_steps(trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return the policy step that sampled each token: int64, shape (B, T); -1 at observations and padding."""
    rows = [spread([line.policy_step for line in t.lines], t, observed=-1) for t in trajectories]
    return _padded(rows, trajectories, width, -1, torch.int64)


def _padded(
    rows: Sequence[Sequence[float]], trajectories: Sequence[Trajectory], width: int, fill: float, dtype: torch.dtype
) -> Tensor:
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for b, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        # A rollout that may not be trained on keeps the fill value.
        if not trajectory.trainable:
            continue
        if len(row) > width:
            raise InvariantError(f"trajectory {trajectory.id} has {len(row)} tokens, the batch is {width} wide")
        out[b, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
