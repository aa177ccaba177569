"""Figures about credit: what the policy is paid for. Nothing in training reads them."""

from collections.abc import Sequence
from statistics import correlation, fmean

from repl_rl.credit.earnings import Advantages, RolloutEarnings, to_go
from repl_rl.credit.group import Credit, Earned
from repl_rl.record.group import Group


def earned_metrics(earned: Sequence[Earned], credit: Credit) -> dict[str, float]:
    """`shaping_metrics`, and `bound_rate`: the share of rollouts in which the bound took something off the shaping that
    the estimator adds up; 0 for an estimator that adds none up."""
    sums = [to_go(e.earnings.shaping_L, 1.0) for e in earned if e.earnings.lines]
    bitten = sum(any(abs(s) > credit.table.bound * (1 + 1e-9) for s in sums_L) for sums_L in sums) * credit.sums
    return {**shaping_metrics(earned), "bound_rate": bitten / max(len(sums), 1)}


def shaping_metrics(earned: Sequence[Earned]) -> dict[str, float]:
    """How line rewards stand to outcomes, over graded rollouts: is the policy paid for solving, or for shaping?

    `shaping_mean` is the mean sum of a rollout's line rewards; `shaping_share` the part of all absolute reward that
    they make up; `shaping_correlation` that sum's correlation with the outcome, 0 where one of them does not vary.
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
    """Whether long rollouts are paid for being long: sampled tokens of rollouts, as distances to their group's mean.

    `length_outcome_correlation` and `length_advantage_correlation` are their correlations with the outcome and with the
    mean advantage of a token, also as distances to the group's mean, so that hard tasks with long solutions do not
    count; 0 where one of them does not vary. `length_drift` is the mean of those distances weighted by advantage, in
    tokens: above 0 the update pushes towards longer rollouts, whatever the reason.
    """
    graded: list[tuple[float, float]] = []
    credited: list[tuple[float, float]] = []
    for group, rows in zip(groups, advantages, strict=True):
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
    """Pearson's correlation; 0 where one of both does not vary."""
    columns = list(zip(*pairs, strict=True))
    # Equal numbers may differ from their own mean in the last bit.
    if not columns or any(max(column) - min(column) < 1e-9 for column in columns):
        return 0.0
    return correlation(*columns)
