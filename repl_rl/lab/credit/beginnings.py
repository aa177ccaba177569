"""Starting points of runs: a policy, the tasks to train on, and the limits of a rollout for each way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from repl_rl.lab.credit import long
from repl_rl.lab.credit.conditions import Way
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.tasks import BUILTIN, Split, Task
from repl_rl.tasks.generated_tasks import generate

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


def _drawn(families: Sequence[str], split: Split, count: int) -> tuple[Task, ...]:
    return generate(families or QUICKSTART, split, count, seed=0)


def _drawn_long(families: Sequence[str], split: Split, count: int) -> tuple[Task, ...]:
    return long.tasks(split, count, seed=0)


@dataclass(frozen=True, slots=True)
class Beginning:
    """One starting point."""

    train_tasks: int = 4096
    tasks: Drawn = _drawn
    limits: Mapping[Way, RolloutLimits] = field(default_factory=lambda: _USUAL)
    context_tokens: int | None = None
    """Longest rollout with its prompt, tokens; None takes the policy's context length."""
    taught: frozenset[Way] = frozenset({"lines", "fenced"})
    """Ways for which the policy is fine-tuned first."""


BEGINNINGS: MappingProxyType[Start, Beginning] = MappingProxyType(
    {
        "bundled": Beginning(taught=frozenset({"fenced"})),
        "failing": Beginning(),
        "slipping": Beginning(tasks=_drawn_long, limits=_LONG),
        "shown": Beginning(train_tasks=1024, limits=_SHOWN, context_tokens=640),
    }
)
