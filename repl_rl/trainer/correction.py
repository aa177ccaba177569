"""How far sampler and trainer are apart, and the importance ratios that make up for it.

`delta` is the trainer's log probability less the sampler's, nats, shape (B, T), 0 where nothing was sampled. The ratio
of a line or a sequence is the geometric mean over its tokens: a product would grow with the length and throw out long
rollouts whose every token is fine.
"""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from repl_rl.errors import WeightSyncError


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the sampler's log probabilities are from the trainer's, over the sampled tokens of a step."""

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

    def check(self, tolerance: float, policy_step: int) -> None:
        """Hold the sampler to the trainer, with log probabilities at most `tolerance` nats apart.

        Raises:
            WeightSyncError: they are further apart.
        """
        if not self.max <= tolerance:
            raise WeightSyncError(
                f"policy step {policy_step}: a sampled log probability is {self.max:.3g} nats from the trainer's, the "
                f"tolerance is {tolerance:.3g}; the engine probably samples from stale or wrong weights (tied "
                "embeddings, a failed load), or at another temperature; or it is the trainer that is wrong: then "
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


def measure(delta: Tensor, lines: Tensor, raw: Tensor, used: Tensor, accelerator: Accelerator) -> Gap:
    """Measure over all processes.

    Args:
        delta: (B, T), nats.
        lines: (B, T), the line of each token, -1 where nothing was sampled.
        raw: (B, T), importance ratios before they were cut.
        used: (B, T) or (B, 1), importance ratios as the loss takes them.
    """
    sampled = lines >= 0
    before = torch.cat([sampled.new_ones(len(sampled), 1), sampled[:, :-1]], dim=1)
    first = delta[sampled & ~before].abs()
    gaps = delta[sampled].abs()
    zero = delta.new_zeros(())
    local = [
        zero + len(gaps),
        gaps.sum(),
        gaps.max() if len(gaps) else zero,
        zero + len(first),
        first.sum(),
        delta[sampled].exp().sum(),
        (raw == used).expand_as(sampled)[sampled].float().sum(),
    ]
    rows = accelerator.gather(torch.stack(local).double()).view(-1, len(local))
    tokens, total, _, firsts, first_total, ratio, kept = rows.sum(dim=0).tolist()
    share = 1 / max(tokens, 1)
    most = rows[:, 2].max().item()
    after, elsewhere = first_total / max(firsts, 1), (total - first_total) / max(tokens - firsts, 1)
    return Gap(total * share, most, after, elsewhere, ratio * share, kept * share)


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
