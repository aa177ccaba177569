"""What is settled before an experiment runs, and by rules: how much it can show, and which learning rates it uses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from repl_rl.errors import ConfigError
from repl_rl.lab.credit.conditions import BASELINE, Condition
from repl_rl.lab.credit.power import ALPHA, POWER, smallest_difference
from repl_rl.lab.credit.rows import Run, parse
from repl_rl.lab.credit.statistics import budget_mean, by_condition, spread_of

SPREAD = 0.022
"""Deviation over seeds of a difference of the primary figure, paired by seed: that of the earlier experiment's cells
(docs/credit.json), pooled, for want of a better one."""


@dataclass(frozen=True, slots=True)
class Power:
    """How small a difference an experiment can find, in shares of rollouts solved."""

    seeds: int
    spread: float
    """Deviation over seeds of a difference paired by seed."""
    source: str
    """Where that comes from."""
    comparisons: int
    """Conditions that are held against the baseline."""
    smallest: float | None
    """Found in 80 of 100 experiments by one paired t test, two-sided, at 5 %; None: one seed finds nothing."""
    smallest_corrected: float | None
    """The same where the test is the strictest of Holm's correction for all comparisons."""

    def __str__(self) -> str:
        """In a sentence."""
        if self.smallest is None or self.smallest_corrected is None:
            return "one seed: no difference can be told from chance"
        return (
            f"{self.seeds} seeds detect a difference of {100 * self.smallest:.1f} points (paired t, two-sided "
            f"{ALPHA:.0%}, power {POWER:.0%}), {100 * self.smallest_corrected:.1f} as the strictest of "
            f"{self.comparisons} comparisons; spread between seeds {100 * self.spread:.1f} points, {self.source}"
        )


def power(conditions: Sequence[Condition], seeds: int, spread: float, source: str) -> Power:
    """The power of an experiment with these conditions and so many seeds (>= 1)."""
    count = max(1, sum(c.name not in (BASELINE, "fenced") for c in conditions))
    smallest = [smallest_difference(spread, seeds, ALPHA / n) if seeds > 1 else None for n in (1, count)]
    return Power(seeds, spread, source, count, *smallest)


def earlier_spread(file: Path) -> float:
    """The pooled spread of the differences in a report that `bench credit --json` wrote.

    Raises:
        ConfigError: it is no such report, or has no two seeds of two conditions.
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
    """The learning rate of each condition: that of the highest primary figure, mean over the tuning seeds.

    The rule is the same for all: of equal ones the lowest, and nothing else is looked at.

    Args:
        runs: of the tuning seeds alone.
        rates: what they were tried with.
        budget: tokens of a run.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        tried = found.setdefault(run.condition, {rate: [] for rate in sorted(rates)})
        tried[run.learning_rate].append(budget_mean(run.tokens, run.solve, budget))
    return {name: _best(tried) for name, tried in found.items()}


def _best(tried: Mapping[float, Sequence[float]]) -> float:
    levels = {rate: fmean(figures) for rate, figures in tried.items() if figures}
    return max(levels, key=lambda rate: levels[rate])  # the first of equal ones
