"""Decisions before an experiment runs, made by rules: its statistical power, and its learning rates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.credit.conditions import BASELINE, Condition
from benchmarks.credit.power import ALPHA, POWER, smallest_difference
from benchmarks.credit.rows import Run, parse
from benchmarks.credit.statistics import budget_mean, by_condition, spread_of
from repl_rl.errors import ConfigError

SPREAD = 0.022
"""Standard deviation over seeds of a difference of the primary metric, paired by seed.

It is the pooled value of the earlier experiment's cells (benchmarks/results/credit.json), for lack of a better one.
"""


@dataclass(frozen=True, slots=True)
class Power:
    """Smallest difference that an experiment can find, as a share of rollouts solved."""

    seeds: int
    spread: float
    """Standard deviation over seeds of a difference paired by seed."""
    source: str
    """Source of `spread`, in words."""
    comparisons: int
    """Number of conditions that are compared with the baseline."""
    smallest: float | None
    """Difference that one paired t test, two-sided, at 5 %, finds in 80 of 100 experiments; None with one seed."""
    smallest_corrected: float | None
    """The same for the strictest test of Holm's correction for all comparisons."""

    def __str__(self) -> str:
        """Return the power as a sentence."""
        if self.smallest is None or self.smallest_corrected is None:
            return "one seed: no difference can be told from chance"
        return (
            f"{self.seeds} seeds detect a difference of {100 * self.smallest:.1f} points (paired t, two-sided "
            f"{ALPHA:.0%}, power {POWER:.0%}), {100 * self.smallest_corrected:.1f} as the strictest of "
            f"{self.comparisons} comparisons; spread between seeds {100 * self.spread:.1f} points, {self.source}"
        )


def power(conditions: Sequence[Condition], seeds: int, spread: float, source: str) -> Power:
    """Return the power of an experiment with these conditions and `seeds` (>= 1)."""
    count = max(1, sum(c.name not in (BASELINE, "fenced") for c in conditions))
    # Holm's strictest test divides alpha by the number of comparisons.
    smallest = [smallest_difference(spread, seeds, ALPHA / n) if seeds > 1 else None for n in (1, count)]
    return Power(seeds, spread, source, count, *smallest)


def earlier_spread(file: Path) -> float:
    """Return the pooled spread of the differences in a report of `bench credit --json`.

    Raises:
        ConfigError: it is not such a report, or does not have two seeds of two conditions.
    """
    try:
        report = json.loads(file.read_text())
        runs = [parse(json.dumps(row)) for row in report["rows"]]
        found = spread_of(by_condition([r for r in runs if isinstance(r, Run)]), int(report["settings"]["tokens"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError("earlier", str(file), f"give a report of bench credit --json: {error!r}") from error
    if found is None:
        raise ConfigError("earlier", str(file), f"it has no two seeds of {BASELINE} and of another condition")
    return found


def chosen_rates(runs: Sequence[Run], rates: Sequence[float], budget: int) -> dict[str, float]:
    """Choose the learning rate of each condition by the highest primary metric, mean over the tuning seeds.

    The rule is the same for all conditions. Among equal rates it takes the lowest.

    Args:
        runs: runs of the tuning seeds alone.
        rates: the rates that were tried.
        budget: tokens of a run.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        tried = found.setdefault(run.condition, {rate: [] for rate in sorted(rates)})
        tried[run.learning_rate].append(budget_mean(run.tokens, run.solve, budget))
    return {name: _best(tried) for name, tried in found.items()}


def _best(tried: Mapping[float, Sequence[float]]) -> float:
    levels = {rate: fmean(figures) for rate, figures in tried.items() if figures}
    # `max` returns the first of equal ones, which is the lowest rate.
    return max(levels, key=lambda rate: levels[rate])
