"""Statistical power of a number of seeds: Student's t distribution, the smallest difference, and Holm's correction.

All functions are about differences paired by seed, whose mean is compared with zero in a two-sided t test.
"""

from collections.abc import Callable, Mapping, Sequence
from math import exp, lgamma, log, sqrt
from statistics import NormalDist, fmean, stdev

ALPHA = 0.05
"""Probability that a two-sided test finds a difference although there is none."""
POWER = 0.8
"""Probability that a test finds a true difference of the requested size."""
_STEPS = 800
_NORMAL = NormalDist()


def beyond(t: float, freedom: int, shift: float = 0.0) -> float:
    """Return P(T > t) for Student's t with `freedom` >= 1 degrees of freedom; noncentral with `shift`.

    T = (Z + shift) / S with S^2 chi-square over its degrees of freedom. So P is the mean of P(Z > t s - shift) over the
    density of S, by Simpson's rule. It is accurate to 1e-6 for one degree of freedom, better for more.
    """
    # Integrate over x = log S, where the density has no corner at 0 and short tails on both sides.
    middle = freedom * (log(freedom) - log(2)) / 2 - lgamma(freedom / 2) + log(2)
    low, high = -40.0 / freedom, 3.0 / sqrt(freedom)

    def height(x: float) -> float:
        return exp(middle + freedom * x - freedom * exp(2 * x) / 2) * (1 - _NORMAL.cdf(t * exp(x) - shift))

    return _simpson(height, low, high)


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired t test of at least two differences, one per seed; 1 if all are 0."""
    spread = stdev(differences)
    if not spread:
        return 0.0 if fmean(differences) else 1.0
    t = abs(fmean(differences)) / (spread / sqrt(len(differences)))
    return min(1.0, 2 * beyond(t, len(differences) - 1))


def critical(freedom: int, alpha: float = ALPHA) -> float:
    """Return the critical t of a two-sided test at `alpha`."""
    return _root(lambda t: alpha / 2 - beyond(t, freedom), 1000.0)


def smallest_difference(spread: float, seeds: int, alpha: float = ALPHA, power: float = POWER) -> float:
    """Return the smallest true mean difference that the test finds with probability `power`, in the unit of `spread`.

    Args:
        spread: standard deviation over seeds of a difference paired by seed, >= 0.
        seeds: pairs, >= 2.
        alpha: level of the two-sided test.
        power: requested power, in (alpha, 1).
    """
    freedom = seeds - 1
    least = critical(freedom, alpha)

    def found(shift: float) -> float:
        # The test rejects on either side; the share of the other side is almost 0 for any shift of interest.
        return beyond(least, freedom, shift) + 1 - beyond(-least, freedom, shift) - power

    return spread / sqrt(seeds) * _root(found, 1000.0)


def pooled(spreads: Sequence[tuple[float, int]]) -> float:
    """Pool standard deviations, each with its number of seeds (>= 2): the root of the variances' mean.

    The mean is weighted by degrees of freedom.
    """
    return sqrt(sum(s * s * (n - 1) for s, n in spreads) / sum(n - 1 for _, n in spreads))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjust each p for all comparisons (Holm 1979); below alpha it is a finding at that level for all.

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
    """Return the root in 0 to `high` of a function that rises from below 0, by bisection."""
    low = 0.0
    while high - low > 1e-7 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
