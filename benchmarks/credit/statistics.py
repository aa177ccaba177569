"""Statistics of the rows. All functions are pure, so a table can be made again from the file of rows."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

from benchmarks.credit.conditions import BASELINE, effects
from benchmarks.credit.power import holm, p_value, pooled
from benchmarks.credit.rows import Run, Start
from benchmarks.credit.settings import TARGET, WINDOW

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom; the last one, slightly too wide, is used beyond.
"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over seeds, with its interval."""

    value: float
    low: float | None
    """Lower end of Student's 95 % confidence interval of the mean; None with one seed."""
    high: float | None
    seeds: int


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per seed (at least one), with Student's interval.

    With so few values a bootstrap or a normal quantile would be far too narrow.
    """
    if len(values) < 2:
        return Estimate(fmean(values), None, None, len(values))
    half = _T[min(len(values) - 1, len(_T)) - 1] * stdev(values) / sqrt(len(values))
    return Estimate(fmean(values), fmean(values) - half, fmean(values) + half, len(values))


def running_mean(rates: Sequence[float], window: int = WINDOW) -> list[float]:
    """Return the mean of each rate and those before it, at most `window` in all."""
    return [fmean(rates[max(0, at - window + 1) : at + 1]) for at in range(len(rates))]


def tokens_to(
    tokens: Sequence[int], rates: Sequence[float], target: float = TARGET, window: int = WINDOW
) -> int | None:
    """Return the sampled tokens at the first step where the mean of the last `window` rates reaches `target`, or None.

    `tokens` are cumulative, with one entry per step.
    """
    for at, rate in enumerate(running_mean(rates, window)):
        # The mean of a shorter window is too noisy.
        if at + 1 >= window and rate >= target:
            return tokens[at]
    return None


def budget_mean(tokens: Sequence[int], rates: Sequence[float], budget: int) -> float:
    """Return the mean of the rates over the first `budget` sampled tokens; each step is weighted by its tokens."""
    # The step that crosses the budget counts with its tokens below it.
    edges = [min(edge, budget) for edge in (0, *tokens)]
    return sum(rate * (end - begin) for rate, (begin, end) in zip(rates, pairwise(edges), strict=True)) / edges[-1]


def at_tokens(tokens: Sequence[int], values: Sequence[float], grid: Sequence[int]) -> list[float]:
    """Return the last finished step's value at each number of sampled tokens; before the first step, its value."""
    return [values[max(0, bisect_right(tokens, place) - 1)] for place in grid]


def measures(run: Run, budget: int) -> dict[str, float]:
    """Return the metrics of one run that conditions are compared by."""
    return {
        **run.after,
        "train_solve_rate": budget_mean(run.tokens, run.solve, budget),
        "train_line_error_rate": budget_mean(run.tokens, run.error, budget),
        "steps": len(run.tokens),
        "wall_s": run.wall_s,
    }


def reached(runs: Sequence[Run], budget: int) -> dict[str, object]:
    """Return the number of runs that reached the target, and the mean tokens; others count with the whole budget."""
    found = [tokens_to(run.tokens, run.solve) for run in runs]
    return {
        "runs": sum(tokens is not None for tokens in found),
        "of": len(found),
        "tokens": asdict(mean([budget if tokens is None else min(tokens, budget) for tokens in found])),
    }


def aggregate(runs: Sequence[Run], starts: Sequence[Start], budget: int) -> dict[str, object]:
    """Return the figures of every condition, and their differences, paired by seed, to `outcome` without shaping.

    A condition that has only some seeds of the baseline is compared over those.
    """
    by_name = by_condition(runs)
    baseline = by_name.get(BASELINE, {})
    p = p_values(by_name, budget)
    corrected = holm(p)
    return {
        "spread": spread_of(by_name, budget),
        "start": {start.way: dict(start.figures) for start in starts},
        "conditions": {
            name: {
                "mean": {key: asdict(value) for key, value in _means(list(mine.values()), budget).items()},
                "reached": reached(list(mine.values()), budget),
                "difference": {key: asdict(value) for key, value in differences(mine, baseline, budget).items()},
                "agreement": agreements(list(mine.values())),
                "p": p.get(name),
                "holm": corrected.get(name),
            }
            for name, mine in by_name.items()
        },
        "effects": {
            name: {key: asdict(value) for key, value in found.items()}
            for name, (cells, others) in effects().items()
            if (found := together(by_name, cells, others, budget))
        },
    }


def by_condition(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Return runs by the name of their condition and their seed."""
    by_name: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_name.setdefault(run.condition, {})[run.seed] = run
    return by_name


def primary_differences(by_name: Mapping[str, Mapping[int, Run]], budget: int) -> dict[str, list[float]]:
    """Return the differences of the primary metric to the baseline, per condition with at least two shared seeds.

    Each shared seed gives one difference. Fenced blocks are left out, because they start from another policy.
    """
    baseline = by_name.get(BASELINE, {})

    def level(run: Run) -> float:
        return budget_mean(run.tokens, run.solve, budget)

    found = {
        name: [level(run) - level(baseline[seed]) for seed, run in mine.items() if seed in baseline]
        for name, mine in by_name.items()
        if name not in (BASELINE, "fenced")
    }
    return {name: differences for name, differences in found.items() if len(differences) > 1}


def p_values(by_name: Mapping[str, Mapping[int, Run]], budget: int) -> dict[str, float]:
    """Return the two-sided p of the paired t test of the primary metric, by condition."""
    return {name: p_value(found) for name, found in primary_differences(by_name, budget).items()}


def spread_of(by_name: Mapping[str, Mapping[int, Run]], budget: int) -> float | None:
    """Return the standard deviation over seeds of the primary metric's differences, pooled over conditions.

    It is None if no condition has two seeds.
    """
    found = primary_differences(by_name, budget).values()
    return pooled([(stdev(differences), len(differences)) for differences in found]) if found else None


def agreements(runs: Sequence[Run]) -> dict[str, object]:
    """Return the agreement of gradients at each point, mean over the runs that measured it; empty if none did."""
    knowing = [run.agreement for run in runs if run.agreement]
    if not knowing:
        return {}
    keys = next(iter(knowing[0].values()))
    return {
        point: {key: asdict(mean([found[point][key] for found in knowing])) for key in keys} for point in knowing[0]
    }


def together(
    by_name: Mapping[str, Mapping[int, Run]], cells: Sequence[str], others: Sequence[str], budget: int
) -> dict[str, Estimate]:
    """Return the mean of `cells` less the mean of `others`, over their common seeds; empty without a common seed."""
    if not {*cells, *others} <= by_name.keys():
        return {}
    seeds = sorted(set.intersection(*(set(by_name[name]) for name in (*cells, *others))))

    def level(names: Sequence[str], seed: int) -> dict[str, float]:
        found = [measures(by_name[name][seed], budget) for name in names]
        return {key: fmean(figures[key] for figures in found) for key in found[0]}

    # Pair by seed to remove the spread between seeds.
    pairs = [(level(cells, seed), level(others, seed)) for seed in seeds]
    return {key: mean([one[key] - other[key] for one, other in pairs]) for key in pairs[0][0]} if pairs else {}


def _means(runs: Sequence[Run], budget: int) -> dict[str, Estimate]:
    found = [measures(run, budget) for run in runs]
    return {key: mean([figures[key] for figures in found]) for key in found[0]}


def differences(mine: Mapping[int, Run], others: Mapping[int, Run], budget: int) -> dict[str, Estimate]:
    """Return the mean difference of each metric over the common seeds; empty without a common seed."""
    return together({"mine": mine, "others": others}, ["mine"], ["others"], budget)
