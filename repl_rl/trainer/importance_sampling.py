"""Logprob mismatch between sampler and trainer, and the importance sampling ratios that correct it.

`delta` is the trainer's log probability minus the sampler's, in nats, with shape (B, T). It is 0 for tokens that were
not sampled. The ratio of a token is exp(delta).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from repl_rl.errors import WeightSyncError
from repl_rl.trainer.logprobs import build_line_numbers, build_policy_steps
from repl_rl.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class LogprobMismatch:
    """Logprob mismatch between sampler and trainer in one step.

    Differences cover only tokens that the current weights sampled, because those of older weights differ anyway.
    Ratios cover all sampled tokens.
    """

    mean: float
    """Mean absolute difference, nats."""
    max: float
    """Largest absolute difference, nats."""
    after_observation: float
    """Mean absolute difference at the first token after an observation, nats."""
    elsewhere: float
    """Mean absolute difference at the other tokens, nats."""
    ratio: float
    """Mean importance sampling ratio per token, before the correction."""
    unclipped_share: float
    """Share of the tokens whose ratio the correction left unchanged."""
    tokens: float
    """Number of tokens that the current weights sampled."""

    def check_tolerance(self, tolerance: float, policy_step: int) -> None:
        """Check that log probabilities of sampler and trainer differ by at most `tolerance` nats.

        Raises:
            WeightSyncError: they differ by more.
        """
        # `not <=` instead of `>`, so that NaN raises, too.
        if not self.max <= tolerance:
            raise WeightSyncError(
                f"policy step {policy_step}: a sampled log probability is {self.max:.3g} nats from the trainer's, the "
                f"tolerance is {tolerance:.3g}; the engine probably samples from stale or wrong weights (tied "
                "embeddings, a failed load), at another temperature or in another number format; if the trainer is "
                'wrong instead, trainer.prefix_sharing = "off" or fast_logprobs = false removes the difference'
            )

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their names in `metrics.jsonl`."""
        return {
            "logprob_gap_mean": self.mean,
            "logprob_gap_max": self.max,
            "logprob_gap_after_observation": self.after_observation,
            "logprob_gap_elsewhere": self.elsewhere,
            "importance_ratio": self.ratio,
            "importance_kept": self.unclipped_share,
        }


@dataclass(frozen=True, slots=True)
class Staleness:
    """Staleness of the tokens of a step, in steps: the current weights minus the weights that sampled a token."""

    mean: float
    """Mean over sampled tokens."""
    max: float
    """Maximum over sampled tokens."""
    on_policy_share: float
    """Share of sampled tokens that the current weights sampled."""

    @classmethod
    def from_ages(cls, ages: Tensor, steps: int) -> "Staleness":
        """Compute staleness from `ages`, (B, T), in optimizer steps, with -1 for tokens that were not sampled.

        `steps` is the number of optimizer steps per training step, that is, per batch of rollouts.
        """
        stale_steps = ages[ages >= 0].float() / steps
        if not len(stale_steps):
            return cls(0.0, 0.0, 1.0)
        return cls(stale_steps.mean().item(), stale_steps.max().item(), (stale_steps == 0).float().mean().item())

    def metrics(self) -> dict[str, float]:
        """Return the metrics by their names in `metrics.jsonl`."""
        return {"staleness_mean": self.mean, "staleness_max": self.max, "fresh_share": self.on_policy_share}


def compute_token_staleness(rows: Sequence[Trajectory], width: int, step: int, max_steps: int) -> Tensor:
    """Return the staleness of each token at `step`, in optimizer steps: int64, (B, T), -1 for tokens not sampled.

    Raises:
        WeightSyncError: a line is more than `max_steps` optimizer steps old, or a later policy sampled it.
    """
    policy_steps = build_policy_steps(rows, width)
    sampled, ages = policy_steps >= 0, step - policy_steps
    invalid = sampled & ((ages < 0) | (ages > max_steps))
    for row, is_invalid in zip(rows, invalid.any(dim=1).tolist(), strict=True):
        if is_invalid:
            steps = sorted({line.policy_step for line in row.lines})
            raise WeightSyncError(
                f"rollout {row.id} has lines of the policy steps {steps} while the trainer is at {step}; none may be "
                f"more than {max_steps} older; the rollout source did not load the last weights"
            )
    return ages.masked_fill(~sampled, -1)


def apply_importance_correction(
    batch: dict[str, Tensor],
    rows: Sequence[Trajectory],
    ages: Tensor,
    importance: str,
    accelerator: Accelerator,
) -> LogprobMismatch:
    """Measure the logprob mismatch, and replace TRL's corrected ratios by 1 if `importance` is "none".

    Args:
        batch: TRL's batch of a step; its `importance_sampling_ratio` may be replaced.
        rows: rows of the step, B of them.
        ages: staleness of each token, (B, T), as `compute_token_staleness` returns it.
        importance: name of a correction, as in `TrainerConfig.importance_sampling`.
        accelerator: gathers the mismatch over all processes.
    """
    trainer_logprobs = batch["old_per_token_logps"].float()
    lines = build_line_numbers(rows, batch["completion_ids"].size(1)).to(trainer_logprobs.device)
    delta = (trainer_logprobs - batch["sampling_per_token_logps"]).masked_fill(lines < 0, 0.0)
    raw = delta.exp()
    # TRL has already corrected its ratios.
    if importance == "none":
        batch["importance_sampling_ratio"] = torch.ones_like(raw)
    return measure_mismatch(
        delta, lines, raw, batch["importance_sampling_ratio"], ages.to(trainer_logprobs.device) == 0, accelerator
    )


def measure_mismatch(
    delta: Tensor, lines: Tensor, raw: Tensor, used: Tensor, fresh: Tensor, accelerator: Accelerator
) -> LogprobMismatch:
    """Measure the logprob mismatch over all processes.

    Args:
        delta: (B, T), nats.
        lines: (B, T), line of each token, -1 for tokens that were not sampled.
        raw: (B, T), importance sampling ratios before the correction.
        used: (B, T) or (B, 1), ratios after the correction, as the loss uses them.
        fresh: (B, T) bool, True for tokens that the trainer's current weights sampled.
        accelerator: gathers the counts of all processes.
    """
    sampled = lines >= 0
    # The first token of a completion follows the prompt, which does not count as an observation.
    previous_sampled = torch.cat([sampled.new_ones(len(sampled), 1), sampled[:, :-1]], dim=1)
    first_gaps = delta[fresh & ~previous_sampled].abs()
    gaps = delta[fresh].abs()
    # Gather sums and counts, because processes have different numbers of tokens.
    zero = delta.new_zeros(())
    local = [
        zero + len(gaps),
        gaps.sum(),
        gaps.max() if len(gaps) else zero,
        zero + len(first_gaps),
        first_gaps.sum(),
        delta[sampled].exp().sum(),
        (raw == used).expand_as(sampled)[sampled].float().sum(),
        zero + sampled.sum(),
    ]
    rows = accelerator.gather(torch.stack(local).double()).view(-1, len(local))
    tokens, total, _, first_count, first_total, ratio, unclipped, sampled_count = rows.sum(dim=0).tolist()
    per_token, per_sampled = 1 / max(tokens, 1), 1 / max(sampled_count, 1)
    largest = rows[:, 2].max().item()
    after_observation, elsewhere = (
        first_total / max(first_count, 1),
        (total - first_total) / max(tokens - first_count, 1),
    )
    return LogprobMismatch(
        total * per_token, largest, after_observation, elsewhere, ratio * per_sampled, unclipped * per_sampled, tokens
    )
