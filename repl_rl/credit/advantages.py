"""From the rewards of a group to one advantage a line.

An estimator is a function `GroupRewards -> advantages_G_L`, chosen by name or as `module:function`. It sees no token.
Everything is float32, in the order of operations of TRL 1.16, so that `outcome` equals TRL's advantage bit for bit.

Rules that hold for each of them: a rollout that may not be trained on has no line here and a nan outcome, so it takes
no part in any baseline; a group of one, or without variance, gives zeros. (Where a mean of equal outcomes is not
exact in float32, as for three outcomes of 0.1, `outcome` gives TRL's rounding error in place of 0; 0 and 1 are exact.)
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named, found

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it; reward units. TRL's value."""

LineWeight = Annotated[float, AtLeast(0)]
"""Weight of line credit beside the outcome."""

Discount = Annotated[float, Above(0, at_most=1)]
"""Worth of a reward one line later."""

Advantages = tuple[tuple[float, ...], ...]
"""One number a line, shape (G, L) with L of each rollout; dimensionless."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """What the rollouts of one group earned, in reward units."""

    outcomes_G: tuple[float | None, ...]
    """The outcome of each rollout; None: not graded, so it is in no baseline of outcomes and adds nothing to a sum."""
    rewards_G_L: tuple[tuple[float, ...], ...]
    """One reward a line; empty for a rollout that may not be trained on."""
    states_G_L: tuple[tuple[str, ...], ...] = ()
    """A name of the console state that each line started from, equal for equal states; (): not known."""

    def __post_init__(self) -> None:
        if self.states_G_L and [len(row) for row in self.states_G_L] != [len(row) for row in self.rewards_G_L]:
            raise UserCodeError("a group has other numbers of states than of line rewards; give one of each per line")
        if len(self.outcomes_G) != len(self.rewards_G_L):
            raise UserCodeError(
                f"a group has {len(self.outcomes_G)} outcomes and {len(self.rewards_G_L)} rows of line rewards; "
                "give one of each per rollout"
            )
        for outcome in self.outcomes_G:
            if outcome is not None and not math.isfinite(outcome):
                raise UserCodeError(f"an outcome is {outcome!r}; give a finite number, or None where none was graded")
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


def two_stream(group: GroupRewards, *, line_weight: LineWeight = 0.3) -> Advantages:
    """A(i, l) = A_outcome(i) + line_weight * A_line(i, l): outcome and line credit, normalised separately.

    A_line(i, l) = (r(i, l) - mean r) / (std r + EPSILON), mean and deviation over all lines of the group, and 0 where
    r(i, l) = 0: if a line that earned nothing were above the mean of the penalties, every harmless line would pay, and
    a policy could farm by writing more of them.
    """
    scores_G = _outcome_scores(group)
    lines = iter(_line_scores(group.rewards_G_L))
    return tuple(
        tuple(score + line_weight * bool(reward) * next(lines) for reward in rewards_L)
        for score, rewards_L in zip(scores_G, group.rewards_G_L, strict=True)
    )


def process(group: GroupRewards) -> Advantages:
    """A(i, l) = sum over k >= l of (r'(i, k) - mean r') / (std r' + EPSILON).

    r' are the line rewards with the rollout's outcome added to its last line; mean and deviation are over all lines of
    the group. Source: DeepSeekMath (arXiv 2402.03300) section 4.1.3, process supervision, a step being a line.
    """
    rewards_G_L = _with_outcome(group)
    scores = iter(_line_scores(rewards_G_L))
    return tuple(_to_go([next(scores) for _ in rewards_L], 1.0) for rewards_L in rewards_G_L)


def return_to_go(group: GroupRewards, *, discount: Discount = 1.0) -> Advantages:
    """A(i, l) = G(i, l) - mean over j != i of G(j, min(l, L(j))).

    G(i, l) = sum over k >= l of discount^(k - l) r'(i, k); r' are the line rewards with the outcome added to the last
    line; L(j) is the last line of rollout j, so a rollout that is over counts with what its last line returned. The
    baseline never holds the rollout itself, so the gradient is unbiased; nothing is divided by a deviation. Source:
    RLOO (arXiv 2402.14740), with the reward to go of REINFORCE.
    """
    returns_G_L = [_to_go(rewards_L, discount) for rewards_L in _with_outcome(group)]
    return tuple(
        tuple(value - _others_mean(returns_G_L, i, at) for at, value in enumerate(returns_L))
        for i, returns_L in enumerate(returns_G_L)
    )


def state_anchor(group: GroupRewards, *, line_weight: LineWeight = 1.0, discount: Discount = 0.95) -> Advantages:
    """A(i, l) = A_outcome(i) + line_weight * A_state(i, l).

    Lines of the group that start from the same console state form an anchor group; A_state is the discounted return
    from the line, normalised within that anchor group, and 0 for a state that only one line started from or where all
    returned the same. Source: GiGPO (arXiv 2505.10978), a step being a line.
    """
    returns_G_L = [_to_go(rewards_L, discount) for rewards_L in _with_outcome(group)]
    anchors: dict[str, list[tuple[int, int]]] = {}
    for i, states_L in enumerate(group.states_G_L):
        for at, state in enumerate(states_L):
            anchors.setdefault(state, []).append((i, at))
    local = [[0.0] * len(returns_L) for returns_L in returns_G_L]
    for places in anchors.values():
        scores = _line_scores([[returns_G_L[i][at] for i, at in places]])
        for (i, at), score in zip(places, scores, strict=True):
            local[i][at] = score
    return tuple(
        tuple(score + line_weight * value for value in values)
        for score, values in zip(_outcome_scores(group), local, strict=True)
    )


def _with_outcome(group: GroupRewards) -> list[list[float]]:
    """Line rewards with the outcome added to the last line: it belongs to the last token that the policy wrote."""
    rows = [list(rewards_L) for rewards_L in group.rewards_G_L]
    for row, outcome in zip(rows, group.outcomes_G, strict=True):
        if row and outcome is not None:
            row[-1] += outcome
    return rows


def _to_go(rewards_L: Sequence[float], discount: float) -> tuple[float, ...]:
    """Discounted sums from each line to the end."""
    returns: list[float] = []
    after = 0.0
    for reward in reversed(rewards_L):
        after = reward + discount * after
        returns.append(after)
    return tuple(reversed(returns))


def _others_mean(returns_G_L: Sequence[Sequence[float]], i: int, at: int) -> float:
    """Mean of the other rollouts' returns at line `at`, or at their last line; the rollout's own if it is alone."""
    others = [row[min(at, len(row) - 1)] for j, row in enumerate(returns_G_L) if j != i and row]
    return math.fsum(others) / len(others) if others else returns_G_L[i][at]


def _outcome_scores(group: GroupRewards) -> list[float]:
    outcomes_G = torch.tensor([math.nan if r is None else r for r in group.outcomes_G], dtype=torch.float32)
    scores_G: list[float] = normalise(outcomes_G).tolist()
    return scores_G


def _line_scores(rewards_G_L: Sequence[Sequence[float]]) -> list[float]:
    """All line rewards of the group, normalised together, in order. Equal rewards give exact zeros."""
    flat = [reward for rewards_L in rewards_G_L for reward in rewards_L]
    if len(set(flat)) < 2:
        # Their mean may differ from them in the last bit, and EPSILON would blow that up.
        return [0.0] * len(flat)
    scores: list[float] = normalise(torch.tensor(flat, dtype=torch.float32)).tolist()
    return scores


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    function.__name__: function for function in (outcome, two_stream, process, return_to_go, state_anchor)
}


def faded(function: Estimator, group: GroupRewards, share: float) -> Advantages:
    """share * A(with the line rewards) + (1 - share) * A(without them): shaping that can be faded out, share in [0, 1].

    Scaling the rewards would not do: an estimator that normalises them does not notice.
    """
    if share >= 1.0:
        return function(group)
    blank = tuple((0.0,) * len(rewards_L) for rewards_L in group.rewards_G_L)
    plain = function(GroupRewards(group.outcomes_G, blank, group.states_G_L))
    if share <= 0.0:
        return plain
    return tuple(
        tuple(share * a + (1 - share) * b for a, b in zip(with_L, without_L, strict=True))
        for with_L, without_L in zip(function(group), plain, strict=True)
    )


def estimator(text: str) -> Estimator:
    """The estimator called `name`, or `module:function`; `name(option=value)` sets its keyword-only arguments.

    Raises:
        ConfigError: there is no such estimator or option, or a value is out of bounds.
        UserCodeError: its module raised while it was imported.
    """
    named, function = _named(text)
    return partial(checked, named.bound("estimator", function), text)


def discount_of(text: str) -> float:
    """Worth of a reward one line later to an estimator: its option `discount`, or that one's default, or 1.

    Raises:
        ConfigError: there is no such estimator.
    """
    named, function = _named(text)
    if "discount" in named.options:
        return float(str(named.options["discount"]))
    parameter = inspect.signature(function).parameters.get("discount")
    return 1.0 if parameter is None or parameter.default is parameter.empty else float(parameter.default)


def uses_line_rewards(text: str) -> bool:
    """False for the one estimator that looks at outcomes alone."""
    return Named.read("estimator", text).name != outcome.__name__


def _named(text: str) -> tuple[Named, Callable[..., Advantages]]:
    named = Named.read("estimator", text)
    thing = found("estimator", named.name, ESTIMATORS)
    if not callable(thing):
        raise ConfigError("estimator", text, "it is not a function")
    function: Callable[..., Advantages] = thing
    return named, function


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
