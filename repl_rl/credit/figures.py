"""Metrics of credit assignment, which show what the policy is rewarded for. Training does not read them."""

from collections.abc import Sequence
from statistics import correlation, fmean

from repl_rl.credit.earnings import Advantages, RolloutEarnings, to_go
from repl_rl.credit.group import Credit, Earned
from repl_rl.record.group import Group


def earned_metrics(earned: Sequence[Earned], credit: Credit) -> dict[str, float]:
    """Return `shaping_metrics` and `bound_rate`.

    `bound_rate` is the share of rollouts in which the bound reduces the shaping that the estimator sums. It is 0 if the
    estimator sums none.
    """
    sums = [to_go(e.earnings.shaping_L, 1.0) for e in earned if e.earnings.lines]
    # The tolerance absorbs rounding in the sums.
    bitten = sum(any(abs(s) > credit.table.bound * (1 + 1e-9) for s in sums_L) for sums_L in sums) * credit.sums
    return {**shaping_metrics(earned), "bound_rate": bitten / max(len(sums), 1)}


def shaping_metrics(earned: Sequence[Earned]) -> dict[str, float]:
    """Compare line rewards with outcomes over graded rollouts: is the policy paid for solving, or for shaping?

    `shaping_mean` is the mean sum of line rewards per rollout. `shaping_share` is their part of all absolute reward.
    `shaping_correlation` is the correlation of that sum with the outcome, or 0 if one of them does not vary.
    """
    graded = [e.earnings for e in earned if e.earnings.outcome is not None]
    pairs = [(sum(r.rewards_L), r.outcome) for r in graded if r.outcome is not None]
    absolute = sum(abs(reward) for r in graded for reward in r.rewards_L)
    outcomes = sum(abs(outcome) for _, outcome in pairs)
    return {
        "shaping_mean": fmean(shaping for shaping, _ in pairs) if pairs else 0.0,
        "shaping_share": absolute / (absolute + outcomes) if absolute else 0.0,
        "shaping_correlation": _correlation(pairs),
    }


def length_metrics(groups: Sequence[Group[Earned]], advantages: Sequence[Advantages]) -> dict[str, float]:
    """Measure if long rollouts are paid for their length: sampled tokens, as distances to their group's mean.

    `length_outcome_correlation` and `length_advantage_correlation` are their correlations with the outcome and with the
    mean advantage per token. These are also distances to the group's mean, so that hard tasks with long solutions do
    not count. A correlation is 0 if one side does not vary. `length_drift` is the mean of those distances weighted by
    advantage, in tokens. Above 0, the update pushes towards longer rollouts, for any reason.
    """
    graded: list[tuple[float, float]] = []
    credited: list[tuple[float, float]] = []
    for group, rows in zip(groups, advantages, strict=True):
        # Distances are taken within each group.
        played = [(m.earnings, row) for m, row in zip(group.members, rows, strict=True) if m.earnings.lines]
        graded += _centred([(r.tokens, r.outcome) for r, _ in played if r.outcome is not None])
        credited += _centred([(r.tokens, _mean_of_tokens(r, row)) for r, row in played])
    weight = sum(abs(advantage) for _, advantage in credited)
    return {
        "length_outcome_correlation": _correlation(graded),
        "length_advantage_correlation": _correlation(credited),
        "length_drift": sum(tokens * advantage for tokens, advantage in credited) / weight if weight else 0.0,
    }


def _mean_of_tokens(rollout: RolloutEarnings, advantages_L: Sequence[float]) -> float:
    return sum(a * line.tokens for a, line in zip(advantages_L, rollout.lines, strict=True)) / rollout.tokens


def _centred(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if not pairs:
        return []
    x, y = (fmean(column) for column in zip(*pairs, strict=True))
    return [(a - x, b - y) for a, b in pairs]


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Pearson's correlation, or 0 if one side does not vary."""
    columns = list(zip(*pairs, strict=True))
    # Equal numbers may differ from their own mean in the last bit.
    if not columns or any(max(column) - min(column) < 1e-9 for column in columns):
        return 0.0
    return correlation(*columns)
