"""Log probabilities of a step's rows: padded tensors of their tokens, and a scorer in place of TRL's own passes.

Lines are converted to padded tensors only here. `trajectory.spread` expands lines to tokens, and rows are then padded
on the right to one length. Suffixes of names: `_B` has one row per rollout, `_L` one entry per line, `_T` one column
per completion token. `LogprobScorer` scores the rows of a step with the model call of `forward_pass`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.errors import InvariantError
from repl_rl.trainer.forward_pass import (
    BatchLayout,
    ForwardPass,
    ScoringModel,
    TokenScores,
    build_row_passes,
    can_pack_rows,
    compute_logprobs,
    install_scoring_forward,
)
from repl_rl.trainer.prefix_tree import PrefixTree
from repl_rl.trajectory.trajectory import Trajectory, spread
from repl_rl.utils.hardware import retain_freed_memory


@dataclass(frozen=True, slots=True)
class TokenColumns:
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
            raise InvariantError(f"columns of a batch have {sorted(rows)} rows; give one row per rollout in each")
        for b, ids in enumerate(self.completion_ids):
            if not len(ids) == len(self.logprobs[b]) == len(self.mask[b]):
                counts = f"{len(ids)} ids, {len(self.logprobs[b])} log probabilities and a mask of {len(self.mask[b])}"
                raise InvariantError(f"row {b} of a batch has {counts}; give one of each per token")


def build_token_columns(trajectories: Sequence[Trajectory], pad_id: int) -> TokenColumns:
    """Return the token lists of a batch. A rollout that may not be trained on is a single masked padding token."""
    return TokenColumns(
        [list(t.prompt.token_ids) for t in trajectories],
        [list(t.completion_ids) if t.trainable else [pad_id] for t in trajectories],
        [list(t.logprobs_T()) if t.trainable else [0.0] for t in trajectories],
        [[int(sampled) for sampled in t.loss_mask] if t.trainable else [0] for t in trajectories],
    )


def broadcast_to_tokens(
    values_B_L: Sequence[Sequence[float]], trajectories: Sequence[Trajectory], width: int
) -> Tensor:
    """Expand one value per line to one value per token: float32, shape (B, T) with T = `width`.

    Observations and padding are 0.

    Raises:
        InvariantError: the values do not match the lines, or a completion is longer than `width`.
    """
    rows = [spread(values_L, t) for values_L, t in zip(values_B_L, trajectories, strict=True)]
    return _pad_rows(rows, trajectories, width, 0.0, torch.float32)


def build_line_numbers(trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return the index of each token's line: int64, shape (B, T); -1 at observations and padding."""
    rows = [spread(range(len(t.lines)), t, observed=-1) for t in trajectories]
    return _pad_rows(rows, trajectories, width, -1, torch.int64)


def build_policy_steps(trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return the policy step that sampled each token: int64, shape (B, T); -1 at observations and padding."""
    rows = [spread([line.policy_step for line in t.lines], t, observed=-1) for t in trajectories]
    return _pad_rows(rows, trajectories, width, -1, torch.int64)


def _pad_rows(
    rows: Sequence[Sequence[float]], trajectories: Sequence[Trajectory], width: int, fill: float, dtype: torch.dtype
) -> Tensor:
    """Return the rows as one tensor, padded on the right with `fill`.

    Raises:
        InvariantError: a row is longer than `width`.
    """
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for b, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        # A rollout that may not be trained on keeps the fill value.
        if not trajectory.trainable:
            continue
        if len(row) > width:
            raise InvariantError(f"trajectory {trajectory.id} has {len(row)} tokens, the batch is {width} wide")
        out[b, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


TOKENS_PER_PASS_CPU = 2048
"""Tokens per forward pass on CPU, about; rows of similar length share a pass. Small passes stay in cache."""
TOKENS_PER_PASS_GPU = 16384
"""Tokens per forward pass on a GPU, about."""


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Padded rollouts to score: all rows of a training step, or some. Both masks cover all rows of that step."""

    input_ids: Tensor
    """(b, S), prompts padded on the left, completions on the right; the rows of a whole step, or some of them."""
    attention: Tensor
    """(b, S), 1 at real tokens."""
    sampled_mask: Tensor
    """(B, T) bool for the whole step, True for sampled tokens."""
    learning_rows: Tensor
    """(B,) bool for the whole step, True for rows whose log probabilities the loss depends on."""


class LogprobScorer:
    """Scorer of batches: the first call of a step scores all rows, later calls only those that the loss depends on."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel | None = None,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        tokens_per_pass: int | None = None,
    ) -> None:
        """Patch `model` and `reference` so that they return scores alone.

        See `install_scoring_forward`, also for its errors.

        Args:
            reference: frozen reference model. None means that there is none, or that it is `model` without adapters.
            autocast: returns a context with the number format of a forward pass. Each pass gets a new context, because
                a context caches copies of weights, without gradients if its first pass has none.
            tokens_per_pass: approximate tokens per forward pass. None chooses by device.
        """
        install_scoring_forward(model)
        if reference is not None:
            install_scoring_forward(reference)
        self._packed = can_pack_rows(model)
        self._autocast = autocast
        self.tokens_per_pass = tokens_per_pass
        self._step_scores: TokenScores
        if model.device.type == "cpu":
            # The loss allocates and frees its tiles (see `forward_pass`) again and again.
            retain_freed_memory()

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return metrics of a subclass for the current step, over all processes; empty here."""
        return {}

    def score_step(self, model: ScoringModel, batch: ScoringBatch, keep_graph: bool) -> TokenScores:
        """Return the scores of a whole step. `keep_graph` keeps their autograd graph for the step's only update."""
        # Rows without effect on the loss need no graph. Scores of rows that are left out are 0, so a sum combines both.
        with torch.no_grad():
            other_scores = self._score_rows(model, batch, batch.sampled_mask, ~batch.learning_rows)
        with torch.set_grad_enabled(keep_graph):
            learning_scores = self._score_rows(model, batch, batch.sampled_mask, batch.learning_rows)
            self._step_scores = TokenScores(
                other_scores.logprobs + learning_scores.logprobs, other_scores.entropies + learning_scores.entropies
            )
        return TokenScores(self._step_scores.logprobs.detach(), self._step_scores.entropies)

    def rescore(self, model: ScoringModel, batch: ScoringBatch, rows: Tensor, with_graph: bool) -> TokenScores:
        """Return the scores of some rows of the same step. Set `with_graph` if the first pass kept its graph.

        Rows that the loss does not depend on keep the scores of the first pass, even after updates.
        """
        step_scores = TokenScores(self._step_scores.logprobs[rows], self._step_scores.entropies[rows])
        if with_graph:
            return step_scores
        learning = batch.learning_rows[rows]
        fresh = self._score_rows(model, batch, batch.sampled_mask[rows], learning)
        return TokenScores(
            torch.where(learning[:, None], fresh.logprobs, step_scores.logprobs.detach()),
            torch.where(learning[:, None], fresh.entropies, step_scores.entropies),
        )

    @torch.no_grad()
    def score_reference(self, model: ScoringModel, batch: ScoringBatch) -> Tensor:
        """Return the log probabilities of a whole step under the reference model, (B, T), nats; 0 if not sampled.

        `model` is the frozen reference model, or the trained one while its adapters are disabled.
        """
        return self._score_rows(model, batch, batch.sampled_mask, batch.sampled_mask.any(dim=1)).logprobs

    def plan_passes(self, layout: BatchLayout, rows: Tensor) -> list[ForwardPass]:
        """Plan the forward passes of some rows of a batch, by their numbers."""
        return build_row_passes(layout, rows, self.get_tokens_per_pass(layout.ids.device), self._packed)

    def run_passes(self, model: ScoringModel, layout: BatchLayout, passes: Sequence[ForwardPass]) -> TokenScores:
        """Run planned forward passes under `autocast`."""

        def score(
            *, input_ids: Tensor, sampled: Tensor, position_ids: Tensor | None, tree: PrefixTree | None = None
        ) -> tuple[Tensor, Tensor]:
            with self._autocast():
                return model(input_ids=input_ids, sampled=sampled, position_ids=position_ids, tree=tree)

        return compute_logprobs(score, layout, passes, self._packed)

    def get_tokens_per_pass(self, device: torch.device) -> int:
        """Return the approximate number of tokens per forward pass."""
        default = TOKENS_PER_PASS_CPU if device.type == "cpu" else TOKENS_PER_PASS_GPU
        return self.tokens_per_pass or default

    def _score_rows(self, model: ScoringModel, batch: ScoringBatch, sampled: Tensor, row_mask: Tensor) -> TokenScores:
        """Score the rows that `row_mask` marks, (b,) bool; all others are 0 in the result."""
        layout = BatchLayout.from_batch(batch.input_ids, batch.attention, sampled)
        return self.run_passes(model, layout, self.plan_passes(layout, row_mask.nonzero()[:, 0]))
