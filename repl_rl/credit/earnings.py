"""What the rollouts of a group earned, and the arithmetic that estimators share. It sees no token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
class GroupRewards:
    """What the rollouts of one group earned, in reward units."""

    outcomes_G: tuple[float | None, ...]
    """The outcome of each rollout; None: not graded, so it is in no baseline of outcomes and adds nothing to a sum."""
    rewards_G_L: tuple[tuple[float, ...], ...]
    """One reward a line, shaping included; empty for a rollout that may not be trained on."""
    states_G_L: tuple[tuple[str, ...], ...] = ()
    """A name of the console state that each line started from, equal for equal states; (): not known."""
    shaping_G_L: tuple[tuple[float, ...], ...] = ()
    """How much of each line's reward the status table gave; (): nothing."""
    bound: float = math.inf
    """Most that shaping counts where it is added up, > 0."""
    prefixes_G_L: tuple[tuple[str, ...], ...] = ()
    """A name of all that stood before each line, equal for equal ids; (): not known."""

    def __post_init__(self) -> None:
        lengths = [len(row) for row in self.rewards_G_L]
        parts = {"states": self.states_G_L, "shaping rewards": self.shaping_G_L, "prefixes": self.prefixes_G_L}
        for name, rows in parts.items():
            if rows and [len(row) for row in rows] != lengths:
                remedy = "give one of each per line"
                raise UserCodeError(f"a group has other numbers of {name} than of line rewards; {remedy}")
        if not self.bound > 0:
            raise UserCodeError(f"the bound of a group's shaping is {self.bound!r}; give a number above 0")
        if len(self.outcomes_G) != len(self.rewards_G_L):
            raise UserCodeError(
                f"a group has {len(self.outcomes_G)} outcomes and {len(self.rewards_G_L)} rows of line rewards; "
                "give one of each per rollout"
            )
        for outcome in self.outcomes_G:
            if outcome is not None and not math.isfinite(outcome):
                raise UserCodeError(f"an outcome is {outcome!r}; give a finite number, or None where none was graded")
        for reward in (r for rows in (self.rewards_G_L, self.shaping_G_L) for row in rows for r in row):
            if not math.isfinite(reward):
                raise UserCodeError(f"a line reward is {reward!r}; a reward is a finite number")

    @property
    def given_G_L(self) -> tuple[tuple[float, ...], ...]:
        """What each line earned beside shaping; exactly 0 where it was given nothing."""
        if not self.shaping_G_L:
            return self.rewards_G_L
        return tuple(
            tuple(reward - shaped for reward, shaped in zip(rewards_L, shaping_L, strict=True))
            for rewards_L, shaping_L in zip(self.rewards_G_L, self.shaping_G_L, strict=True)
        )

    def shaping_to_go(self) -> list[tuple[float, ...]]:
        """The shaping of each line and those after it, summed, within `bound`: one more error never makes it more."""
        rows = self.shaping_G_L or tuple((0.0,) * len(rewards_L) for rewards_L in self.rewards_G_L)
        return [tuple(max(-self.bound, min(self.bound, s)) for s in to_go(row, 1.0)) for row in rows]

    def plain(self) -> "GroupRewards":
        """The same without any line reward."""
        blank = tuple((0.0,) * len(rewards_L) for rewards_L in self.rewards_G_L)
        return GroupRewards(self.outcomes_G, blank, self.states_G_L, prefixes_G_L=self.prefixes_G_L)


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


def outcome_scores(group: GroupRewards) -> list[float]:
    """What the outcome of each rollout is worth beside the others': the group's numbers of GRPO, shape (G,)."""
    outcomes_G = torch.tensor([math.nan if r is None else r for r in group.outcomes_G], dtype=torch.float32)
    scores_G: list[float] = normalise(outcomes_G).tolist()
    return scores_G
