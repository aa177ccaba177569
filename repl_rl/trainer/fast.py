"""The fast pass: which rows of a step are scored when, in TRL's place."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.trainer.scoring import Scorer, Scores, install, packs, score_rows

TOKENS_PER_PASS_CPU = 2048
"""Tokens that rows of like length share a forward pass up to: on CPU small passes stay in cache."""
TOKENS_PER_PASS_GPU = 16384


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts to score, and the step that they belong to."""

    input_ids: Tensor
    """(b, S), prompts padded on the left, completions on the right: the whole step's, or some of its rows."""
    attention: Tensor
    """(b, S), 1 at real tokens."""
    sampled: Tensor
    """(B, T) bool, of the whole step."""
    advantages: Tensor
    """(B, T), of the whole step."""


class FastPass:
    """Scores a batch: the first time of a step all of it, then only rows that have an advantage to learn from."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` learns to be called for scores alone: see `install`, also for what it refuses."""
        install(model)
        self._packed = packs(model)
        self._known: Scores

    def first(self, model: Scorer, batch: Batch, keep_graph: bool) -> Scores:
        """The scores of a whole step. With `keep_graph` its only update takes its gradients from them."""
        learning = _learning(batch.advantages, batch.sampled)
        resting = self._score(model, batch, batch.sampled, ~learning)
        with torch.set_grad_enabled(keep_graph):
            learned = self._score(model, batch, batch.sampled, learning)
            self._known = Scores(resting.logprobs + learned.logprobs, resting.entropies + learned.entropies)
        return Scores(self._known.logprobs.detach(), self._known.entropies)

    def again(self, model: Scorer, batch: Batch, rows: Tensor, with_graph: bool) -> Scores:
        """The scores of some rows of that step. `with_graph`: the first pass kept its graph."""
        known = Scores(self._known.logprobs[rows], self._known.entropies[rows])
        if with_graph:
            return known
        sampled = batch.sampled[rows]
        learning = _learning(batch.advantages[rows], sampled)
        fresh = self._score(model, batch, sampled, learning)
        return Scores(
            torch.where(learning[:, None], fresh.logprobs, known.logprobs.detach()),
            torch.where(learning[:, None], fresh.entropies, known.entropies),
        )

    def _score(self, model: Scorer, batch: Batch, sampled: Tensor, wanted: Tensor) -> Scores:
        tokens = TOKENS_PER_PASS_CPU if batch.input_ids.device.type == "cpu" else TOKENS_PER_PASS_GPU
        rows = wanted.nonzero()[:, 0]
        return score_rows(model, batch.input_ids, batch.attention, sampled, rows, tokens, self._packed)


def _learning(advantages: Tensor, sampled: Tensor) -> Tensor:
    """Which rows take gradients: those with an advantage, and at least one.

    A loss without a gradient is an error, and each process needs one, or the others wait for it.
    """
    learning = advantages.any(dim=1)
    learning[sampled.sum(dim=1).argmin()] = True
    return learning
