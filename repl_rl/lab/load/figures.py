"""Summary statistics of times."""

import math
from collections.abc import Mapping, Sequence


def quantiles(values: Sequence[float]) -> Mapping[str, float]:
    """Return `count`, `p50`, `p99` and `max`, by nearest rank, of measured values. Empty input gives only `count`."""
    if not values:
        return {"count": 0}
    ranked = sorted(values)
    at = {name: ranked[math.ceil(share * len(ranked)) - 1] for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {"count": len(ranked), **at, "max": ranked[-1]}
