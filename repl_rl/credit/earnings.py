"""What the rollouts of a group earned, and the arithmetic that estimators share. It sees no token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repl_rl.errors import UserCodeError

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it; reward units. TRL's value."""
OUTCOME_DEVIATION = 0.5
"""What shaping that was added up is divided by beside normalised outcomes: the largest deviation of 0 and 1."""

Advantages = tuple[tuple[float, ...], ...]
"""One number a line, shape (G, L) with L of each rollout; dimensionless."""


@dataclass(frozen=True, slots=True)
class LineEarnings:
    """What one line earned, in reward units, and where it stood."""

    reward: float
    """All of it, shaping included."""
    shaping: float = 0.0
    """How much of it the status table gave."""
    state: str | None = None
    """A name of the console state that the line started from, equal for equal states; None: not known."""
    prefix: str | None = None
    """A name of all that stood before the line, equal for equal ids; None: not known."""
    tokens: int = 0
    """How many tokens the policy sampled for it; 0: not known."""

    def __post_init__(self) -> None:
        for reward in (self.reward, self.shaping):
            if not math.isfinite(reward):
                raise UserCodeError(f"a line reward is {reward!r}; a reward is a finite number")
        if self.tokens < 0:
            raise UserCodeError(f"a line has {self.tokens} tokens; count them, or give 0 where that is not known")

    @property
    def given(self) -> float:
        """What it earned beside shaping; exactly 0 where it was given nothing."""
        return self.reward - self.shaping


@dataclass(frozen=True, slots=True)
class RolloutEarnings:
    """What one rollout earned, in reward units."""

    outcome: float | None
    """None: not graded, so it is in no baseline of outcomes and adds nothing to a sum."""
    lines: tuple[LineEarnings, ...] = ()
    """In order; empty for a rollout that may not be trained on."""

    def __post_init__(self) -> None:
        if self.outcome is not None and not math.isfinite(self.outcome):
            raise UserCodeError(f"an outcome is {self.outcome!r}; give a finite number, or None where none was graded")
        if not isinstance(self.lines, tuple):
            raise UserCodeError(f"the lines of a rollout are a {type(self.lines).__name__}; give a tuple")

    @property
    def rewards_L(self) -> tuple[float, ...]:
        """The reward of each line, shaping included."""
        return tuple(line.reward for line in self.lines)

    @property
    def shaping_L(self) -> tuple[float, ...]:
        """How much of each line's reward the status table gave."""
        return tuple(line.shaping for line in self.lines)

    @property
    def tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(line.tokens for line in self.lines)


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What the rollouts of one group earned: what an estimator is given. Its rows have one value a line, or none."""

    rollouts: tuple[RolloutEarnings, ...]
    bound: float = math.inf
    """Most that shaping counts where it is added up, > 0."""

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
        """A group from rows, one a rollout, each with one value a line; (): nothing is known of that kind, or given.

        Raises:
            UserCodeError: rows, or values in them, are too few or too many, or no finite numbers.
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
        nothing, unknown = [[0.0] * n for n in lengths], [[None] * n for n in lengths]
        rows_G = zip(rewards_G_L, shaping_G_L or nothing, states_G_L or unknown, prefixes_G_L or unknown, strict=True)
        earned_G = [tuple(map(LineEarnings, *rows)) for rows in rows_G]
        return cls(tuple(map(RolloutEarnings, outcomes_G, earned_G)), bound)

    @property
    def outcomes_G(self) -> tuple[float | None, ...]:
        """The outcome of each rollout; None: not graded."""
        return tuple(rollout.outcome for rollout in self.rollouts)

    @property
    def rewards_G_L(self) -> tuple[tuple[float, ...], ...]:
        """The reward of each line, shaping included."""
        return tuple(rollout.rewards_L for rollout in self.rollouts)

    @property
    def shaping_G_L(self) -> tuple[tuple[float, ...], ...]:
        """How much of each line's reward the status table gave."""
        return tuple(rollout.shaping_L for rollout in self.rollouts)

    @property
    def given_G_L(self) -> tuple[tuple[float, ...], ...]:
        """What each line earned beside shaping; exactly 0 where it was given nothing."""
        return tuple(tuple(line.given for line in rollout.lines) for rollout in self.rollouts)

    @property
    def states_G_L(self) -> tuple[tuple[str, ...], ...]:
        """The console state that each line started from; (): not known."""
        return _known(tuple(tuple(line.state for line in rollout.lines) for rollout in self.rollouts))

    @property
    def prefixes_G_L(self) -> tuple[tuple[str, ...], ...]:
        """All that stood before each line; (): not known."""
        return _known(tuple(tuple(line.prefix for line in rollout.lines) for rollout in self.rollouts))

    def shaping_to_go(self) -> list[tuple[float, ...]]:
        """The shaping of each line and those after it, summed, within `bound`: one more error never makes it more."""
        return [tuple(max(-self.bound, min(self.bound, s)) for s in to_go(row, 1.0)) for row in self.shaping_G_L]

    def plain(self) -> "GroupRewards":
        """The same without any line reward."""
        return replace(self.each(lambda line: replace(line, reward=0.0, shaping=0.0)), bound=math.inf)

    def each(self, change: Callable[[LineEarnings], LineEarnings]) -> "GroupRewards":
        """The same with every line changed."""
        rollouts = (replace(rollout, lines=tuple(map(change, rollout.lines))) for rollout in self.rollouts)
        return replace(self, rollouts=tuple(rollouts))


def _known(names_G_L: tuple[tuple[str | None, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Names of lines; (): those of some line, and so of all, are not known."""
    known = tuple(tuple(name for name in names_L if name is not None) for names_L in names_G_L)
    return known if known == names_G_L else ()


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


def to_go(rewards_L: Sequence[float], discount: float) -> tuple[float, ...]:
    """Discounted sums from each line to the end."""
    returns: list[float] = []
    after = 0.0
    for reward in reversed(rewards_L):
        after = reward + discount * after
        returns.append(after)
    return tuple(reversed(returns))


def scores_of(values: Sequence[float], beside: Sequence[float] = ()) -> list[float]:
    """Values normalised together with those `beside` them, in order. Equal ones give exact zeros."""
    together = [*values, *beside]
    if len(set(together)) < 2:
        # Their mean may differ from them in the last bit, and EPSILON would blow that up.
        return [0.0] * len(values)
    scores: list[float] = normalise(torch.tensor(together, dtype=torch.float32)).tolist()
    return scores[: len(values)]


def floored_scores(values: Sequence[float], beside: Sequence[float] = ()) -> list[float]:
    """(x - b) / (deviation + EPSILON), b = max(mean, 0), of values together with those `beside` them, in order.

    The deviation is the unbiased one around b. Where the mean is at least 0 this is `scores_of`; where it is below 0,
    the smaller ones of several penalties would score above 0, and more lines would pay.
    """
    together = [*values, *beside]
    if len(together) < 2 or math.fsum(together) >= 0:
        return scores_of(values, beside)
    deviation = math.sqrt(math.fsum(value * value for value in together) / (len(together) - 1))
    return [value / (deviation + EPSILON) for value in values]


def penalty_scores(values: Sequence[float]) -> list[float]:
    """Values below 0 divided by their root mean square, or by OUTCOME_DEVIATION where that is larger, in order.

    They are compared with 0 and never with each other, so a small penalty does not pay beside large ones. The divisor
    keeps small ones small, and large ones from drowning outcomes that are normalised.
    """
    square = math.fsum(value * value for value in values) / len(values) if values else 0.0
    return [value / max(OUTCOME_DEVIATION, math.sqrt(square)) for value in values]


def outcome_scores(group: GroupRewards) -> list[float]:
    """What the outcome of each rollout is worth beside the others': the group's numbers of GRPO, shape (G,)."""
    outcomes_G = torch.tensor([math.nan if r is None else r for r in group.outcomes_G], dtype=torch.float32)
    scores_G: list[float] = normalise(outcomes_G).tolist()
    return scores_G
