"""Fast pass: log probabilities of a step's rows, in place of TRL's own passes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.machine.heap import keep_freed
from repl_rl.trainer.paths import Tree
from repl_rl.trainer.scoring import Scorer, Scores, Tally, install, packs, score_rows
from repl_rl.trainer.sharing import Sharing

TOKENS_PER_PASS_CPU = 2048
"""Tokens per forward pass on CPU, about; rows of similar length share a pass. Small passes stay in cache."""
TOKENS_PER_PASS_GPU = 16384
"""Tokens per forward pass on a GPU, about."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rollouts to score, with masks of the step that they belong to."""

    input_ids: Tensor
    """(b, S), prompts padded on the left, completions on the right; the rows of a whole step, or some of them."""
    attention: Tensor
    """(b, S), 1 at real tokens."""
    sampled: Tensor
    """(B, T) bool for the whole step, True for sampled tokens."""
    learning: Tensor
    """(B,) bool for the whole step, True for rows whose log probabilities the loss depends on."""


class FastPass:
    """Scorer of batches: the first call of a step scores all rows, later calls only those that the loss depends on."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel | None = None,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        tokens_per_pass: int | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """Patch `model` and `reference` so that they return scores alone; see `install`, also for its errors.

        Args:
            reference: frozen reference model. None means that there is none, or that it is `model` without adapters.
            autocast: returns a context with the number format of a forward pass. Each pass gets a new context, because
                a context caches copies of weights, without gradients if its first pass has none.
            tokens_per_pass: approximate tokens per forward pass. None chooses by device.
            sharing: prefix sharing, which scores rows with a common beginning as trees. It is tried on `model` at once.
                None disables it.
        """
        install(model)
        if reference is not None:
            install(reference)
        self._packed = packs(model)
        self._autocast = autocast
        self.tokens_per_pass = tokens_per_pass
        self._sharing = sharing
        self._known: Scores
        if sharing is not None:
            sharing.probe(model, autocast)
        if model.device.type == "cpu":
            # The loss allocates and frees its tiles (see `scoring`) again and again.
            keep_freed()

    def first(self, model: Scorer, batch: Batch, keep_graph: bool) -> Scores:
        """Return the scores of a whole step. With `keep_graph`, its only update takes its gradients from them."""
        tally = self._verified(model, batch)
        # Rows without effect on the loss need no graph. Scores of rows that are left out are 0, so a sum combines both.
        with torch.no_grad():
            resting = self._score(model, batch, batch.sampled, ~batch.learning, tally)
        with torch.set_grad_enabled(keep_graph):
            learned = self._score(model, batch, batch.sampled, batch.learning, tally)
            self._known = Scores(resting.logprobs + learned.logprobs, resting.entropies + learned.entropies)
        return Scores(self._known.logprobs.detach(), self._known.entropies)

    def again(self, model: Scorer, batch: Batch, rows: Tensor, with_graph: bool) -> Scores:
        """Return the scores of some rows of the same step. Set `with_graph` if the first pass kept its graph.

        Rows that the loss does not depend on keep the scores of the first pass, even after updates.
        """
        known = Scores(self._known.logprobs[rows], self._known.entropies[rows])
        if with_graph:
            return known
        learning = batch.learning[rows]
        fresh = self._score(model, batch, batch.sampled[rows], learning)
        return Scores(
            torch.where(learning[:, None], fresh.logprobs, known.logprobs.detach()),
            torch.where(learning[:, None], fresh.entropies, known.entropies),
        )

    @torch.no_grad()
    def reference(self, model: Scorer, batch: Batch) -> Tensor:
        """Return the log probabilities of a whole step under the reference model, (B, T), nats; 0 if not sampled.

        `model` is the frozen reference model, or the trained one while its adapters are disabled.
        """
        return self._score(model, batch, batch.sampled, batch.sampled.any(dim=1)).logprobs

    def _verified(self, model: Scorer, batch: Batch) -> Tally | None:
        """Verify prefix sharing on this step, and return its tally; return None if sharing is disabled."""
        if self._sharing is None:
            return None

        def score(rows: Tensor, tokens: int, tally: Tally | None) -> Scores:
            return self._pass(model, batch, batch.sampled, rows, tokens, tally)

        step = (batch.input_ids, batch.attention, batch.sampled)
        self._sharing.verify(score, step, batch.learning, self._tokens(batch), self._autocast)
        return self._sharing.tally

    def _score(
        self, model: Scorer, batch: Batch, sampled: Tensor, wanted: Tensor, tally: Tally | None = None
    ) -> Scores:
        # A tally makes `score_rows` share prefixes. Only the one of the first pass is kept for metrics.
        shared = self._sharing is not None and not self._sharing.off
        counted = (tally or Tally()) if shared else None
        return self._pass(model, batch, sampled, wanted.nonzero()[:, 0], self._tokens(batch), counted)

    def _tokens(self, batch: Batch) -> int:
        default = TOKENS_PER_PASS_CPU if batch.input_ids.device.type == "cpu" else TOKENS_PER_PASS_GPU
        return self.tokens_per_pass or default

    def _pass(
        self, model: Scorer, batch: Batch, sampled: Tensor, rows: Tensor, tokens: int, tally: Tally | None
    ) -> Scores:
        def scorer(
            *, input_ids: Tensor, sampled: Tensor, position_ids: Tensor | None, tree: Tree | None = None
        ) -> tuple[Tensor, Tensor]:
            with self._autocast():
                return model(input_ids=input_ids, sampled=sampled, position_ids=position_ids, tree=tree)

        return score_rows(scorer, batch.input_ids, batch.attention, sampled, rows, tokens, self._packed, tally)
