"""From the rewards of a group to one advantage a line.

An estimator is a function `GroupRewards -> advantages_G_L`, chosen by name or as `module:function`. It sees no token.
Everything is float32, in the order of operations of TRL 1.16, so that `outcome` equals TRL's advantage bit for bit.

Rules that hold for each of them: a rollout that may not be trained on has no line here and a nan outcome, so it takes
no part in any baseline; a group of one, or without variance, gives zeros.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from repl_rl.errors import ConfigError, UserCodeError

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it; reward units. TRL's value."""

Advantages = tuple[tuple[float, ...], ...]
"""One number a line, shape (G, L) with L of each rollout; dimensionless."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What the rollouts of one group earned, in reward units."""

    outcomes_G: tuple[float | None, ...]
    """The outcome of each rollout; None: not graded, so it is in no baseline."""
    rewards_G_L: tuple[tuple[float, ...], ...]
    """One reward a line; empty for a rollout that may not be trained on."""

    def __post_init__(self) -> None:
        if len(self.outcomes_G) != len(self.rewards_G_L):
            raise UserCodeError(
                f"a group has {len(self.outcomes_G)} outcomes and {len(self.rewards_G_L)} rows of line rewards; "
                "give one of each per rollout"
            )
        for reward in (r for rewards_L in self.rewards_G_L for r in rewards_L):
            if not math.isfinite(reward):
                raise UserCodeError(f"a line reward is {reward!r}; a reward is a finite number")


Estimator = Callable[[GroupRewards], Advantages]


def normalise(values: Tensor) -> Tensor:
    """(x - mean) / (std + EPSILON) of a 1-D float32 tensor; nan entries are left out of both and become 0.

    The standard deviation is the unbiased one. One value, or none, gives zeros. The operations and their order are
    those of TRL 1.16.
    """
    mean = torch.nanmean(values, dim=0, keepdim=True)
    variance = torch.nanmean((values - mean) ** 2, dim=0, keepdim=True)
    count = (~torch.isnan(values)).sum(dim=0, keepdim=True)
    variance *= torch.where(count > 1, count / (count - 1), torch.nan)
    return torch.nan_to_num((values - mean) / (torch.sqrt(variance) + EPSILON), nan=0.0)


def outcome(group: GroupRewards) -> Advantages:
    """GRPO: A(i, l) = (R(i) - mean R) / (std R + EPSILON) for each line l. Line rewards are not used.

    Source: DeepSeekMath (arXiv 2402.03300), outcome supervision, as TRL computes it.
    """
    scores_G = _outcome_scores(group)
    return tuple((score,) * len(rewards_L) for score, rewards_L in zip(scores_G, group.rewards_G_L, strict=True))


def two_stream(group: GroupRewards, *, line_weight: float = 0.3) -> Advantages:
    """A(i, l) = A_outcome(i) + line_weight * A_line(i, l): outcome and line credit, normalised separately.

    A_line(i, l) = (r(i, l) - mean r) / (std r + EPSILON), mean and deviation over all lines of the group. So a line's
    reward moves that line's tokens against all the other lines, and not the rollout's other lines with it.
    """
    scores_G = _outcome_scores(group)
    lines = iter(normalise(_flat(group.rewards_G_L)).tolist())
    return tuple(
        tuple(score + line_weight * next(lines) for _ in rewards_L)
        for score, rewards_L in zip(scores_G, group.rewards_G_L, strict=True)
    )


def _outcome_scores(group: GroupRewards) -> list[float]:
    outcomes_G = torch.tensor([math.nan if r is None else r for r in group.outcomes_G], dtype=torch.float32)
    scores_G: list[float] = normalise(outcomes_G).tolist()
    return scores_G


def _flat(rewards_G_L: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([reward for rewards_L in rewards_G_L for reward in rewards_L], dtype=torch.float32)


ESTIMATORS: dict[str, Callable[..., Advantages]] = {"outcome": outcome, "two_stream": two_stream}


def estimator(name: str, **options: float | None) -> Estimator:
    """The estimator called `name`, or `module:function`, with its options bound; an option of None keeps its default.

    Raises:
        ConfigError: there is no such estimator, or an option has no effect on it.
    """
    function = ESTIMATORS.get(name) or _imported(name)
    given = {key: value for key, value in options.items() if value is not None}
    accepted = inspect.signature(function).parameters
    for key, value in given.items():
        if key not in accepted:
            raise ConfigError(f"{key} with estimator {name!r}", value, "that estimator has no such option; leave it out")
    return partial(checked, partial(function, **given), name)


def _imported(name: str) -> Callable[..., Advantages]:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError("estimator", name, f"choose one of {', '.join(ESTIMATORS)}, or give module:function")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError("estimator", name, f"it cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigError("estimator", name, "it is not a function")
    return function  # type: ignore[no-any-return]  # an import by name has no static type; `checked` tests its results


def checked(function: Estimator, name: str, group: GroupRewards) -> Advantages:
    """Call an estimator and hold it to its contract.

    Raises:
        UserCodeError: it raised, or gave other than one finite number a line.
    """
    try:
        advantages_G_L = tuple(tuple(float(value) for value in row) for row in function(group))
    except Exception as error:
        raise UserCodeError(f"estimator {name!r} raised {type(error).__name__}: {error}") from error
    expected = [len(rewards_L) for rewards_L in group.rewards_G_L]
    lengths = [len(row) for row in advantages_G_L]
    if lengths != expected:
        raise UserCodeError(f"estimator {name!r} gave {lengths} advantages for {expected} lines; give one per line")
    for value in (value for row in advantages_G_L for value in row):
        if not math.isfinite(value):
            raise UserCodeError(f"estimator {name!r} gave {value!r}; an advantage is a finite number")
    return advantages_G_L
