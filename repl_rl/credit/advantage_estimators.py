"""Advantage estimators: functions from the rewards of a group of rollouts to one advantage per line.

An estimator maps `GroupRewards` to `advantages_G_L`. It is chosen by name or as `module:function`, and sees no token.
The parts in order: rewards of a group, normalisation, estimators, loading by name.

Rules for all estimators: a rollout that may not be trained on has no line here and no outcome, so it is in no baseline.
Outcomes and given rewards of a group of one, or without variance, give zeros. The reward of a line has two parts.
Shaping comes from the reward table, by the status of the line. A given reward comes from the sampler, a function of the
user or a potential. Shaping is never compared with that of other lines, and never divided by a deviation. A comparison
or a division would make an error cheaper when errors are more frequent. Shaping is added on a fixed scale. Means and
deviations include no shaping, so an additional error line does not change them.
"""

import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Literal

import torch
from torch import Tensor

from repl_rl.deprecations import keeps_old_names
from repl_rl.deprecations.removed_settings import refuse_removed_type
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.component_registry import NameWithOptions, find_or_import, get_options
from repl_rl.settings.value_bounds import Above, AtLeast
from repl_rl.trajectory.trajectory import LineStatus, Trajectory

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, reward units. TRL uses the same value."""
OUTCOME_DEVIATION = 0.5
"""Divisor of summed shaping before it is added to normalised outcomes: the largest standard deviation of 0/1 values."""
LINE_DEVIATION = 0.05
"""Divisor of the shaping of single lines, reward units: the largest standard deviation of values that are 0 or -0.1."""
Advantages = tuple[tuple[float, ...], ...]
"""One number per line, shape (G, L) with L of each rollout; dimensionless."""

LineWeight = Annotated[float, AtLeast(0)]
"""Weight of line credit relative to the outcome."""

Discount = Annotated[float, Above(0, at_most=1)]
"""Discount factor per line, in (0, 1]."""

GivenRewardMode = Literal["compared", "as_given"]
"""Treatment of a reward that a line was given: compared within the group, or added unchanged.

`compared`: the estimator defines the comparison. Outcomes are compared separately. If all given rewards are <= 0, they
increase no line's advantage: a baseline below 0 is replaced by the largest compared reward, but at most by 0. With the
plain mean of penalties as baseline, a line with a smaller penalty would get a positive advantage. `as_given`: the
reward is added to the advantage of its line. Estimators that sum rewards also add it to earlier lines of the rollout.
No mean is subtracted, and no deviation or weight scales it.
"""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class LineRewards:
    """Reward of one line, in reward units, and the state before the line."""

    reward: float
    """Whole reward, including shaping."""
    shaping: float = 0.0
    """Part of the reward that the status table gave."""
    state: str | None = None
    """Identifier of the console state before the line. Equal identifiers mean equal states. None means unknown."""
    tokens: int = 0
    """Number of tokens that the policy sampled for the line; 0 means unknown."""

    def __post_init__(self) -> None:
        for reward in (self.reward, self.shaping):
            if not math.isfinite(reward):
                raise UserCodeError(f"a line reward is {reward!r}; a reward is a finite number")
        if self.tokens < 0:
            raise UserCodeError(f"a line has {self.tokens} tokens; give their number, or 0 if it is unknown")

    @property
    def given_reward(self) -> float:
        """Reward without shaping; exactly 0 if the line was given none."""
        return self.reward - self.shaping


@dataclass(frozen=True, slots=True)
class RolloutRewards:
    """Rewards of one rollout, in reward units."""

    outcome: float | None
    """Outcome reward. None means not graded: the rollout is in no baseline of outcomes and adds nothing to a sum."""
    lines: tuple[LineRewards, ...] = ()
    """Lines in order; empty for a rollout that may not be trained on."""

    def __post_init__(self) -> None:
        if self.outcome is not None and not math.isfinite(self.outcome):
            raise UserCodeError(f"an outcome is {self.outcome!r}; give a finite number, or None if it was not graded")
        if not isinstance(self.lines, tuple):
            raise UserCodeError(f"RolloutRewards.lines is a {type(self.lines).__name__}; build it with a tuple")

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


@keeps_old_names
@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of the rollouts of one group, which are the input of an estimator. Its rows have one value per line."""

    rollouts: tuple[RolloutRewards, ...]
    shaping_bound: float = math.inf
    """Bound of shaping that is summed, > 0."""

    def __post_init__(self) -> None:
        if not self.shaping_bound > 0:
            raise UserCodeError(f"the bound of a group's shaping is {self.shaping_bound!r}; give a number above 0")
        known = {line.state is not None for rollout in self.rollouts for line in rollout.lines}
        if len(known) > 1:
            remedy = "give one to each line of a group, or to none"
            raise UserCodeError(f"the state is None for some lines, and not for others; {remedy}")

    @classmethod
    def from_rows(
        cls,
        outcomes_G: Sequence[float | None],
        rewards_G_L: Sequence[Sequence[float]],
        states_G_L: Sequence[Sequence[str]] = (),
        shaping_G_L: Sequence[Sequence[float]] = (),
        bound: float = math.inf,
    ) -> "GroupRewards":
        """Create a group from rows, one row per rollout, with one value per line. () means unknown or not given.

        Raises:
            UserCodeError: rows, or values in them, are too few or too many, or not finite numbers.
        """
        lengths = [len(row) for row in rewards_G_L]
        rows_by_name = {"states": states_G_L, "shaping rewards": shaping_G_L}
        for name, rows in rows_by_name.items():
            if rows and [len(row) for row in rows] != lengths:
                remedy = "give one of each per line"
                raise UserCodeError(f"a group has rows of {name} and of line rewards that differ in length; {remedy}")
        if len(outcomes_G) != len(lengths):
            raise UserCodeError(
                f"a group has {len(outcomes_G)} outcomes and {len(lengths)} rows of line rewards; "
                "give one of each per rollout"
            )
        # Rows that were not given: no shaping, and unknown states.
        zeros, unknown = [[0.0] * n for n in lengths], [[None] * n for n in lengths]
        rows_G = zip(rewards_G_L, shaping_G_L or zeros, states_G_L or unknown, strict=True)
        lines_G = [tuple(map(LineRewards, *rows)) for rows in rows_G]
        return cls(tuple(map(RolloutRewards, outcomes_G, lines_G)), bound)

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
        return tuple(tuple(line.given_reward for line in rollout.lines) for rollout in self.rollouts)

    @property
    def states_G_L(self) -> tuple[tuple[str, ...], ...]:
        """Name of the console state before each line; () if unknown."""
        states_G_L = tuple(tuple(line.state for line in rollout.lines) for rollout in self.rollouts)
        known_G_L = tuple(tuple(state for state in states_L if state is not None) for states_L in states_G_L)
        return known_G_L if known_G_L == states_G_L else ()

    def compute_shaping_to_go(self) -> list[tuple[float, ...]]:
        """Return, for each line, the sum of shaping from that line on, clipped to +-`shaping_bound`.

        A further error never increases this sum.
        """
        return [
            tuple(max(-self.shaping_bound, min(self.shaping_bound, s)) for s in compute_reward_to_go(row, 1.0))
            for row in self.shaping_G_L
        ]

    def map_lines(self, change: Callable[[LineRewards], LineRewards]) -> "GroupRewards":
        """Return the same group with every line changed."""
        rollouts = (replace(rollout, lines=tuple(map(change, rollout.lines))) for rollout in self.rollouts)
        return replace(self, rollouts=tuple(rollouts))


Estimator = Callable[[GroupRewards], Advantages]
"""Function that estimates the advantages of one group."""


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


def compute_reward_to_go(rewards_L: Sequence[float], discount: float) -> tuple[float, ...]:
    """Return the discounted sums from each line to the end."""
    returns: list[float] = []
    total = 0.0
    for reward in reversed(rewards_L):
        total = reward + discount * total
        returns.append(total)
    return tuple(reversed(returns))


def compute_scores(values: Sequence[float], further: Sequence[float] = ()) -> list[float]:
    """Normalise `values` and `further` together, and return the scores of `values`. Equal values give exact zeros."""
    combined = [*values, *further]
    if len(set(combined)) < 2:
        # Their mean may differ from them in the last bit, and EPSILON would magnify that.
        return [0.0] * len(values)
    scores: list[float] = normalise(torch.tensor(combined, dtype=torch.float32)).tolist()
    return scores[: len(values)]


def compute_floored_scores(values: Sequence[float], further: Sequence[float] = ()) -> list[float]:
    """Return (x - b) / (deviation + EPSILON) of each of `values`, with b = max(mean, 0).

    `further` values count in mean and deviation only. The deviation is the unbiased one around b. If the mean is at
    least 0, this is `compute_scores`. If it is below 0, `compute_scores` would give the smallest penalties scores above
    0, which would reward writing more lines.
    """
    combined = [*values, *further]
    # The mean is at least 0: the floor has no effect.
    if len(combined) < 2 or math.fsum(combined) >= 0:
        return compute_scores(values, further)
    deviation = math.sqrt(math.fsum(value * value for value in combined) / (len(combined) - 1))
    return [value / (deviation + EPSILON) for value in values]


def compute_penalty_scores(values: Sequence[float]) -> list[float]:
    """Return values below 0 divided by their root mean square, or by OUTCOME_DEVIATION if that is larger, in order.

    They are compared with 0 and never with each other, so a small penalty next to large ones does not pay off. The
    divisor keeps small ones small, and keeps large ones from drowning normalised outcomes.
    """
    square = math.fsum(value * value for value in values) / len(values) if values else 0.0
    return [value / max(OUTCOME_DEVIATION, math.sqrt(square)) for value in values]


def compute_outcome_scores(group: GroupRewards) -> list[float]:
    """Return the normalised outcome of each rollout, which is its advantage in GRPO, shape (G,).

    It equals TRL's advantage bit for bit. A mean of equal outcomes may not be exact in float32, as for three outcomes
    of 0.1. The scores are then TRL's rounding error in place of 0. Outcomes of 0 and 1 are exact.
    """
    outcomes_G = torch.tensor([math.nan if r is None else r for r in group.outcomes_G], dtype=torch.float32)
    scores_G: list[float] = normalise(outcomes_G).tolist()
    return scores_G


def outcome(group: GroupRewards) -> Advantages:
    """Compute GRPO's A(i, l) = (R(i) - mean R) / (std R + EPSILON) for each line l. Line rewards are not used.

    Source: DeepSeekMath (arXiv 2402.03300), outcome supervision, as TRL computes it.
    """
    scores_G = compute_outcome_scores(group)
    return tuple((score,) * len(rewards_L) for score, rewards_L in zip(scores_G, group.rewards_G_L, strict=True))


def two_stream(
    group: GroupRewards, *, line_weight: LineWeight = 0.3, given: GivenRewardMode = "compared"
) -> Advantages:
    """Compute A(i, l) = A_outcome(i) + line_weight * (A_given(i, l) + s(i, l) / LINE_DEVIATION).

    s(i, l) is the line's own shaping. A_given(i, l) = (g(i, l) - mean g) / (std g + EPSILON) for the reward g(i, l)
    that the line was given, and 0 if g(i, l) is 0. Without this exception, a line with reward 0 would score above a
    negative mean. A policy could then gain by writing more such lines.

    For the same reason, mean and deviation are over all nonzero given rewards of the group, and one 0 per rollout.
    Lines without a given reward do not change them. A mean below 0 is replaced by 0, also in the deviation.
    With given="as_given", g(i, l) is added in place of line_weight * A_given(i, l).
    """
    compared, as_given = _split_given_rewards(group, given)
    given_G_L = compared.given_G_L
    zeros = [0.0 for rewards_L in given_G_L if rewards_L]
    # Each rollout adds one 0. The scores come in the order of the rewards that are not 0. A single rollout is compared
    # with nothing.
    scores = iter(
        compute_floored_scores([g for given_L in given_G_L for g in given_L if g], zeros) if len(zeros) > 1 else ()
    )
    return _add_given_rewards(
        tuple(
            tuple(
                score + line_weight * ((next(scores, 0.0) if g else 0.0) + s / LINE_DEVIATION)
                for g, s in zip(given_L, shaping_L, strict=True)
            )
            for score, given_L, shaping_L in zip(
                compute_outcome_scores(group), given_G_L, group.shaping_G_L, strict=True
            )
        ),
        as_given,
    )


def process(group: GroupRewards, *, given: GivenRewardMode = "compared") -> Advantages:
    """Compute A(i, l): sum over steps k >= l of (r(i, k) - mean r) / (std r + EPSILON), + S(i, l) / OUTCOME_DEVIATION.

    The steps of a rollout are its lines that were given a reward above 0, and its outcome, which comes last. Mean and
    deviation are over all steps of the group. Source: DeepSeekMath (arXiv 2402.03300) section 4.1.3, process
    supervision.

    A penalty, a reward below 0, is not a step. It counts from 0, divided by the root mean square of the group's
    penalties, or by OUTCOME_DEVIATION if that is larger. It is added to its line and those before it. S(i, l) is the
    bounded sum of shaping from the line on. Without given rewards and shaping, this is `outcome`. With
    given="as_given", rewards are not steps: their sum from the line on is added.
    """
    group, as_given = _split_given_rewards(group, given)
    given_G_L = group.given_G_L
    # Normalise all steps of the group together, outcomes last.
    graded = [r for r, row in zip(group.outcomes_G, given_G_L, strict=True) if row and r is not None]
    steps = [g for given_L in given_G_L for g in given_L if g > 0] + graded
    # A single rollout is compared with nothing.
    is_single = sum(map(bool, given_G_L)) < 2
    scores = iter([0.0] * len(steps) if is_single else compute_scores(steps))
    # Penalties have a separate scale around 0.
    penalties = [g for given_L in given_G_L for g in given_L if g < 0]
    penalty_scores = iter([0.0] * len(penalties) if is_single else compute_penalty_scores(penalties))
    steps_G_L = [
        [next(scores) if g > 0 else next(penalty_scores) if g < 0 else 0.0 for g in given_L] for given_L in given_G_L
    ]
    # The outcome is the last step of its rollout.
    for steps_L, outcome in zip(steps_G_L, group.outcomes_G, strict=True):
        if steps_L and outcome is not None:
            steps_L[-1] += next(scores)
    rows = tuple(
        tuple(a + s / OUTCOME_DEVIATION for a, s in zip(compute_reward_to_go(steps_L, 1.0), shaped_L, strict=True))
        for steps_L, shaped_L in zip(steps_G_L, group.compute_shaping_to_go(), strict=True)
    )
    return _add_given_rewards(rows, [compute_reward_to_go(as_given_L, 1.0) for as_given_L in as_given])


def return_to_go(group: GroupRewards, *, discount: Discount = 1.0, given: GivenRewardMode = "compared") -> Advantages:
    """Compute A(i, l) = R(i, l) - mean R(j, at the same step) + G(i, l) - b(i, l) + S(i, l).

    R(i, l) is the outcome, and G(i, l) the rewards that lines were given, both as discounted sums. These are sums of
    discount^(k - l) g(i, k) over lines k >= l; the outcome belongs to the last line. Means are over the other rollouts,
    j != i. b(i, l) = max(mean G(j, at the same step), min(0, max G)), with the maximum over i and all j. S(i, l) is the
    bounded sum of shaping from the line on, without a discount.

    A line is at step n if n earlier lines of its rollout have a given reward above 0. A rollout's return at step n is
    that of its first line at that step. A rollout that never reaches step n counts with its last line.

    A mean of G below 0 would give each line with smaller penalties than others a positive advantage. The baseline is
    then the largest G, but at most 0. In all other cases the baseline excludes rollout i, so the gradient is unbiased.
    Nothing is divided by a deviation. Source: RLOO (arXiv 2402.14740), with the reward to go of REINFORCE. With
    given="as_given", rewards are not part of G: their discounted sum from the line on is added.
    """
    group, as_given = _split_given_rewards(group, given)
    outcomes_G_L = _compute_outcome_returns(group, discount)
    given_G_L = [compute_reward_to_go(given_L, discount) for given_L in group.given_G_L]
    # Step of a line: number of earlier lines that were given a reward above 0.
    steps_G_L = [list(accumulate((g > 0 for g in given_L[:-1]), initial=0)) for given_L in group.given_G_L]

    def compute_credit(i: int, line: int) -> float:
        compared = outcomes_G_L[i][line] - fmean(_select_returns_at_step(outcomes_G_L, steps_G_L, i, line))
        return compared + _subtract_baseline(given_G_L[i][line], _select_returns_at_step(given_G_L, steps_G_L, i, line))

    # A single rollout has no others to compare with: only its shaping counts.
    is_single = sum(map(bool, given_G_L)) < 2
    rows = tuple(
        tuple((0.0 if is_single else compute_credit(i, line)) + shaping for line, shaping in enumerate(shaped_L))
        for i, shaped_L in enumerate(group.compute_shaping_to_go())
    )
    return _add_given_rewards(rows, [compute_reward_to_go(as_given_L, discount) for as_given_L in as_given])


def state_anchor(
    group: GroupRewards,
    *,
    line_weight: LineWeight = 1.0,
    discount: Discount = 0.95,
    given: GivenRewardMode = "compared",
) -> Advantages:
    """Compute A(i, l) = A_outcome(i) + line_weight * A_state(i, l) + S(i, l) / OUTCOME_DEVIATION.

    A_state(i, l) = (R(i, l) - mean R + G(i, l) - b) / c. R is the discounted return of the outcome, G that of rewards
    that lines were given. Means are over the other rollouts that reached the state from which line l started. Each of
    them counts once, with its first line there. b = max(mean G, min(0, max G)), with the maximum over the line itself,
    too. c is the largest absolute outcome of the group (1, if all are 0). A_state is 0 if only one rollout reached the
    state. S(i, l) is the bounded sum of shaping from the line on.

    Source: GiGPO (arXiv 2505.10978), with lines as steps. Its normalisation without a deviation is used, so that a
    rollout cannot move its own baseline by returning to a state. b is raised as in `return_to_go`, so that penalties
    pay no line. With given="as_given", rewards are not part of G: their discounted sum from the line on is added.
    """
    group, as_given = _split_given_rewards(group, given)
    outcomes_G_L = _compute_outcome_returns(group, discount)
    given_G_L = [compute_reward_to_go(given_L, discount) for given_L in group.given_G_L]
    scale = max((abs(r or 0.0) for r in group.outcomes_G), default=0.0) or 1.0
    # Find each rollout's first line at each state.
    first_lines: dict[str, dict[int, int]] = {}
    for i, states_L in enumerate(group.states_G_L):
        for line, state in enumerate(states_L):
            first_lines.setdefault(state, {}).setdefault(i, line)
    # Compare each line with the other rollouts at its state.
    local = [[0.0] * len(given_L) for given_L in given_G_L]
    for i, states_L in enumerate(group.states_G_L):
        for line, state in enumerate(states_L):
            others = [(j, first) for j, first in first_lines[state].items() if j != i]
            if others:
                compared = outcomes_G_L[i][line] - fmean(outcomes_G_L[j][first] for j, first in others)
                given_credit = _subtract_baseline(given_G_L[i][line], [given_G_L[j][first] for j, first in others])
                local[i][line] = (compared + given_credit) / scale
    rows = tuple(
        tuple(score + line_weight * a + s / OUTCOME_DEVIATION for a, s in zip(values_L, shaped_L, strict=True))
        for score, values_L, shaped_L in zip(
            compute_outcome_scores(group), local, group.compute_shaping_to_go(), strict=True
        )
    )
    return _add_given_rewards(rows, [compute_reward_to_go(as_given_L, discount) for as_given_L in as_given])


def _split_given_rewards(group: GroupRewards, given: GivenRewardMode) -> tuple[GroupRewards, Advantages]:
    """Separate the rewards that are compared within the group from those that are added unchanged."""
    if given == "compared":
        return group, ()
    return group.map_lines(lambda line: replace(line, reward=line.shaping)), group.given_G_L


def _add_given_rewards(rows: Advantages, as_given: Sequence[Sequence[float]]) -> Advantages:
    """Add the separate rewards to the advantages. () adds nothing."""
    if not as_given:
        return rows
    return tuple(
        tuple(a + g for a, g in zip(row, given_L, strict=True)) for row, given_L in zip(rows, as_given, strict=True)
    )


def _compute_outcome_returns(group: GroupRewards, discount: float) -> list[tuple[float, ...]]:
    """Return the discounted outcomes from each line on. An outcome belongs to the last sampled token, so to the last
    line."""
    rows = [[0.0] * len(given_L) for given_L in group.given_G_L]
    for row, outcome in zip(rows, group.outcomes_G, strict=True):
        if row and outcome is not None:
            row[-1] = outcome
    return [compute_reward_to_go(row, discount) for row in rows]


def _select_returns_at_step(
    returns_G_L: Sequence[Sequence[float]], steps_G_L: Sequence[Sequence[int]], i: int, line: int
) -> list[float]:
    """Return the other rollouts' returns at the step of a line of rollout i."""
    step = steps_G_L[i][line]
    return [
        # First line at that step, or the last line if the rollout never reached it.
        returns_L[min(bisect_left(steps_L, step), len(returns_L) - 1)]
        for j, (returns_L, steps_L) in enumerate(zip(returns_G_L, steps_G_L, strict=True))
        if j != i and returns_L
    ]


def _subtract_baseline(own: float, others: Sequence[float]) -> float:
    """Return `own` minus the mean of `others`. A mean below 0 is replaced by the largest of all values, at most 0."""
    return own - max(fmean(others), min(0.0, max(own, *others)))


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    function.__name__: function for function in (outcome, two_stream, process, return_to_go, state_anchor)
}


_STATELESS = frozenset(ESTIMATORS) - {state_anchor.__name__}
"""Estimators that compare no console states."""


def penalize_first_error(trajectory: Trajectory) -> list[float]:
    """Return -1 for each line in error that follows a cell without error, or no cell, and 0 for other lines.

    This line reward is an alternative to the error entries of the reward table. Only the first error of a streak costs
    something. Later errors are free until a cell runs without error. Use the reward unscaled: the estimator
    `two_stream` with given = "as_given", and `line_rewards` with first_error = 0.6. With weight 0.6, an error costs as
    much as a table entry of -0.1 in `two_stream`.
    """
    values: list[float] = []
    failed = False
    for line in trajectory.lines:
        status = LineStatus.INCOMPLETE if line.execution is None else line.execution.status
        values.append(-1.0 if status.is_error and not failed else 0.0)
        # Only the last line of a cell has its result.
        if status is not LineStatus.INCOMPLETE:
            failed = status.is_error
    return values


def load_estimator(text: str) -> Estimator:
    """Return the estimator `name`, or `module:function`. `name(option=value)` sets its keyword-only arguments.

    Raises:
        ConfigError: no such estimator or option exists, or a value is out of bounds.
        UserCodeError: its module raised while it was imported.
    """
    choice, function = _resolve_estimator(text)
    return partial(call_estimator, choice.bind_options("estimator", function), text)


def get_estimator_options(name: str) -> Mapping[str, object]:
    """Return the options of an estimator, each with its annotation. Raises as `load_estimator`."""
    return get_options(_resolve_estimator(name)[1])


def call_estimator(function: Estimator, name: str, group: GroupRewards) -> Advantages:
    """Call an estimator and validate its result.

    Raises:
        UserCodeError: it raised, or returned anything but one finite number per line.
    """
    try:
        advantages_G_L = tuple(tuple(float(value) for value in row) for row in function(group))
    except Exception as error:
        raise UserCodeError(f"estimator {name!r} raised {type(error).__name__}: {error}") from error
    # A user's estimator may return anything: check the shape, then the values.
    expected_lengths = [len(rewards_L) for rewards_L in group.rewards_G_L]
    lengths = [len(row) for row in advantages_G_L]
    if lengths != expected_lengths:
        raise UserCodeError(
            f"estimator {name!r} gave {lengths} advantages for {expected_lengths} lines; give one per line"
        )
    for value in (value for row in advantages_G_L for value in row):
        if not math.isfinite(value):
            raise UserCodeError(f"estimator {name!r} gave {value!r}; an advantage is a finite number")
    return advantages_G_L


def get_discount(text: str) -> float:
    """Return an estimator's discount factor per line: its option `discount`, the option's default, or 1 without one.

    Raises:
        ConfigError: no such estimator exists.
    """
    choice, function = _resolve_estimator(text)
    if "discount" in choice.options:
        return float(str(choice.options["discount"]))
    parameter = inspect.signature(function).parameters.get("discount")
    return 1.0 if parameter is None or parameter.default is parameter.empty else float(parameter.default)


def uses_line_rewards(text: str) -> bool:
    """Return True unless the estimator uses outcomes alone."""
    return NameWithOptions.parse("estimator", text).name != outcome.__name__


def reads_states(text: str) -> bool:
    """Return True if the estimator may compare console states; an estimator of the user may."""
    return NameWithOptions.parse("estimator", text).name not in _STATELESS


def sums_shaping(text: str) -> bool:
    """Return True if the estimator sums shaping. Otherwise a bound has no effect."""
    return NameWithOptions.parse("estimator", text).name not in (outcome.__name__, two_stream.__name__)


def _resolve_estimator(text: str) -> tuple[NameWithOptions, Callable[..., Advantages]]:
    choice = NameWithOptions.parse("estimator", text)
    refuse_removed_type("estimator", choice.name)
    attribute = find_or_import("estimator", choice.name, ESTIMATORS)
    if not callable(attribute):
        raise ConfigError("estimator", text, "it is not a function")
    function: Callable[..., Advantages] = attribute
    return choice, function
