"""What a number of seeds can show: Student's tails without tables, the smallest difference, and Holm's correction.

All of it is about differences paired by seed, whose mean is held against 0 by a two-sided t test.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp, lgamma, log, sqrt
from statistics import NormalDist, fmean, stdev

ALPHA = 0.05
"""How often a test may find a difference where there is none, two-sided."""
POWER = 0.8
"""How often it is to find one of the size that is asked for."""
_STEPS = 800
_NORMAL = NormalDist()


def beyond(t: float, freedom: int, shift: float = 0.0) -> float:
    """P(T > t) for Student's t with `freedom` >= 1 degrees of freedom; noncentral with `shift`.

    T = (Z + shift) / S with S^2 chi-square over its degrees of freedom, so P is the mean of P(Z > t s - shift) over the
    density of S, by Simpson's rule. Right to 1e-6 for one degree of freedom, better for more.
    """
    # The density of S in x = log S: no corner at 0, and its tails are short on both sides.
    middle = freedom * (log(freedom) - log(2)) / 2 - lgamma(freedom / 2) + log(2)
    low, high = -40.0 / freedom, 3.0 / sqrt(freedom)

    def height(x: float) -> float:
        return exp(middle + freedom * x - freedom * exp(2 * x) / 2) * (1 - _NORMAL.cdf(t * exp(x) - shift))

    return _simpson(height, low, high)


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t test of one difference a seed, two at least; 1 where all are 0."""
    spread = stdev(differences)
    if not spread:
        return 0.0 if fmean(differences) else 1.0
    t = abs(fmean(differences)) / (spread / sqrt(len(differences)))
    return min(1.0, 2 * beyond(t, len(differences) - 1))


def critical(freedom: int, alpha: float = ALPHA) -> float:
    """The t that a two-sided test at `alpha` rejects beyond."""
    return _root(lambda t: alpha / 2 - beyond(t, freedom), 1000.0)


def smallest_difference(spread: float, seeds: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest true mean difference that the test finds with probability `power`, in the unit of `spread`.

    Args:
        spread: standard deviation over seeds of a difference paired by seed, >= 0.
        seeds: pairs, >= 2.
        alpha: level of the two-sided test.
        power: wanted, in (alpha, 1).
    """
    freedom = seeds - 1
    least = critical(freedom, alpha)

    def found(shift: float) -> float:
        # Beyond the critical value on either side; the other side's share is 0 for any shift of interest.
        return beyond(least, freedom, shift) + 1 - beyond(-least, freedom, shift) - power

    return spread / sqrt(seeds) * _root(found, 1000.0)


def pooled(spreads: Sequence[tuple[float, int]]) -> float:
    """One standard deviation of several, each with the number of seeds it is over (>= 2): root of the mean variance,
    weighted by degrees of freedom."""
    return sqrt(sum(s * s * (n - 1) for s, n in spreads) / sum(n - 1 for _, n in spreads))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Each p adjusted for all that were looked at (Holm 1979): below alpha it is a finding at that level for all.

    The smallest of m is multiplied by m, the next by m - 1, and so on, and none is smaller than one before it.
    """
    adjusted: dict[str, float] = {}
    so_far = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = so_far
    return {name: adjusted[name] for name in p_values}


def _simpson(height: Callable[[float], float], low: float, high: float) -> float:
    step = (high - low) / _STEPS
    inner = sum((4 if n % 2 else 2) * height(low + n * step) for n in range(1, _STEPS))
    return step / 3 * (height(low) + inner + height(high))


def _root(rising: Callable[[float], float], high: float) -> float:
    """Where a function that rises from below 0 passes it, between 0 and `high`."""
    low = 0.0
    while high - low > 1e-7 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
