"""Conditions of the experiment: estimators under two reward tables, other penalties for errors, staleness, blocks.

Stale rollouts are several steps old, under three corrections. Blocks replace lines.

Starting points of runs: a policy, the tasks to train on, and the limits of a rollout for each way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from benchmarks.credit import long_problems as long
from repl_rl.credit.rewards import NO_SHAPING, RewardTable
from repl_rl.errors import ConfigError
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.tasks import BUILTIN, Split, Task
from repl_rl.tasks.generated_tasks import generate

ESTIMATORS = ("outcome", "process", "two_stream", "return_to_go", "state_anchor")
PENALTIES = RewardTable()
"""Reward table with a cost for lines in error, and nothing else."""
SHAPINGS: MappingProxyType[str, RewardTable] = MappingProxyType({"none": NO_SHAPING, "penalty": PENALTIES})
"""Reward tables by name."""
REPORTED_SHAPINGS = (*SHAPINGS, "gated")
"""Reward tables of the published results. `gated` was the penalties, and as much reward for each line that ran, if the
rollout solved its task. It showed no gain, and repl_rl 0.3 is the last version that has it.
"""
BASELINE = "outcome/none"
Way = Literal["lines", "fenced"]
"""Way of a rollout: line by line in the console, or with code between fences."""
SAME_AS: MappingProxyType[str, str] = MappingProxyType(
    dict.fromkeys(("outcome/penalty", "outcome/gated", "two_stream/none", "process/none"), BASELINE)
)
"""Conditions that equal another one by definition.

`outcome` reads no line rewards. Without line rewards, `two_stream` and `process` equal `outcome`.
"""
AS_GIVEN = "two_stream(given='as_given')"
"""Estimator that adds the given rewards of lines unchanged to their advantages."""
FIXED_PENALTY = 0.6
"""Amount that an entry of -0.1 takes off the advantage of its line in `two_stream`."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One cell of the comparison."""

    name: str
    estimator: str = "outcome"
    rewards: RewardTable = field(default_factory=lambda: NO_SHAPING)
    way: Way = "lines"
    line_rewards: Mapping[str, float] = field(default_factory=dict, hash=False)
    """As `TrainerConfig.line_rewards`."""
    potentials: Mapping[str, float] = field(default_factory=dict, hash=False)
    """As `TrainerConfig.potentials`."""
    ahead: int = 0
    importance: str = "token_truncate"
    """As in `TrainerConfig`, like `ahead`."""
    removed: bool = False
    """True if only repl_rl 0.3 and older can train it: it showed no gain, and its results stay published."""


MERGED = tuple(
    Condition(name, removed=True)
    for name in ("merged_prefixes/none", "merged_prefixes/penalty", "merged_states/none", "merged_difference/none")
)
"""Conditions with credit from lines that coincide in several rollouts."""

ERRORS = (
    Condition("errors/syntax", "two_stream", replace(NO_SHAPING, syntax_error=PENALTIES.syntax_error)),
    Condition("errors/exception", "two_stream", replace(NO_SHAPING, exception=PENALTIES.exception)),
    Condition(
        "errors/first",
        AS_GIVEN,
        line_rewards={"first_error": FIXED_PENALTY},
    ),
    Condition("errors/spared", removed=True),
    Condition("errors/potential", AS_GIVEN, potentials={"error_potential": FIXED_PENALTY}),
)
"""Other ways to penalize an error, each as much as `two_stream/penalty` for one error.

Penalized are errors of one class alone, only the first of a streak, or only those that another rollout avoided. With a
potential the penalty is paid back once the error is fixed.
"""
LEADS = (1, 2, 4, 8)
CORRECTIONS = ("token_truncate", "token_mask", "token_band")
AGED = tuple(
    Condition(f"ahead_{ahead}/{importance}", ahead=ahead, importance=importance)
    for ahead in LEADS
    for importance in CORRECTIONS
)
"""Conditions with rollouts that many steps ahead of the update, with the outcome alone.

Fresh rollouts have ratio 1, so for them every correction equals `outcome/none`.
"""


def _all() -> tuple[Condition, ...]:
    cells = (
        Condition(f"{estimator}/{name}", estimator, SHAPINGS.get(name, NO_SHAPING), removed=name not in SHAPINGS)
        for estimator in ESTIMATORS
        for name in REPORTED_SHAPINGS
    )
    # A cell that equals another one by definition is not played twice.
    lines = (condition for condition in cells if condition.name not in SAME_AS)
    return (*lines, *MERGED, *ERRORS, *AGED, Condition("fenced", way="fenced"))


CONDITIONS = _all()


def effects() -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return sets of cells and those that they are compared with, pairwise, because single cells differ by little."""
    dense = tuple(estimator for estimator in ESTIMATORS if estimator != "outcome")
    played = {name: tuple(f"{name}/{s}" for s in REPORTED_SHAPINGS if f"{name}/{s}" not in SAME_AS) for name in dense}
    shaped = {
        f"{shaping} in place of none": (
            tuple(f"{name}/{shaping}" for name in dense),
            tuple(SAME_AS.get(f"{name}/none", f"{name}/none") for name in dense),
        )
        for shaping in REPORTED_SHAPINGS
        if shaping != "none"
    }
    against = {f"{name} in place of outcome": (cells, (BASELINE,)) for name, cells in played.items()}
    # Pool all cells with line credit for the comparison with the most runs.
    everything = tuple(cell for cells in played.values() for cell in cells)
    return {"line credit of any kind": (everything, (BASELINE,)), **against, **shaped}


def conditions(names: Sequence[str] = ()) -> tuple[Condition, ...]:
    """Return the conditions of these names, in their order of definition; without names all of them.

    Raises:
        ConfigError: no condition has that name; a cell that equals another one is refused with that one's name.
    """
    for name in names:
        if name in SAME_AS:
            raise ConfigError("condition", name, f"it is the same as {SAME_AS[name]} by definition; name that one")
        if name not in {condition.name for condition in CONDITIONS}:
            raise ConfigError("condition", name, f"choose among {', '.join(c.name for c in CONDITIONS)}")
    return tuple(condition for condition in CONDITIONS if not names or condition.name in names)


def refuse_removed(chosen: Sequence[Condition]) -> None:
    """Refuse conditions that this version cannot train.

    Raises:
        ConfigError: names the first one, and the others, which can be trained.
    """
    for condition in chosen:
        if condition.removed:
            others = " ".join(other.name for other in chosen if not other.removed)
            remedy = f"repl_rl 0.3 is the last version that can train it; leave it out: --conditions {others}"
            raise ConfigError("condition", condition.name, remedy)


Start = Literal["bundled", "failing", "slipping", "shown"]
Drawn = Callable[[Sequence[str], Split, int], tuple[Task, ...]]
"""Function that returns `count` tasks of a split, of the given families."""
QUICKSTART = BUILTIN["quickstart"]
LONG_LIMITS = RolloutLimits(max_lines=16)
_FENCED_LIMITS = RolloutLimits(max_line_tokens=128)
"""Limits of fenced rollouts: a block counts as one line and holds several."""
_SHOWN_LIMITS = RolloutLimits(max_lines=6, max_line_tokens=32, max_observation_tokens=64)
_SHOWN_FENCED_LIMITS = RolloutLimits(max_lines=3, max_line_tokens=64, max_observation_tokens=64)
"""Limits with at most as many sampled tokens as line by line."""
_USUAL: MappingProxyType[Way, RolloutLimits] = MappingProxyType({"lines": RolloutLimits(), "fenced": _FENCED_LIMITS})
_SHOWN: MappingProxyType[Way, RolloutLimits] = MappingProxyType(
    {"lines": _SHOWN_LIMITS, "fenced": _SHOWN_FENCED_LIMITS}
)
_LONG: MappingProxyType[Way, RolloutLimits] = MappingProxyType({"lines": LONG_LIMITS, "fenced": _FENCED_LIMITS})


def _draw_tasks(families: Sequence[str], split: Split, count: int) -> tuple[Task, ...]:
    return generate(families or QUICKSTART, split, count, seed=0)


def _draw_long_tasks(families: Sequence[str], split: Split, count: int) -> tuple[Task, ...]:
    return long.tasks(split, count, seed=0)


@dataclass(frozen=True, slots=True)
class Beginning:
    """One starting point."""

    train_tasks: int = 4096
    tasks: Drawn = _draw_tasks
    limits: Mapping[Way, RolloutLimits] = field(default_factory=lambda: _USUAL)
    context_tokens: int | None = None
    """Longest rollout with its prompt, tokens; None takes the policy's context length."""
    taught: frozenset[Way] = frozenset({"lines", "fenced"})
    """Ways for which the policy is fine-tuned first."""


BEGINNINGS: MappingProxyType[Start, Beginning] = MappingProxyType(
    {
        "bundled": Beginning(taught=frozenset({"fenced"})),
        "failing": Beginning(),
        "slipping": Beginning(tasks=_draw_long_tasks, limits=_LONG),
        "shown": Beginning(train_tasks=1024, limits=_SHOWN, context_tokens=640),
    }
)
