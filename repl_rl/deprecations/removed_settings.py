"""Settings and components that this version no longer has.

`config.toml` of an older run has every setting of its version. A removed setting at its neutral value, which has no
effect, is ignored. Any other value is an error that gives the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from repl_rl.errors import ConfigError


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

_ANNEALING = "no experiment showed a gain of fading line rewards out; leave it out"

REMOVED: Mapping[str, Removed] = {
    "learning.observation_weight": Removed(0.0, _OBSERVATION_LOSS),
    "trainer.anneal_steps": Removed(0, _ANNEALING),
    "trainer.fade_steps": Removed(0, _ANNEALING),
    "trainer.observation_weight": Removed(0.0, _OBSERVATION_LOSS),
    "trainer.rewards.gated": Removed(
        False, "rewards for lines that ran showed no gain (benchmarks/results/credit.md); leave it out"
    ),
}
"""Removed settings by dotted key."""


_ERRORS_PAGE = "see docs/rewards.md for those that did"
_NO_GAIN = "no experiment of this project used it, and we know of no gain of it here; choose another"
REMOVED_TYPES: Mapping[str, str] = {
    "bnpo": "it is dapo with the mean of each process alone; choose dapo",
    "merged_prefixes": "its gain was not found again on other seeds (docs/credit.md); choose outcome or two_stream",
    "repl_rl.credit.advantage_estimators:two_stream_avoidable_errors": f"it showed no gain; {_ERRORS_PAGE}",
    "repl_rl.credit.advantage_estimators:spared": f"it showed no gain; {_ERRORS_PAGE}",
    "repl_rl.credit.errors:spared": f"it showed no gain; {_ERRORS_PAGE}",
    **dict.fromkeys(
        ("line_truncate", "line_mask", "sequence_truncate", "sequence_mask"),
        "ratios of lines lost up to 85 points with stale rollouts and gained nothing with fresh ones "
        "(benchmarks/results/update.md); choose token_truncate",
    ),
    **dict.fromkeys(("rmsprop", "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"), _NO_GAIN),
    "paged_adamw_32bit": "choose paged_adamw_8bit, which takes less memory",
    **dict.fromkeys(("polynomial", "cosine_with_restarts", "inverse_sqrt", "cosine_warmup_with_min_lr"), _NO_GAIN),
}
"""Removed component -> why it was removed, and what to use instead; the end of an error message."""


def refuse_removed_type(thing: str, name: str) -> None:
    """Refuse a component that this version no longer has.

    Raises:
        ConfigError: `name` is such a component of the setting `thing`.
    """
    if name in REMOVED_TYPES:
        raise ConfigError(thing, name, f"this version no longer has it: {REMOVED_TYPES[name]}")


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
