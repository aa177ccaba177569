"""Rewards of the rollouts of a group, and the arithmetic that estimators share. No tokens are visible here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repl_rl.errors import UserCodeError

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, reward units. TRL uses the same value."""
OUTCOME_DEVIATION = 0.5
"""Divisor of summed shaping that is added to normalised outcomes: the largest deviation of values 0 and 1."""

Advantages = tuple[tuple[float, ...], ...]
"""One number per line, shape (G, L) with L of each rollout; dimensionless."""


@dataclass(frozen=True, slots=True)
class LineEarnings:
    """Reward of one line, in reward units, and the state before the line."""

    reward: float
    """Whole reward, including shaping."""
    shaping: float = 0.0
    """Part of the reward that the status table gave."""
    state: str | None = None
    """Name of the console state before the line, equal for equal states. None means unknown."""
    prefix: str | None = None
    """Name of everything before the line, equal for equal ids. None means unknown."""
    tokens: int = 0
    """Number of tokens that the policy sampled for the line; 0 means unknown."""

    def __post_init__(self) -> None:
        for reward in (self.reward, self.shaping):
            if not math.isfinite(reward):
                raise UserCodeError(f"a line reward is {reward!r}; a reward is a finite number")
        if self.tokens < 0:
            raise UserCodeError(f"a line has {self.tokens} tokens; count them, or give 0 where that is not known")

    @property
    def given(self) -> float:
        """Reward without shaping; exactly 0 if the line was given none."""
        return self.reward - self.shaping


@dataclass(frozen=True, slots=True)
class RolloutEarnings:
    """Rewards of one rollout, in reward units."""

    outcome: float | None
    """Outcome reward. None means not graded: the rollout is in no baseline of outcomes and adds nothing to a sum."""
    lines: tuple[LineEarnings, ...] = ()
    """Lines in order; empty for a rollout that may not be trained on."""

    def __post_init__(self) -> None:
        if self.outcome is not None and not math.isfinite(self.outcome):
            raise UserCodeError(f"an outcome is {self.outcome!r}; give a finite number, or None where none was graded")
        if not isinstance(self.lines, tuple):
            raise UserCodeError(f"the lines of a rollout are a {type(self.lines).__name__}; give a tuple")

    @property
    def rewards_L(self) -> tuple[float, ...]:
        """Reward of each line, including shaping."""
        return tuple(line.reward for line in self.lines)

    @property
    def shaping_L(self) -> tuple[float, ...]:
        """Part of each line's reward that the status table gave."""
        return tuple(line.shaping for line in self.lines)

    @property
    def tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(line.tokens for line in self.lines)


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of the rollouts of one group, which are the input of an estimator. Its rows have one value per line."""

    rollouts: tuple[RolloutEarnings, ...]
    bound: float = math.inf
    """Bound of shaping that is summed, > 0."""

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise UserCodeError(f"the bound of a group's shaping is {self.bound!r}; give a number above 0")
        for name in ("state", "prefix"):
            known = {getattr(line, name) is not None for rollout in self.rollouts for line in rollout.lines}
            if len(known) > 1:
                remedy = "give one to each line of a group, or to none"
                raise UserCodeError(f"the {name} of some lines is None and of others it is not; {remedy}")

    @classmethod
    def of(
        cls,
        outcomes_G: Sequence[float | None],
        rewards_G_L: Sequence[Sequence[float]],
        states_G_L: Sequence[Sequence[str]] = (),
        shaping_G_L: Sequence[Sequence[float]] = (),
        bound: float = math.inf,
        prefixes_G_L: Sequence[Sequence[str]] = (),
    ) -> "GroupRewards":
        """Create a group from rows, one row per rollout, with one value per line. () means unknown or not given.

        Raises:
            UserCodeError: rows, or values in them, are too few or too many, or not finite numbers.
        """
        lengths = [len(row) for row in rewards_G_L]
        parts = {"states": states_G_L, "shaping rewards": shaping_G_L, "prefixes": prefixes_G_L}
        for name, rows in parts.items():
            if rows and [len(row) for row in rows] != lengths:
                remedy = "give one of each per line"
                raise UserCodeError(f"a group has other numbers of {name} than of line rewards; {remedy}")
        if len(outcomes_G) != len(lengths):
            raise UserCodeError(
                f"a group has {len(outcomes_G)} outcomes and {len(lengths)} rows of line rewards; "
                "give one of each per rollout"
            )
        # Fill in the rows that were not given.
        nothing, unknown = [[0.0] * n for n in lengths], [[None] * n for n in lengths]
        rows_G = zip(rewards_G_L, shaping_G_L or nothing, states_G_L or unknown, prefixes_G_L or unknown, strict=True)
        earned_G = [tuple(map(LineEarnings, *rows)) for rows in rows_G]
        return cls(tuple(map(RolloutEarnings, outcomes_G, earned_G)), bound)

    @property
    def outcomes_G(self) -> tuple[float | None, ...]:
        """Outcome of each rollout; None if it is not graded."""
        return tuple(rollout.outcome for rollout in self.rollouts)

    @property
    def rewards_G_L(self) -> tuple[tuple[float, ...], ...]:
        """Reward of each line, including shaping."""
        return tuple(rollout.rewards_L for rollout in self.rollouts)

    @property
    def shaping_G_L(self) -> tuple[tuple[float, ...], ...]:
        """Part of each line's reward that the status table gave."""
        return tuple(rollout.shaping_L for rollout in self.rollouts)

    @property
    def given_G_L(self) -> tuple[tuple[float, ...], ...]:
        """Reward of each line without shaping; exactly 0 if the line was given none."""
        return tuple(tuple(line.given for line in rollout.lines) for rollout in self.rollouts)

    @property
    def states_G_L(self) -> tuple[tuple[str, ...], ...]:
        """Name of the console state before each line; () if unknown."""
        return _known(tuple(tuple(line.state for line in rollout.lines) for rollout in self.rollouts))

    @property
    def prefixes_G_L(self) -> tuple[tuple[str, ...], ...]:
        """Name of everything before each line; () if unknown."""
        return _known(tuple(tuple(line.prefix for line in rollout.lines) for rollout in self.rollouts))

    def shaping_to_go(self) -> list[tuple[float, ...]]:
        """Return the sum of shaping from each line on, within `bound`. One more error never increases it."""
        return [tuple(max(-self.bound, min(self.bound, s)) for s in to_go(row, 1.0)) for row in self.shaping_G_L]

    def plain(self) -> "GroupRewards":
        """Return the same group without any line reward."""
        return replace(self.each(lambda line: replace(line, reward=0.0, shaping=0.0)), bound=math.inf)

    def each(self, change: Callable[[LineEarnings], LineEarnings]) -> "GroupRewards":
        """Return the same group with every line changed."""
        rollouts = (replace(rollout, lines=tuple(map(change, rollout.lines))) for rollout in self.rollouts)
        return replace(self, rollouts=tuple(rollouts))


def _known(names_G_L: tuple[tuple[str | None, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Return the names of lines, or () if those of some line, and so of all, are unknown."""
    known = tuple(tuple(name for name in names_L if name is not None) for names_L in names_G_L)
    return known if known == names_G_L else ()


def normalise(values: Tensor) -> Tensor:
    """Return (x - mean) / (std + EPSILON) of a 1-D float32 tensor. nan entries are left out and become 0.

    The standard deviation is unbiased. One value, or none, gives zeros. The operations and their order are those of TRL
    1.16.
    """
    mean = torch.nanmean(values, dim=0, keepdim=True)
    variance = torch.nanmean((values - mean) ** 2, dim=0, keepdim=True)
    count = (~torch.isnan(values)).sum(dim=0, keepdim=True)
    # A single value has no deviation: it becomes nan here, and 0 below.
    variance *= torch.where(count > 1, count / (count - 1), torch.nan)
    return torch.nan_to_num((values - mean) / (torch.sqrt(variance) + EPSILON), nan=0.0)


def to_go(rewards_L: Sequence[float], discount: float) -> tuple[float, ...]:
    """Return the discounted sums from each line to the end."""
    returns: list[float] = []
    after = 0.0
    for reward in reversed(rewards_L):
        after = reward + discount * after
        returns.append(after)
    return tuple(reversed(returns))


def scores_of(values: Sequence[float], beside: Sequence[float] = ()) -> list[float]:
    """Normalise values together with further ones, and return their scores in order. Equal values give exact zeros."""
    together = [*values, *beside]
    if len(set(together)) < 2:
        # Their mean may differ from them in the last bit, and EPSILON would magnify that.
        return [0.0] * len(values)
    scores: list[float] = normalise(torch.tensor(together, dtype=torch.float32)).tolist()
    return scores[: len(values)]


def floored_scores(values: Sequence[float], beside: Sequence[float] = ()) -> list[float]:
    """Return (x - b) / (deviation + EPSILON), b = max(mean, 0), in order. Further values join mean and deviation.

    The deviation is the unbiased one around b. If the mean is at least 0, this is `scores_of`. If it is below 0,
    `scores_of` would score the smaller ones of several penalties above 0, and more lines would pay off.
    """
    together = [*values, *beside]
    if len(together) < 2 or math.fsum(together) >= 0:
        return scores_of(values, beside)
    deviation = math.sqrt(math.fsum(value * value for value in together) / (len(together) - 1))
    return [value / (deviation + EPSILON) for value in values]


def penalty_scores(values: Sequence[float]) -> list[float]:
    """Return values below 0 divided by their root mean square, or by OUTCOME_DEVIATION if that is larger, in order.

    They are compared with 0 and never with each other, so a small penalty next to large ones does not pay off. The
    divisor keeps small ones small, and keeps large ones from drowning normalised outcomes.
    """
    square = math.fsum(value * value for value in values) / len(values) if values else 0.0
    return [value / max(OUTCOME_DEVIATION, math.sqrt(square)) for value in values]


def outcome_scores(group: GroupRewards) -> list[float]:
    """Return the normalised outcome of each rollout, which is its advantage in GRPO, shape (G,)."""
    outcomes_G = torch.tensor([math.nan if r is None else r for r in group.outcomes_G], dtype=torch.float32)
    scores_G: list[float] = normalise(outcomes_G).tolist()
    return scores_G
