"""Settings that this version no longer has.

`config.toml` of an older run has every setting of its version. A removed setting at its neutral value, which has no
effect, is ignored. Any other value is an error that gives the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Removed:
    """A removed setting.

    Attributes:
        neutral: the value that has the same effect as no setting.
        reason: why it was removed, and what to use instead; the end of an error message.
    """

    neutral: object
    reason: str


_OBSERVATION_LOSS = (
    "a loss on what the console prints never raised the solve rate (benchmarks/results/echo.json); leave it out"
)

REMOVED: Mapping[str, Removed] = {
    "learning.observation_weight": Removed(0.0, _OBSERVATION_LOSS),
    "trainer.observation_weight": Removed(0.0, _OBSERVATION_LOSS),
}
"""Removed settings by dotted key."""


def without_removed(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the TOML `table` without removed settings at their neutral values."""
    kept: dict[str, object] = {}
    for key, value in table.items():
        removed = REMOVED.get(prefix + key)
        if isinstance(value, Mapping):
            kept[key] = without_removed(value, f"{prefix}{key}.")
        elif removed is None or value != removed.neutral:
            kept[key] = value
    return kept
