"""Metrics of credit: line rewards against outcomes, and lengths of rollouts. Training does not read them."""

from collections.abc import Sequence
from statistics import correlation, fmean

from repl_rl.credit.advantage_estimators import Advantages, RolloutRewards, compute_reward_to_go
from repl_rl.credit.rewards import CreditConfig, GroupEntry
from repl_rl.credit.stop_policy import CUT
from repl_rl.trajectory.trajectory import Group, Trajectory


def compute_credit_metrics(entries: Sequence[GroupEntry], credit: CreditConfig) -> dict[str, float]:
    """Return `compute_shaping_metrics` and `bound_rate`.

    `bound_rate` is the share of rollouts in which the bound reduces the shaping that the estimator sums. It is 0 if the
    estimator sums none.
    """
    sums = [compute_reward_to_go(entry.rewards.shaping_L, 1.0) for entry in entries if entry.rewards.lines]
    # The tolerance absorbs rounding in the sums.
    bounded_count = (
        sum(any(abs(s) > credit.reward_table.bound * (1 + 1e-9) for s in sums_L) for sums_L in sums)
        * credit.sums_shaping
    )
    return {**compute_shaping_metrics(entries), "bound_rate": bounded_count / max(len(sums), 1)}


def compute_shaping_metrics(entries: Sequence[GroupEntry]) -> dict[str, float]:
    """Compare line rewards with outcomes over graded rollouts: is the policy paid for solving, or for shaping?

    `shaping_mean` is the mean sum of line rewards per rollout. `shaping_share` is the sum of absolute
    line rewards, divided by that of absolute line rewards and outcomes. `shaping_correlation` is the correlation of a
    rollout's sum of line rewards with its outcome, or 0 if one of them does not vary.
    """
    graded = [entry.rewards for entry in entries if entry.rewards.outcome is not None]
    # The sum of line rewards of each rollout, and its outcome.
    pairs = [(sum(rewards.rewards_L), rewards.outcome) for rewards in graded if rewards.outcome is not None]
    absolute = sum(abs(reward) for rewards in graded for reward in rewards.rewards_L)
    outcomes = sum(abs(outcome) for _, outcome in pairs)
    return {
        "shaping_mean": fmean(shaping for shaping, _ in pairs) if pairs else 0.0,
        "shaping_share": absolute / (absolute + outcomes) if absolute else 0.0,
        "shaping_correlation": _compute_correlation(pairs),
    }


def compute_length_metrics(groups: Sequence[Group[GroupEntry]], advantages: Sequence[Advantages]) -> dict[str, float]:
    """Measure if long rollouts are rewarded for their length. The length is the number of sampled tokens.

    The mean of its group is subtracted from each length, outcome and advantage, so that hard tasks with long solutions
    do not count. `length_outcome_correlation` correlates lengths with outcomes. `length_advantage_correlation`
    correlates lengths with mean advantages per token. A correlation is 0 if one variable is constant. `length_drift` is
    the mean length weighted by advantage, in tokens. Above 0, the update favours longer rollouts, for any reason.
    """
    graded: list[tuple[float, float]] = []
    credited: list[tuple[float, float]] = []
    for group, rows in zip(groups, advantages, strict=True):
        # Distances are taken within each group.
        rollouts = [(m.rewards, row) for m, row in zip(group.members, rows, strict=True) if m.rewards.lines]
        graded += _center_pairs([(r.tokens, r.outcome) for r, _ in rollouts if r.outcome is not None])
        credited += _center_pairs([(r.tokens, _compute_token_mean(r, row)) for r, row in rollouts])
    # Divide by the absolute weights, because the weights themselves may sum to 0.
    weight = sum(abs(advantage) for _, advantage in credited)
    return {
        "length_outcome_correlation": _compute_correlation(graded),
        "length_advantage_correlation": _compute_correlation(credited),
        "length_drift": sum(tokens * advantage for tokens, advantage in credited) / weight if weight else 0.0,
    }


def list_ends(trajectories: Sequence[Trajectory]) -> list[tuple[bool, int]]:
    """Return (was it cut, sampled tokens) for each rollout that is trained on."""
    return [(t.stop in CUT, t.sampled_tokens) for t in trajectories if t.trainable]


def compute_length_metrics_for_trl(ends: Sequence[tuple[bool, int]]) -> dict[str, float]:
    """Return the share of rollouts that were cut, and the lengths of the others, under TRL's names."""
    uncut_lengths = [length for cut, length in ends if not cut] or [0]
    return {
        "clipped_ratio": sum(cut for cut, _ in ends) / max(len(ends), 1),
        "mean_terminated_length": sum(uncut_lengths) / len(uncut_lengths),
        "min_terminated_length": float(min(uncut_lengths)),
        "max_terminated_length": float(max(uncut_lengths)),
    }


def _compute_token_mean(rollout: RolloutRewards, advantages_L: Sequence[float]) -> float:
    return sum(a * line.tokens for a, line in zip(advantages_L, rollout.lines, strict=True)) / rollout.tokens


def _center_pairs(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if not pairs:
        return []
    x, y = (fmean(column) for column in zip(*pairs, strict=True))
    return [(a - x, b - y) for a, b in pairs]


def _compute_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Pearson's correlation, or 0 if one side does not vary."""
    columns = list(zip(*pairs, strict=True))
    # Equal numbers may differ from their own mean in the last bit.
    if not columns or any(max(column) - min(column) < 1e-9 for column in columns):
        return 0.0
    return correlation(*columns)
