"""The fast pass: which rows of a step are scored when, in TRL's place."""

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
    learning: Tensor
    """(B,) bool, of the whole step: the rows whose log probabilities the loss depends on."""


class FastPass:
    """Scores a batch: the first time of a step all of it, then only the rows that the loss depends on."""

    def __init__(
        self,
        model: PreTrainedModel,
        reference: PreTrainedModel | None = None,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        tokens_per_pass: int | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """`model` and `reference` learn to be called for scores alone: see `install`, also for what it refuses.

        Args:
            reference: None: there is none, or it is `model` without its adapters.
            autocast: gives the number format of a forward pass; entered anew for each, because the copies of weights
                that it keeps are without gradients if the first pass in it was.
            tokens_per_pass: rows share a forward pass up to about this many tokens; None: what suits the device.
            sharing: whether rows that begin alike are scored as trees, which `model` is tried for now; None: they are
                not.
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
            keep_freed()  # the tiles that a loss is formed in: see `scoring`

    def first(self, model: Scorer, batch: Batch, keep_graph: bool) -> Scores:
        """The scores of a whole step. With `keep_graph` its only update takes its gradients from them."""
        tally = self._verified(model, batch)
        with torch.no_grad():
            resting = self._score(model, batch, batch.sampled, ~batch.learning, tally)
        with torch.set_grad_enabled(keep_graph):
            learned = self._score(model, batch, batch.sampled, batch.learning, tally)
            self._known = Scores(resting.logprobs + learned.logprobs, resting.entropies + learned.entropies)
        return Scores(self._known.logprobs.detach(), self._known.entropies)

    def again(self, model: Scorer, batch: Batch, rows: Tensor, with_graph: bool) -> Scores:
        """The scores of some rows of that step. `with_graph`: the first pass kept its graph.

        Rows that the loss does not depend on keep the scores of the first pass, whatever has been learned since.
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
        """The log probabilities of a whole step under the reference policy, (B, T), nats, 0 where nothing was sampled.

        `model` is that policy: a frozen one, or the one that is trained while its adapters are off.
        """
        return self._score(model, batch, batch.sampled, batch.sampled.any(dim=1)).logprobs

    def _verified(self, model: Scorer, batch: Batch) -> Tally | None:
        """Where what this step shares is added up, once it may; None: nothing is shared."""
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
