"""Estimators: from the rewards of a group to one advantage per line.

An estimator is a function `GroupRewards -> advantages_G_L`, chosen by name or as `module:function`. It sees no token.
Outcomes are normalised in float32, in the order of operations of TRL 1.16, so that `outcome` equals TRL's advantage bit
for bit.

Rewards that lines were given are compared within the group, as each estimator defines, or added unchanged
(`given="as_given"`). An unchanged reward is added to the advantage of its line. Estimators that sum rewards also add it
to the lines before. No mean, no deviation and no weight changes it.

If rewards are compared and all are <= 0, they raise the advantage of no line. A baseline of given rewards that would be
below 0 is the largest of those compared, or 0. Outcomes are compared without them. A plain mean of penalties would pay
each line that has a smaller one.

Rules for all estimators: a rollout that may not be trained on has no line here and a nan outcome, so it is in no
baseline. Outcomes and given rewards of a group of one, or without variance, give zeros. A mean of equal outcomes may
not be exact in float32, as for three outcomes of 0.1. In this case `outcome` gives TRL's rounding error in place of 0;
0 and 1 are exact.

Shaping, which the status table gives, is never compared with the shaping of others, and never divided by a deviation.
Either would make an error cheaper when errors are more frequent. Shaping is added to an advantage on a fixed scale.
Normalised values contain nothing that an additional error line could change: only lines with given rewards count.
"""

import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Annotated, Literal

from repl_rl.credit.earnings import (
    EPSILON,
    OUTCOME_DEVIATION,
    Advantages,
    GroupRewards,
    floored_scores,
    normalise,
    outcome_scores,
    penalty_scores,
    scores_of,
    to_go,
)
from repl_rl.credit.merged import merged_prefixes
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named, found

__all__ = [
    "EPSILON", "ESTIMATORS", "Advantages", "Estimator", "GroupRewards", "adds_up", "checked", "discount_of",
    "estimator", "faded", "merged_prefixes", "normalise", "outcome", "process", "return_to_go", "state_anchor",
    "two_stream", "uses_line_rewards",
]  # fmt: skip

LINE_DEVIATION = 0.05
"""Divisor of the shaping of single lines, reward units: the largest deviation of lines worth 0 or -0.1."""

LineWeight = Annotated[float, AtLeast(0)]
"""Weight of line credit relative to the outcome."""

Discount = Annotated[float, Above(0, at_most=1)]
"""Worth of a reward that comes one line later."""

Given = Literal["compared", "as_given"]
"""Treatment of a reward that a line was given: compared within the group, or added unchanged."""

Estimator = Callable[[GroupRewards], Advantages]


def outcome(group: GroupRewards) -> Advantages:
    """Compute GRPO's A(i, l) = (R(i) - mean R) / (std R + EPSILON) for each line l. Line rewards are not used.

    Source: DeepSeekMath (arXiv 2402.03300), outcome supervision, as TRL computes it.
    """
    scores_G = outcome_scores(group)
    return tuple((score,) * len(rewards_L) for score, rewards_L in zip(scores_G, group.rewards_G_L, strict=True))


def two_stream(group: GroupRewards, *, line_weight: LineWeight = 0.3, given: Given = "compared") -> Advantages:
    """Compute A(i, l) = A_outcome(i) + line_weight * (A_given(i, l) + s(i, l) / LINE_DEVIATION).

    s(i, l) is the line's own shaping. A_given(i, l) = (g(i, l) - mean g) / (std g + EPSILON) for the reward g(i, l)
    that the line was given, and 0 if that is 0. Otherwise, a line that earned nothing could be above a mean of
    penalties. Every harmless line would pay off, and a policy could farm by writing more of them.

    For the same reason, mean and deviation are over all rewards that were given in the group, and one 0 per rollout.
    The number of lines without a reward does not matter. A mean below 0 counts as 0, and the deviation is around it.
    With given="as_given", a reward is added in place of line_weight * A_given(i, l).
    """
    compared, apart = _parted(group, given)
    given_G_L = compared.given_G_L
    zeros = [0.0 for rewards_L in given_G_L if rewards_L]
    # Each rollout adds one 0. The scores come in the order of the rewards that are not 0.
    scores = iter(floored_scores([g for given_L in given_G_L for g in given_L if g], zeros) if len(zeros) > 1 else ())
    return _joined(
        tuple(
            tuple(
                score + line_weight * ((next(scores, 0.0) if g else 0.0) + s / LINE_DEVIATION)
                for g, s in zip(given_L, shaping_L, strict=True)
            )
            for score, given_L, shaping_L in zip(outcome_scores(group), given_G_L, group.shaping_G_L, strict=True)
        ),
        apart,
    )


def process(group: GroupRewards, *, given: Given = "compared") -> Advantages:
    """Compute A(i, l): sum over steps k >= l of (r(i, k) - mean r) / (std r + EPSILON), + S(i, l) / OUTCOME_DEVIATION.

    The steps of a rollout are its lines that were given a reward above 0, and its outcome, which comes last. Mean and
    deviation are over all steps of the group. Source: DeepSeekMath (arXiv 2402.03300) section 4.1.3, process
    supervision.

    A penalty, a reward below 0, is not a step. It counts from 0, divided by the root mean square of the group's
    penalties, or by OUTCOME_DEVIATION if that is larger. It is added to its line and those before it. S(i, l) is the
    bounded sum of shaping from the line on. Without given rewards and shaping, this is `outcome`. With
    given="as_given", rewards are not steps: their sum from the line on is added.
    """
    group, apart = _parted(group, given)
    given_G_L = group.given_G_L
    # Normalise all steps of the group together, outcomes last.
    graded = [r for r, row in zip(group.outcomes_G, given_G_L, strict=True) if row and r is not None]
    steps = [g for given_L in given_G_L for g in given_L if g > 0] + graded
    # A single rollout is compared with nothing.
    alone = sum(map(bool, given_G_L)) < 2
    scores = iter([0.0] * len(steps) if alone else scores_of(steps))
    # Penalties have a separate scale around 0.
    fines = [g for given_L in given_G_L for g in given_L if g < 0]
    penalties = iter([0.0] * len(fines) if alone else penalty_scores(fines))
    steps_G_L = [
        [next(scores) if g > 0 else next(penalties) if g < 0 else 0.0 for g in given_L] for given_L in given_G_L
    ]
    # The outcome is the last step of its rollout.
    for steps_L, outcome in zip(steps_G_L, group.outcomes_G, strict=True):
        if steps_L and outcome is not None:
            steps_L[-1] += next(scores)
    rows = tuple(
        tuple(a + s / OUTCOME_DEVIATION for a, s in zip(to_go(steps_L, 1.0), shaped_L, strict=True))
        for steps_L, shaped_L in zip(steps_G_L, group.shaping_to_go(), strict=True)
    )
    return _joined(rows, [to_go(apart_L, 1.0) for apart_L in apart])


def return_to_go(group: GroupRewards, *, discount: Discount = 1.0, given: Given = "compared") -> Advantages:
    """Compute A(i, l) = R(i, l) - mean R(j, at the same step) + G(i, l) - b(i, l) + S(i, l).

    R(i, l) is the outcome, and G(i, l) the rewards that lines were given, both as discounted sums. These are sums of
    discount^(k - l) g(i, k) over lines k >= l; the outcome belongs to the last line. Means are over the other rollouts,
    j != i. b(i, l) = max(mean G(j, at the same step), min(0, max G)), with the maximum over i and all j. S(i, l) is the
    bounded sum of shaping from the line on, without a discount.

    A rollout is at step n on lines before which n lines were given a reward above 0. Its return at step n is that of
    the first of these lines. A rollout that never got so far counts with the return of its last line.

    A mean below 0 would pay each line whose penalties are smaller than those of others, so the line that lost least is
    the baseline then. Otherwise the baseline never includes the rollout itself, so the gradient is unbiased. Nothing is
    divided by a deviation. Source: RLOO (arXiv 2402.14740), with the reward to go of REINFORCE. With given="as_given",
    rewards are not part of G: their discounted sum from the line on is added.
    """
    group, apart = _parted(group, given)
    outcomes_G_L = _outcome_returns(group, discount)
    given_G_L = [to_go(given_L, discount) for given_L in group.given_G_L]
    # Step of a line: number of earlier lines that were given a reward above 0.
    steps_G_L = [list(accumulate((g > 0 for g in given_L[:-1]), initial=0)) for given_L in group.given_G_L]

    def credit(i: int, at: int) -> float:
        compared = outcomes_G_L[i][at] - fmean(_others_at_step(outcomes_G_L, steps_G_L, i, at))
        return compared + _above_baseline(given_G_L[i][at], _others_at_step(given_G_L, steps_G_L, i, at))

    alone = sum(map(bool, given_G_L)) < 2
    rows = tuple(
        tuple((0.0 if alone else credit(i, at)) + shaped for at, shaped in enumerate(shaped_L))
        for i, shaped_L in enumerate(group.shaping_to_go())
    )
    return _joined(rows, [to_go(apart_L, discount) for apart_L in apart])


def state_anchor(
    group: GroupRewards, *, line_weight: LineWeight = 1.0, discount: Discount = 0.95, given: Given = "compared"
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
    group, apart = _parted(group, given)
    outcomes_G_L = _outcome_returns(group, discount)
    given_G_L = [to_go(given_L, discount) for given_L in group.given_G_L]
    scale = max((abs(r or 0.0) for r in group.outcomes_G), default=0.0) or 1.0
    # Find each rollout's first line at each state.
    first_lines: dict[str, dict[int, int]] = {}
    for i, states_L in enumerate(group.states_G_L):
        for at, state in enumerate(states_L):
            first_lines.setdefault(state, {}).setdefault(i, at)
    # Compare each line with the other rollouts at its state.
    local = [[0.0] * len(given_L) for given_L in given_G_L]
    for i, states_L in enumerate(group.states_G_L):
        for at, state in enumerate(states_L):
            others = [(j, first) for j, first in first_lines[state].items() if j != i]
            if others:
                compared = outcomes_G_L[i][at] - fmean(outcomes_G_L[j][first] for j, first in others)
                earned = _above_baseline(given_G_L[i][at], [given_G_L[j][first] for j, first in others])
                local[i][at] = (compared + earned) / scale
    rows = tuple(
        tuple(score + line_weight * a + s / OUTCOME_DEVIATION for a, s in zip(values_L, shaped_L, strict=True))
        for score, values_L, shaped_L in zip(outcome_scores(group), local, group.shaping_to_go(), strict=True)
    )
    return _joined(rows, [to_go(apart_L, discount) for apart_L in apart])


def _parted(group: GroupRewards, given: Given) -> tuple[GroupRewards, Advantages]:
    """Separate the rewards that are compared within the group from those that are added unchanged."""
    if given == "compared":
        return group, ()
    return group.each(lambda line: replace(line, reward=line.shaping)), group.given_G_L


def _joined(rows: Advantages, apart: Sequence[Sequence[float]]) -> Advantages:
    """Add the separate rewards to the advantages. () adds nothing."""
    if not apart:
        return rows
    return tuple(
        tuple(a + g for a, g in zip(row, given_L, strict=True)) for row, given_L in zip(rows, apart, strict=True)
    )


def _outcome_returns(group: GroupRewards, discount: float) -> list[tuple[float, ...]]:
    """Return the discounted outcomes from each line on. An outcome belongs to the last sampled token, so to the last
    line."""
    rows = [[0.0] * len(given_L) for given_L in group.given_G_L]
    for row, outcome in zip(rows, group.outcomes_G, strict=True):
        if row and outcome is not None:
            row[-1] = outcome
    return [to_go(row, discount) for row in rows]


def _others_at_step(
    returns_G_L: Sequence[Sequence[float]], steps_G_L: Sequence[Sequence[int]], i: int, at: int
) -> list[float]:
    """Return the other rollouts' returns at the step of line `at` of rollout i."""
    step = steps_G_L[i][at]
    return [
        # First line at that step, or the last line if the rollout never reached it.
        returns_L[min(bisect_left(steps_L, step), len(returns_L) - 1)]
        for j, (returns_L, steps_L) in enumerate(zip(returns_G_L, steps_G_L, strict=True))
        if j != i and returns_L
    ]


def _above_baseline(own: float, others: Sequence[float]) -> float:
    """Return given rewards minus the others' mean. If that mean is below 0, subtract the largest of all, or 0."""
    return own - max(fmean(others), min(0.0, max(own, *others)))


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    function.__name__: function
    for function in (outcome, two_stream, process, return_to_go, state_anchor, merged_prefixes)
}


def faded(function: Estimator, group: GroupRewards, share: float) -> Advantages:
    """Return share * A(with the line rewards) + (1 - share) * A(without them), share in [0, 1].

    This fades line rewards out. Scaling the rewards would not, because an estimator that normalises them does not
    notice.
    """
    if share >= 1.0:
        return function(group)
    plain = function(group.plain())
    if share <= 0.0:
        return plain
    return tuple(
        tuple(share * a + (1 - share) * b for a, b in zip(with_L, without_L, strict=True))
        for with_L, without_L in zip(function(group), plain, strict=True)
    )


def estimator(text: str) -> Estimator:
    """Return the estimator `name`, or `module:function`. `name(option=value)` sets its keyword-only arguments.

    Raises:
        ConfigError: no such estimator or option exists, or a value is out of bounds.
        UserCodeError: its module raised while it was imported.
    """
    named, function = _named(text)
    return partial(checked, named.bound("estimator", function), text)


def discount_of(text: str) -> float:
    """Return an estimator's worth of a reward one line later: its option `discount`, the option's default, or 1.

    Raises:
        ConfigError: no such estimator exists.
    """
    named, function = _named(text)
    if "discount" in named.options:
        return float(str(named.options["discount"]))
    parameter = inspect.signature(function).parameters.get("discount")
    return 1.0 if parameter is None or parameter.default is parameter.empty else float(parameter.default)


def uses_line_rewards(text: str) -> bool:
    """Return True unless the estimator uses outcomes alone."""
    return Named.read("estimator", text).name != outcome.__name__


def adds_up(text: str) -> bool:
    """Return True if the estimator sums shaping. Otherwise a bound has no effect."""
    return Named.read("estimator", text).name not in (outcome.__name__, two_stream.__name__)


def _named(text: str) -> tuple[Named, Callable[..., Advantages]]:
    named = Named.read("estimator", text)
    thing = found("estimator", named.name, ESTIMATORS)
    if not callable(thing):
        raise ConfigError("estimator", text, "it is not a function")
    function: Callable[..., Advantages] = thing
    return named, function


def checked(function: Estimator, name: str, group: GroupRewards) -> Advantages:
    """Call an estimator and validate its result.

    Raises:
        UserCodeError: it raised, or returned anything but one finite number per line.
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
