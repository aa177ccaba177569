"""From the rewards of a group to one advantage a line.

An estimator is a function `GroupRewards -> advantages_G_L`, chosen by name or as `module:function`. It sees no token.
Everything is float32, in the order of operations of TRL 1.16, so that `outcome` equals TRL's advantage bit for bit.

Rewards that lines were given are compared within the group, as each estimator says, or arrive as they were given
(`given="as_given"`): then each is added to the advantage of its line, and where rewards are added up to those of the
lines before it, and to nothing else; no mean, no deviation and no weight touches it.

Where they are compared, rewards that are all <= 0 raise the advantage of no line: a baseline of given rewards that
would be below 0 is the largest of those compared, or 0, and outcomes are compared without them. A plain mean of
penalties would pay each line that has a smaller one.

Rules that hold for each of them: a rollout that may not be trained on has no line here and a nan outcome, so it takes
no part in any baseline; outcomes and given rewards of a group of one, or without variance, give zeros. (Where a mean of
equal outcomes is not exact in float32, as for three outcomes of 0.1, `outcome` gives TRL's rounding error in place of
0; 0 and 1 are exact.)

Shaping, what the status table gives, is never compared with the shaping of others, and never divided by a deviation:
either would make an error cheaper where there are more of them. It is added to an advantage on a fixed scale, and what
is normalised holds nothing that an additional error line could change: lines count where they were given something.
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
"""What shaping of single lines is divided by, reward units: the largest deviation of lines worth 0 or -0.1."""

LineWeight = Annotated[float, AtLeast(0)]
"""Weight of line credit beside the outcome."""

Discount = Annotated[float, Above(0, at_most=1)]
"""Worth of a reward one line later."""

Given = Literal["compared", "as_given"]
"""What becomes of a reward that a line was given: it is compared within the group, or added as it is."""

Estimator = Callable[[GroupRewards], Advantages]


def outcome(group: GroupRewards) -> Advantages:
    """GRPO: A(i, l) = (R(i) - mean R) / (std R + EPSILON) for each line l. Line rewards are not used.

    Source: DeepSeekMath (arXiv 2402.03300), outcome supervision, as TRL computes it.
    """
    scores_G = outcome_scores(group)
    return tuple((score,) * len(rewards_L) for score, rewards_L in zip(scores_G, group.rewards_G_L, strict=True))


def two_stream(group: GroupRewards, *, line_weight: LineWeight = 0.3, given: Given = "compared") -> Advantages:
    """A(i, l) = A_outcome(i) + line_weight * (A_given(i, l) + s(i, l) / LINE_DEVIATION): outcome, rewards and shaping.

    s(i, l) is the line's own shaping. A_given(i, l) = (g(i, l) - mean g) / (std g + EPSILON) for the reward g(i, l)
    that the line was given, and 0 where that is 0: if a line that earned nothing were above a mean of penalties, every
    harmless line would pay, and a policy could farm by writing more of them. For the same reason mean and deviation are
    over all rewards that were given in the group, and one 0 per rollout, however many lines were given nothing; and a
    mean below 0 counts as 0, the deviation being around it. As it is given, a reward is added in place of
    line_weight * A_given(i, l).
    """
    compared, apart = _parted(group, given)
    given_G_L = compared.given_G_L
    zeros = [0.0 for rewards_L in given_G_L if rewards_L]
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
    """A(i, l) = sum over steps k >= l of (r(i, k) - mean r) / (std r + EPSILON), + S(i, l) / OUTCOME_DEVIATION.

    The steps of a rollout are its lines that were given a reward above 0, and its outcome, which comes last; mean and
    deviation are over all steps of the group. Source: DeepSeekMath (arXiv 2402.03300) section 4.1.3, process
    supervision. A penalty, a reward below 0, is no step: it counts from 0, divided by the root mean square of the
    group's penalties, or by OUTCOME_DEVIATION where that is larger, and is added to its line and those before it.
    S(i, l) is the bounded sum of shaping from the line on. Without given rewards and shaping, this is `outcome`. As
    they are given, rewards are no steps: their sum from the line on is added.
    """
    group, apart = _parted(group, given)
    given_G_L = group.given_G_L
    graded = [r for r, row in zip(group.outcomes_G, given_G_L, strict=True) if row and r is not None]
    steps = [g for given_L in given_G_L for g in given_L if g > 0] + graded
    alone = sum(map(bool, given_G_L)) < 2
    scores = iter([0.0] * len(steps) if alone else scores_of(steps))
    fines = [g for given_L in given_G_L for g in given_L if g < 0]
    penalties = iter([0.0] * len(fines) if alone else penalty_scores(fines))
    steps_G_L = [
        [next(scores) if g > 0 else next(penalties) if g < 0 else 0.0 for g in given_L] for given_L in given_G_L
    ]
    for steps_L, outcome in zip(steps_G_L, group.outcomes_G, strict=True):
        if steps_L and outcome is not None:
            steps_L[-1] += next(scores)
    rows = tuple(
        tuple(a + s / OUTCOME_DEVIATION for a, s in zip(to_go(steps_L, 1.0), shaped_L, strict=True))
        for steps_L, shaped_L in zip(steps_G_L, group.shaping_to_go(), strict=True)
    )
    return _joined(rows, [to_go(apart_L, 1.0) for apart_L in apart])


def return_to_go(group: GroupRewards, *, discount: Discount = 1.0, given: Given = "compared") -> Advantages:
    """A(i, l) = R(i, l) - mean R(j, at the same step) + G(i, l) - b(i, l) + S(i, l).

    b(i, l) = max(mean G(j, at the same step), min(0, max G)), the maximum being over i and all j. Means are over the
    other rollouts, j != i. R(i, l) is the outcome, and G(i, l) the rewards that lines were given, both as discounted
    sums: of discount^(k - l) g(i, k) over lines k >= l; the outcome belongs to the last line. A rollout is at step n on
    lines before which n lines were given a reward above 0, and what it returns at step n is that of the first of them;
    a rollout that never got so far counts with what its last line returned. S(i, l) is the bounded sum of shaping from
    the line on, which is not discounted. A mean below 0 would pay each line whose penalties are smaller than those of
    others, so the line that lost least is the baseline then. Otherwise the baseline never holds the rollout itself, so
    the gradient is unbiased; nothing is divided by a deviation. Source: RLOO (arXiv 2402.14740), with the reward to go
    of REINFORCE. As they are given, rewards are no part of G: their discounted sum from the line on is added.
    """
    group, apart = _parted(group, given)
    outcomes_G_L = _outcome_returns(group, discount)
    given_G_L = [to_go(given_L, discount) for given_L in group.given_G_L]
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
    """A(i, l) = A_outcome(i) + line_weight * A_state(i, l) + S(i, l) / OUTCOME_DEVIATION.

    A_state(i, l) = (R(i, l) - mean R + G(i, l) - b) / c. R is the discounted return of the outcome, G that of rewards
    that lines were given; means are over the other rollouts that came by the state that line l started from, each of
    which counts once, with its first line there. b = max(mean G, min(0, max G)), the maximum being over the line
    itself, too. c is the largest absolute outcome of the group (1, if
    all are 0). A_state is 0 for a state that only one rollout came by. S(i, l) is the bounded sum of shaping from the
    line on. Source: GiGPO (arXiv 2505.10978), a step being a line, with its normalisation without a deviation, so that
    a rollout cannot move its own baseline by coming back; b is raised as in `return_to_go`, so that penalties pay no
    line. As they are given, rewards are no part of G: their discounted sum from the line on is added.
    """
    group, apart = _parted(group, given)
    outcomes_G_L = _outcome_returns(group, discount)
    given_G_L = [to_go(given_L, discount) for given_L in group.given_G_L]
    scale = max((abs(r or 0.0) for r in group.outcomes_G), default=0.0) or 1.0
    first_lines: dict[str, dict[int, int]] = {}
    for i, states_L in enumerate(group.states_G_L):
        for at, state in enumerate(states_L):
            first_lines.setdefault(state, {}).setdefault(i, at)
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
    """What is compared within the group, and what each line was given that is not."""
    if given == "compared":
        return group, ()
    return group.each(lambda line: replace(line, reward=line.shaping)), group.given_G_L


def _joined(rows: Advantages, apart: Sequence[Sequence[float]]) -> Advantages:
    """Advantages with what was given apart; (): nothing was."""
    if not apart:
        return rows
    return tuple(
        tuple(a + g for a, g in zip(row, given_L, strict=True)) for row, given_L in zip(rows, apart, strict=True)
    )


def _outcome_returns(group: GroupRewards, discount: float) -> list[tuple[float, ...]]:
    """Discounted outcomes from each line on: an outcome belongs to the last sampled token, so to the last line."""
    rows = [[0.0] * len(given_L) for given_L in group.given_G_L]
    for row, outcome in zip(rows, group.outcomes_G, strict=True):
        if row and outcome is not None:
            row[-1] = outcome
    return [to_go(row, discount) for row in rows]


def _others_at_step(
    returns_G_L: Sequence[Sequence[float]], steps_G_L: Sequence[Sequence[int]], i: int, at: int
) -> list[float]:
    """The other rollouts' returns at the step of line `at` of rollout i."""
    step = steps_G_L[i][at]
    return [
        returns_L[min(bisect_left(steps_L, step), len(returns_L) - 1)]
        for j, (returns_L, steps_L) in enumerate(zip(returns_G_L, steps_G_L, strict=True))
        if j != i and returns_L
    ]


def _above_baseline(own: float, others: Sequence[float]) -> float:
    """Given rewards less the others' mean; where that is below 0, less the largest of all, or 0."""
    return own - max(fmean(others), min(0.0, max(own, *others)))


ESTIMATORS: dict[str, Callable[..., Advantages]] = {
    function.__name__: function
    for function in (outcome, two_stream, process, return_to_go, state_anchor, merged_prefixes)
}


def faded(function: Estimator, group: GroupRewards, share: float) -> Advantages:
    """share * A(with the line rewards) + (1 - share) * A(without them): shaping that can be faded out, share in [0, 1].

    Scaling the rewards would not do: an estimator that normalises them does not notice.
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


def adds_up(text: str) -> bool:
    """False for the estimators that look at the shaping of single lines, or at none: nothing there can be bounded."""
    return Named.read("estimator", text).name not in (outcome.__name__, two_stream.__name__)


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
