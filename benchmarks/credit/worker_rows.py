"""Training run that ends when its budget of sampled tokens is spent."""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.credit.rows import Run
from repl_rl.rollout import SyncRollouts
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.load_policy import load_model
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trainer.weight_sync import compute_weight_bytes, open_weights_folder, save_weights
from repl_rl.trajectory.trajectory import Trajectory

ENDLESS_STEPS = 1_000_000
"""Steps of the schedule. They are many, so that a linear learning rate stays constant while tokens last."""


class _BudgetSpent(Exception):
    """Signal that ends a training once its tokens are spent."""


@dataclass(slots=True)
class Ledger:
    """Record of a run's steps until its tokens are spent."""

    budget: int
    tokens: list[int] = field(default_factory=list)
    rows: list[dict[str, float]] = field(default_factory=list)
    middle: Mapping[str, Tensor] | None = None
    """Weights after the step that spent half of the tokens; None before it, or without `keep`."""
    keep: Callable[[], Mapping[str, Tensor]] | None = None
    """Function that copies the current weights; None disables copies."""

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        """Record a step; the one that spends the last tokens ends the training."""
        self.rows.append(record.metrics)
        self.tokens.append(sum(t.sampled_tokens for t in trajectories) + (self.tokens[-1] if self.tokens else 0))
        if self.keep is not None and self.middle is None and self.tokens[-1] > self.budget / 2:
            self.middle = self.keep()
        if self.tokens[-1] > self.budget:
            raise _BudgetSpent

    def column(self, name: str) -> list[float]:
        return [round(row[name], 4) for row in self.rows]

    def run(
        self,
        condition: str,
        seed: int,
        after: Mapping[str, float],
        began: float,
        learning_rate: float,
        agreement: Mapping[str, Mapping[str, float]],
        transcripts: Sequence[str],
    ) -> Run:
        """Return the row of the run. `after` are its metrics on held-out tasks, `began` is on the monotonic clock."""
        return Run(
            condition=condition,
            seed=seed,
            tokens=self.tokens,
            solve=self.column("solve_rate"),
            error=self.column("line_error_rate"),
            lines=self.column("lines_per_rollout"),
            after=after,
            gap=max(row["logprob_gap_max"] for row in self.rows),
            staleness=round(fmean(row.get("staleness_mean", 0.0) for row in self.rows), 3),
            kept=round(fmean(row["importance_kept"] for row in self.rows), 4),
            rollout_s=round(sum(self.column("rollout_s")), 1),
            update_s=round(sum(self.column("update_s")), 1),
            wall_s=round(time.monotonic() - began, 1),
            learning_rate=learning_rate,
            agreement=dict(agreement),
            transcripts=list(transcripts),
        )


def spent(
    policy: Path,
    config: TrainerConfig,
    source: SyncRollouts,
    task_ids: Sequence[str],
    tokens: int,
    seed: int,
    keep_middle: bool,
) -> tuple[PreTrainedModel, Ledger]:
    """Train the policy in a folder until more than `tokens` (>= 1) are sampled; then the source has its weights.

    With `keep_middle` the ledger has the weights of the middle too.

    Raises:
        WeightSyncError: the sampler's log probabilities are not the trainer's.
    """
    model = load_model(policy, config)
    keep = partial(_copied, model) if keep_middle else None
    ledger = Ledger(tokens, keep=keep)
    tokenizer = source.rollouts.renderer.tokenizer
    with tempfile.TemporaryDirectory() as checkpoints, open_weights_folder(compute_weight_bytes(model)) as weights:
        try:
            run_training(
                model, tokenizer, task_ids, source, config, Path(checkpoints), TrainingOptions(ledger.step, seed=seed)
            )
        except _BudgetSpent:
            # The exception skipped the last weight sync, so drop prefetched rollouts and sync here.
            source.cancel_prefetched()
            save_weights(model, model.state_dict(), weights)
            source.load_weights(weights, len(ledger.tokens))
    model.zero_grad()
    # The trainer, which holds the optimizer's state, refers to itself.
    gc.collect()
    return model, ledger


def _copied(model: PreTrainedModel) -> Mapping[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}
