"""How far sampler and trainer are apart, and the importance ratios that make up for it.

`delta` is the trainer's log probability less the sampler's, nats, shape (B, T), 0 where nothing was sampled. The ratio
of a line or a sequence is the geometric mean over its tokens: a product would grow with the length and throw out long
rollouts whose every token is fine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from repl_rl.credit.tensors import line_numbers, policy_steps
from repl_rl.errors import WeightSyncError
from repl_rl.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the sampler's log probabilities are from the trainer's, over the tokens of a step that were written with
    the weights of now; of older ones nothing else can be expected. Ratios are those of all sampled tokens."""

    mean: float
    """Mean absolute difference, nats."""
    max: float
    """Largest absolute difference, nats."""
    after_observation: float
    """Mean absolute difference at the first token after something was observed, nats."""
    elsewhere: float
    """Mean absolute difference at the other tokens, nats."""
    ratio: float
    """Mean raw importance ratio of a token."""
    kept: float
    """Share of the tokens whose importance ratio was left as it is."""
    tokens: float
    """How many were written with the weights of now."""

    def check(self, tolerance: float, policy_step: int) -> None:
        """Hold the sampler to the trainer, with log probabilities at most `tolerance` nats apart.

        Raises:
            WeightSyncError: they are further apart.
        """
        if not self.max <= tolerance:
            raise WeightSyncError(
                f"policy step {policy_step}: a sampled log probability is {self.max:.3g} nats from the trainer's, the "
                f"tolerance is {tolerance:.3g}; the engine probably samples from stale or wrong weights (tied "
                "embeddings, a failed load), at another temperature or in another number format; or it is the trainer "
                "that is wrong: then "
                'trainer.shared_prefixes = "off" or fast = false brings them together'
            )

    def metrics(self) -> dict[str, float]:
        """Names as in `metrics.jsonl`."""
        return {
            "logprob_gap_mean": self.mean,
            "logprob_gap_max": self.max,
            "logprob_gap_after_observation": self.after_observation,
            "logprob_gap_elsewhere": self.elsewhere,
            "importance_ratio": self.ratio,
            "importance_kept": self.kept,
        }


@dataclass(frozen=True, slots=True)
class Ages:
    """How old what is learned from is, in steps: the weights of now less those that wrote a token."""

    mean: float
    """Over sampled tokens."""
    max: float
    fresh: float
    """Share of sampled tokens that were written with the weights of now."""

    @classmethod
    def of(cls, ages: Tensor, steps: int) -> "Ages":
        """Of `ages` (B, T) in optimizer steps, of which a step takes `steps`; -1 where nothing was sampled."""
        known = ages[ages >= 0].float() / steps
        if not len(known):
            return cls(0.0, 0.0, 1.0)
        return cls(known.mean().item(), known.max().item(), (known == 0).float().mean().item())

    def metrics(self) -> dict[str, float]:
        """Names as in `metrics.jsonl`."""
        return {"staleness_mean": self.mean, "staleness_max": self.max, "fresh_share": self.fresh}


def ages_of(rows: Sequence[Trajectory], width: int, step: int, most: int) -> Tensor:
    """How many optimizer steps each token is older than `step`: int64, (B, T); -1 where nothing was sampled.

    Raises:
        WeightSyncError: a line is older than `most`, or was written by a policy to come.
    """
    written = policy_steps(rows, width)
    sampled, ages = written >= 0, step - written
    wrong = sampled & ((ages < 0) | (ages > most))
    for row, is_wrong in zip(rows, wrong.any(dim=1).tolist(), strict=True):
        if is_wrong:
            steps = sorted({line.policy_step for line in row.lines})
            raise WeightSyncError(
                f"rollout {row.id} has lines of the policy steps {steps} while the trainer is at {step}; none may be "
                f"more than {most} older; the rollout source did not take the last weights"
            )
    return ages.masked_fill(~sampled, -1)


def corrected(
    batch: dict[str, Tensor],
    rows: Sequence[Trajectory],
    ages: Tensor,
    importance: str,
    cap: float,
    accelerator: Accelerator,
) -> Gap:
    """Measure the gap, and put ratios of lines or sequences, or ones, in the place of TRL's of tokens where asked to.

    Args:
        batch: TRL's, of a step. `importance_sampling_ratio` in it may be replaced.
        rows: of the step, B of them.
        ages: (B, T), as `ages_of` gives them.
        importance: whose ratio it is and what happens above `cap`: a name of `TrainerConfig.importance`.
        cap: largest ratio that is kept as it is.
        accelerator: of all processes, over which the gap is measured.
    """
    trained = batch["old_per_token_logps"].float()
    lines = line_numbers(rows, batch["completion_ids"].size(1)).to(trained.device)
    delta = (trained - batch["sampling_per_token_logps"]).masked_fill(lines < 0, 0.0)
    level, _, how = importance.partition("_")
    raw = raw_ratios(delta, lines, "token" if level == "none" else level)
    if level == "none":
        batch["importance_sampling_ratio"] = torch.ones_like(raw)
    elif level != "token":
        batch["importance_sampling_ratio"] = cut(raw, how, cap)
    return measure(delta, lines, raw, batch["importance_sampling_ratio"], ages.to(trained.device) == 0, accelerator)


def measure(delta: Tensor, lines: Tensor, raw: Tensor, used: Tensor, fresh: Tensor, accelerator: Accelerator) -> Gap:
    """Measure over all processes.

    Args:
        delta: (B, T), nats.
        lines: (B, T), the line of each token, -1 where nothing was sampled.
        raw: (B, T), importance ratios before they were cut.
        used: (B, T) or (B, 1), importance ratios as the loss takes them.
        fresh: (B, T) bool, the tokens that were sampled from the trainer's own weights.
    """
    sampled = lines >= 0
    before = torch.cat([sampled.new_ones(len(sampled), 1), sampled[:, :-1]], dim=1)
    first = delta[fresh & ~before].abs()
    gaps = delta[fresh].abs()
    zero = delta.new_zeros(())
    local = [
        zero + len(gaps),
        gaps.sum(),
        gaps.max() if len(gaps) else zero,
        zero + len(first),
        first.sum(),
        delta[sampled].exp().sum(),
        (raw == used).expand_as(sampled)[sampled].float().sum(),
        zero + sampled.sum(),
    ]
    rows = accelerator.gather(torch.stack(local).double()).view(-1, len(local))
    tokens, total, _, firsts, first_total, ratio, kept, everything = rows.sum(dim=0).tolist()
    share, of_all = 1 / max(tokens, 1), 1 / max(everything, 1)
    most = rows[:, 2].max().item()
    after, elsewhere = first_total / max(firsts, 1), (total - first_total) / max(tokens - firsts, 1)
    return Gap(total * share, most, after, elsewhere, ratio * of_all, kept * of_all, tokens)


def raw_ratios(delta: Tensor, lines: Tensor, level: str) -> Tensor:
    """Importance ratios, shape (B, T), 1 where nothing was sampled.

    `level` token: exp(delta) of each token. line, sequence: exp of the mean of delta over the token's line, or over all
    sampled tokens of its rollout.
    """
    if level == "token":
        return delta.exp()
    # Slot 0 takes what was not sampled; line n of a rollout is slot n + 1, a whole rollout slot 1.
    slots = lines + 1 if level == "line" else (lines >= 0).long()
    sums = delta.new_zeros(len(delta), int(slots.max()) + 1)
    counts = sums.scatter_add(1, slots, torch.ones_like(delta))
    means = sums.scatter_add(1, slots, delta) / counts.clamp(min=1)
    return torch.where(slots > 0, means.gather(1, slots).exp(), 1.0)


def cut(ratios: Tensor, how: str, cap: float) -> Tensor:
    """Ratios above `cap` become `cap` (`how` is truncate) or 0 (mask)."""
    return ratios.clamp(max=cap) if how == "truncate" else ratios.masked_fill(ratios > cap, 0.0)
