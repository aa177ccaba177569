"""What is compared: estimators under three reward tables, other penalties for errors, rollouts several steps old under
three corrections, and blocks in place of lines."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from repl_rl.credit.rewards import NO_SHAPING, RewardTable
from repl_rl.errors import ConfigError

ESTIMATORS = ("outcome", "process", "two_stream", "return_to_go", "state_anchor")
PENALTIES = RewardTable()
"""Lines in error cost something; nothing else counts."""
SHAPINGS: MappingProxyType[str, RewardTable] = MappingProxyType(
    {"none": NO_SHAPING, "penalty": PENALTIES, "gated": RewardTable(gated=True, ok=0.1)}
)
"""`gated`: the penalties, and as much again for each line that ran, which counts only in a rollout that solved."""
BASELINE = "outcome/none"
Way = Literal["lines", "fenced"]
"""How a rollout goes: line by line in the console, or with code between fences."""
SAME_AS: MappingProxyType[str, str] = MappingProxyType(
    dict.fromkeys(("outcome/penalty", "outcome/gated", "two_stream/none", "process/none"), BASELINE)
)
"""Cells that are another one by definition: `outcome` reads no line rewards, and without any `two_stream` and `process`
are it."""
AS_GIVEN = "two_stream(given='as_given')"
"""Adds what lines are given to their advantages as it is."""
FIXED_PENALTY = 0.6
"""What an entry of -0.1 takes off the advantage of its line in `two_stream`."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One cell of the comparison."""

    name: str
    estimator: str = "outcome"
    rewards: RewardTable = field(default_factory=lambda: NO_SHAPING)
    way: Way = "lines"
    line_rewards: tuple[str, ...] = ()
    """As `TrainerConfig.line_rewards`."""
    potential: str = ""
    """As `TrainerConfig.potential`."""
    ahead: int = 0
    importance: str = "token_truncate"
    """Both as in `TrainerConfig`."""


MERGED = (
    Condition("merged_prefixes/none", "merged_prefixes"),
    Condition("merged_prefixes/penalty", "merged_prefixes", PENALTIES),
    Condition("merged_states/none", "merged_prefixes(by='states')"),
    Condition("merged_difference/none", "merged_prefixes(form='difference')"),
)
"""Credit from lines that coincide."""
ERRORS = (
    Condition("errors/syntax", "two_stream", replace(NO_SHAPING, syntax_error=PENALTIES.syntax_error)),
    Condition("errors/exception", "two_stream", replace(NO_SHAPING, exception=PENALTIES.exception)),
    Condition("errors/first", AS_GIVEN, line_rewards=(f"repl_rl.credit.errors:first_of_streak={FIXED_PENALTY}",)),
    Condition("errors/spared", "repl_rl.credit.errors:spared", PENALTIES),
    Condition("errors/potential", AS_GIVEN, potential=f"repl_rl.credit.rewards:broken={FIXED_PENALTY}"),
)
"""Other ways to have an error cost something, each as much as `two_stream/penalty` takes for one: of one class alone,
only the first of a streak, only where another rollout did without, and paid back when it is mended."""
LEADS = (1, 2, 4, 8)
CORRECTIONS = ("token_truncate", "token_mask", "token_band")
AGED = tuple(
    Condition(f"ahead_{ahead}/{importance}", ahead=ahead, importance=importance)
    for ahead in LEADS
    for importance in CORRECTIONS
)
"""Rollouts that run so many steps ahead of the update, with the outcome alone. The ratios of fresh ones are 1, so that
all corrections are `outcome/none` there."""


def _all() -> tuple[Condition, ...]:
    cells = ((f"{estimator}/{name}", estimator, table) for estimator in ESTIMATORS for name, table in SHAPINGS.items())
    lines = (Condition(name, estimator, table) for name, estimator, table in cells if name not in SAME_AS)
    return (*lines, *MERGED, *ERRORS, *AGED, Condition("fenced", way="fenced"))


CONDITIONS = _all()


def effects() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Cells taken together, and those that they are compared with, cell by cell: single cells differ by little."""
    dense = tuple(estimator for estimator in ESTIMATORS if estimator != "outcome")
    played = {name: tuple(f"{name}/{s}" for s in SHAPINGS if f"{name}/{s}" not in SAME_AS) for name in dense}
    shaped = {
        f"{shaping} in place of none": (
            tuple(f"{name}/{shaping}" for name in dense),
            tuple(SAME_AS.get(f"{name}/none", f"{name}/none") for name in dense),
        )
        for shaping in SHAPINGS
        if shaping != "none"
    }
    against = {f"{name} in place of outcome": (cells, (BASELINE,)) for name, cells in played.items()}
    everything = tuple(cell for cells in played.values() for cell in cells)
    return {"line credit of any kind": (everything, (BASELINE,)), **against, **shaped}


def conditions(names: Sequence[str] = ()) -> tuple[Condition, ...]:
    """The conditions of these names, in their own order; all of them without names.

    Raises:
        ConfigError: there is no such condition; a cell that equals another one is refused by that one's name.
    """
    for name in names:
        if name in SAME_AS:
            raise ConfigError("condition", name, f"it is the same as {SAME_AS[name]} by definition; name that one")
        if name not in {condition.name for condition in CONDITIONS}:
            raise ConfigError("condition", name, f"choose among {', '.join(c.name for c in CONDITIONS)}")
    return tuple(condition for condition in CONDITIONS if not names or condition.name in names)
