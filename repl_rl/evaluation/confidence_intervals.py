"""Estimates with 95 % confidence intervals. All are deterministic: the bootstrap has a fixed seed."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from repl_rl.errors import ConfigError

_Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""
_RESAMPLES = 2000
_MIN_BOOTSTRAP = 20
"""Number of values below which no bootstrap is used. With few values it is too narrow if they happen to agree."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


def wilson(solved: int, count: int) -> Interval:
    """Return the share `solved / count` with the score interval of E. B. Wilson (1927).

    Unlike the textbook interval it stays within [0, 1], and it is not empty if none or all are solved.

    Raises:
        ConfigError: `count` is below 1, or `solved` is not within 0 to `count`.
    """
    if count < 1 or not 0 <= solved <= count:
        raise ConfigError("solved of count", (solved, count), "give a count of at least 1 and solved within 0 to it")
    return _compute_score_interval(solved / count, count)


def _compute_score_interval(share: float, count: int) -> Interval:
    """Return the score interval of a share of `count` (>= 1)."""
    scale = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / scale
    half = _Z / scale * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return Interval(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


def pass_at_k(solved: int, count: int, k: int) -> float:
    """Return the unbiased pass@k, the probability that at least one of `k` rollouts of a task is right.

    With `solved` of `count` rollouts right, it is 1 - C(count - solved, k) / C(count, k), the estimator of M. Chen et
    al. (2021), "Evaluating large language models trained on code". 1 - (1 - solved / count)^k would be biased.

    Raises:
        ConfigError: `k` is not within 1 to `count`, or `solved` not within 0 to `count`.
    """
    if not 1 <= k <= count or not 0 <= solved <= count:
        raise ConfigError("solved, count, k", (solved, count, k), "give 1 <= k <= count and 0 <= solved <= count")
    return 1.0 - math.comb(count - solved, k) / math.comb(count, k)


def compute_bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the mean of one value per task, with the percentile interval of B. Efron (1979).

    Tasks are drawn with replacement. Drawing whole tasks keeps the rollouts of a task together, because they are not
    independent.

    Raises:
        ConfigError: there are no values.
    """
    if not values:
        raise ConfigError("values", 0, "an estimate needs at least 1")
    rng = random.Random(seed)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    index = round(0.025 * _RESAMPLES)
    mean = fmean(values)
    # In tiny samples the mean may lie outside the percentiles by a rounding error.
    return Interval(mean, min(mean, means[index]), max(mean, means[-1 - index]))


def compute_bounded_mean_interval(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> Interval:
    """Return the mean of one value per task, each within `low` to `high`, with an interval that is valid for few tasks.

    - Each value is `low` or `high`: Wilson's interval, scaled to the bounds, for any number of values.
    - At least 20 values, not all equal: a bootstrap.
    - Fewer values, not all equal: Wilson's interval of a share with the same mean, scaled to the bounds. It is not too
      narrow, because values at the bounds spread most among all values with a given mean.
    - One value, or all values equal: unseen tasks may have other values, up to a bound. Their share is at most the
      upper end of Wilson's interval for 0 of this number of tasks.

    Raises:
        ConfigError: there are no values, or one is out of bounds.
    """
    if not values or not low <= min(values) <= max(values) <= high:
        raise ConfigError("values", list(values)[:5], f"give at least 1, each within {low:g} to {high:g}")
    mean, width = fmean(values), high - low
    bounds = set(values) <= {low, high}
    # All equal: bound the share of other tasks, each as far away as possible.
    if min(values) == max(values) and not bounds:
        differing_share = _compute_score_interval(0.0, len(values)).high
        return Interval(mean, mean - differing_share * (mean - low), mean + differing_share * (high - mean))
    if len(values) >= _MIN_BOOTSTRAP and not bounds:
        return compute_bootstrap_interval(values)
    # Scale to [0, 1], where the mean is a share.
    score = _compute_score_interval((mean - low) / width, len(values))
    return Interval(mean, min(mean, low + width * score.low), max(mean, low + width * score.high))


def compute_sign_test(better: int, worse: int) -> float:
    """Return the two-sided p-value of the exact sign test.

    `better` and `worse` are the numbers of tasks with a positive and with a negative difference. The p-value is
    the probability that chance alone gives counts at least this unequal. With one rollout per task, the test is the
    exact form of Q. McNemar's test (1947). The p-value is 1.0 if no task differs.

    Raises:
        ConfigError: a count is negative.
    """
    if better < 0 or worse < 0:
        raise ConfigError("better, worse", (better, worse), "give counts of at least 0")
    count = better + worse
    tail = sum(math.comb(count, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / (1 << count))
