"""Estimators: exact formulas, exact zeros, and a contract that user code is held to."""

import math
from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantage_estimators import (
    EPSILON,
    ESTIMATORS,
    Advantages,
    GroupRewards,
    get_discount,
    load_estimator,
    normalise,
)
from repl_rl.errors import ConfigError, UserCodeError

settings.register_profile("busy", deadline=None, max_examples=60)
settings.load_profile("busy")

rewards = st.integers(-64, 64).map(lambda n: n / 32)
lines = st.lists(rewards, max_size=5).map(tuple)


@st.composite
def groups(draw: st.DrawFn, outcomes: st.SearchStrategy[float | None] = rewards) -> GroupRewards:
    rows = draw(st.lists(st.tuples(outcomes, lines), min_size=1, max_size=8))
    states = tuple(tuple(draw(st.sampled_from("abc")) for _ in r) for _, r in rows)
    return GroupRewards.from_rows(tuple(o for o, _ in rows), tuple(r for _, r in rows), states)


def with_shaping(group: GroupRewards, entries: Sequence[float], bound: float = math.inf) -> GroupRewards:
    """The group with these entries of a table on its lines, over and over, on top of what lines were given."""
    table = cycle(entries)
    shaping = tuple(tuple(next(table) for _ in row) for row in group.rewards_G_L)
    rewards = tuple(
        tuple(r + s for r, s in zip(*rows, strict=True)) for rows in zip(group.rewards_G_L, shaping, strict=True)
    )
    return GroupRewards.from_rows(group.outcomes_G, rewards, group.states_G_L, shaping, bound)


graded = groups()
shapings = st.lists(st.sampled_from([0.0, -0.125, -0.25, 0.0625]), min_size=1, max_size=7)
"""Entries of a table: sums of few powers of two, so that what was given beside them comes out exactly."""
partly = groups(st.one_of(st.none(), rewards))
names = st.sampled_from(sorted(ESTIMATORS))


@given(names, partly)
def test_every_estimator_gives_one_finite_number_a_line(name: str, group: GroupRewards) -> None:
    advantages = load_estimator(name)(group)
    assert [len(row) for row in advantages] == [len(row) for row in group.rewards_G_L]
    assert all(math.isfinite(value) for row in advantages for value in row)


@given(names, st.integers(1, 6), st.sampled_from([0.0, 1.0]), st.integers(0, 3))
def test_a_group_without_variance_gives_exact_zeros(name: str, size: int, value: float, count: int) -> None:
    group = GroupRewards.from_rows((value,) * size, ((0.0,) * min(count, 1),) * size)
    assert all(a == 0.0 for row in load_estimator(name)(group) for a in row)
    if name == "outcome":
        group = GroupRewards.from_rows((value,) * size, ((0.25,) * count,) * size)
        assert all(a == 0.0 for row in load_estimator(name)(group) for a in row)


@given(names, rewards)
def test_a_group_of_one_line_has_nothing_to_compare_it_with(name: str, value: float) -> None:
    assert load_estimator(name)(GroupRewards.from_rows((value,), ((0.5,),), (("a",),))) == ((0.0,),)


@given(names, graded)
def test_a_rollout_that_failed_takes_no_part_in_any_baseline(name: str, group: GroupRewards) -> None:
    with_fault = GroupRewards.from_rows((*group.outcomes_G, None), (*group.rewards_G_L, ()), (*group.states_G_L, ()))
    for ours, theirs in zip(load_estimator(name)(with_fault), load_estimator(name)(group), strict=False):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)


@given(graded)
def test_outcome_does_not_look_at_line_rewards(group: GroupRewards) -> None:
    blank = GroupRewards.from_rows(group.outcomes_G, tuple((0.0,) * len(row) for row in group.rewards_G_L))
    assert load_estimator("outcome")(group) == load_estimator("outcome")(blank)


@given(graded)
def test_two_stream_without_line_rewards_is_outcome(group: GroupRewards) -> None:
    blank = GroupRewards.from_rows(group.outcomes_G, tuple((0.0,) * len(row) for row in group.rewards_G_L))
    assert load_estimator("two_stream")(blank) == load_estimator("outcome")(blank)


@given(graded, shapings, st.floats(0, 2, width=32))
def test_two_stream_is_the_weighted_sum_of_outcome_rewards_and_shaping(
    group: GroupRewards, entries: list[float], weight: float
) -> None:
    shaped = with_shaping(group, entries)
    given = [r for row in group.rewards_G_L for r in row if r]
    flat = torch.tensor([*given, *(0.0 for row in group.rewards_G_L if row)], dtype=torch.float32)
    varied = len(set(flat.tolist())) > 1 and sum(map(bool, group.rewards_G_L)) > 1
    baseline = flat.mean().clamp(min=0.0)
    deviation = (((flat - baseline) ** 2).sum() / max(len(flat) - 1, 1)).sqrt()
    line = iter(((flat - baseline) / (deviation + EPSILON)).tolist() if varied else [0.0] * len(given))
    ours, plain = load_estimator(f"two_stream(line_weight={weight!r})")(shaped), load_estimator("outcome")(group)
    for i, row in enumerate(ours):
        for at, value in enumerate(row):
            credit = next(line) if group.rewards_G_L[i][at] else 0.0
            expected = plain[i][at] + weight * (credit + shaped.shaping_G_L[i][at] / 0.05)
            assert value == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_in_two_stream_an_error_costs_its_own_line_and_pays_no_other() -> None:
    a = load_estimator("two_stream")(GroupRewards.from_rows((1.0, 1.0), ((0.0, -0.1, 0.0), (0.0, 0.0))))
    assert a[0][1] < 0
    assert a[0][0] == a[0][2] == a[1][0] == a[1][1] == 0.0


@given(names, st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 4))
def test_harmless_lines_by_the_dozen_gain_nothing_over_an_honest_rollout_of_equal_outcome(
    name: str, others: list[float], farmed: int, honest: int
) -> None:
    """Prints, empty lines and try/except all run without error: under the default table they earn 0, like any line."""
    mates = tuple((0.0, -0.1) for _ in others)
    states = (
        tuple(f"f{n}" for n in range(farmed)),
        tuple(f"h{n}" for n in range(honest)),
        *(("m", "n") for _ in others),
    )
    rows = ((0.0,) * farmed, (0.0,) * honest, *mates)
    group = GroupRewards.from_rows((1.0, 1.0, *others), rows, states, rows, 0.5)
    plain = GroupRewards.from_rows(group.outcomes_G, tuple((0.0,) * len(row) for row in rows), states)
    advantages = load_estimator(name)(group)
    assert max(advantages[0]) <= min(advantages[1]) + 1e-6, "no token of the long rollout is worth more"
    assert advantages[:2] == load_estimator(name)(plain)[:2], "the errors of others pay neither of them"


@given(st.lists(rewards, min_size=2, max_size=9))
def test_normalised_values_that_vary_have_mean_zero_and_unbiased_deviation_one(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    y = normalise(x)
    if x.std() > 0.1:
        assert y.mean().item() == pytest.approx(0, abs=1e-3)
        assert y.std().item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("count", range(1, 12))
def test_equal_rewards_leave_nothing_behind_by_rounding(count: int) -> None:
    group = GroupRewards.from_rows((0.1, 0.1), ((0.1,) * count, (0.1,) * count))
    assert load_estimator("process")(group) == ((0.0,) * count, (0.0,) * count)


@given(graded, shapings)
def test_process_is_the_formula_of_deepseekmath_read_aloud(group: GroupRewards, entries: list[float]) -> None:
    """Its steps are the lines that were given a reward above 0, and the outcome after the last line."""
    steps_G = [
        [*((at, r) for at, r in enumerate(row) if r > 0), (len(row), value or 0.0)]
        for row, value in zip(group.rewards_G_L, group.outcomes_G, strict=True)
        if row
    ]
    everything = [r for steps in steps_G for _, r in steps]
    if len(steps_G) < 2:
        return
    rewards_G = [row for row in group.rewards_G_L if row]
    penalties = [r for row in rewards_G for r in row if r < 0]
    divisor = max(0.5, math.sqrt(sum(r * r for r in penalties) / max(len(penalties), 1)))
    mean = sum(everything) / len(everything)
    std = math.sqrt(sum((r - mean) ** 2 for r in everything) / (len(everything) - 1))
    if 0 < std < 0.1:
        return  # float32 against float64, blown up by a small divisor
    shaped = with_shaping(group, entries, bound=0.25)
    advantages = [row for row in load_estimator("process")(shaped) if row]
    shaping = [row for row in shaped.shaping_G_L if row]
    for ours, steps, rewards_L, row in zip(advantages, steps_G, rewards_G, shaping, strict=True):
        for start, value in enumerate(ours):
            brute = sum((r - mean) / (std + 1e-4) for at, r in steps if at >= start)
            brute += sum(r / divisor for r in rewards_L[start:] if r < 0)
            errors = max(-0.25, min(0.25, sum(row[start:])))
            assert value == pytest.approx(brute + errors / 0.5, rel=1e-3, abs=1e-3)


@given(graded)
def test_process_without_rewards_of_lines_is_outcome(group: GroupRewards) -> None:
    kept = [i for i, row in enumerate(group.rewards_G_L) if row]
    plain = GroupRewards.from_rows(
        tuple(group.outcomes_G[i] for i in kept), tuple((0.0,) * len(group.rewards_G_L[i]) for i in kept)
    )
    for ours, theirs in zip(load_estimator("process")(plain), load_estimator("outcome")(plain), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@given(graded, shapings, st.floats(0.1, 1))
def test_return_to_go_is_the_discounted_return_less_that_of_the_others_at_the_same_step(
    group: GroupRewards, entries: list[float], discount: float
) -> None:
    def outcome(i: int, at: int) -> float:
        return discount ** (len(group.rewards_G_L[i]) - 1 - at) * (group.outcomes_G[i] or 0.0)

    def rewards(i: int, at: int) -> float:
        return sum(discount ** (k - at) * r for k, r in enumerate(group.rewards_G_L[i]) if k >= at)

    def step(i: int, at: int) -> int:
        return sum(r > 0 for r in group.rewards_G_L[i][:at])

    playing = [i for i, row in enumerate(group.rewards_G_L) if row]
    shaped = with_shaping(group, entries, bound=0.25)
    for i, ours in enumerate(load_estimator(f"return_to_go(discount={discount!r})")(shaped)):
        for at, value in enumerate(ours):
            places = [
                (j, next((p for p in range(len(group.rewards_G_L[j])) if step(j, p) == step(i, at)), -1))
                for j in playing
                if j != i
            ]
            others = [(j, place if place >= 0 else len(group.rewards_G_L[j]) - 1) for j, place in places]
            expected = 0.0
            if others:
                expected = outcome(i, at) - sum(outcome(*other) for other in others) / len(others)
                earned = [rewards(*other) for other in others]
                expected += rewards(i, at) - max(sum(earned) / len(earned), min(0.0, max(rewards(i, at), *earned)))
            expected += max(-0.25, min(0.25, sum(shaped.shaping_G_L[i][at:])))
            assert value == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_return_to_go_without_line_rewards_is_leave_one_out_of_outcomes() -> None:
    a = load_estimator("return_to_go")(GroupRewards.from_rows((1.0, 0.0, 0.5), ((0.0, 0.0), (0.0,), (0.0, 0.0, 0.0))))
    assert a == ((0.75, 0.75), (-0.75,), (0.0, 0.0, 0.0))


def test_state_anchor_compares_lines_that_start_from_the_same_state() -> None:
    group = GroupRewards.from_rows((1.0, 1.0), ((0.0, -0.4), (0.0, 0.0)), (("start", "x"), ("start", "y")))
    a = load_estimator("state_anchor(discount=1.0)")(group)
    assert a[0][1] == a[1][1] == 0.0, "nothing else started from x or from y, and the outcomes are equal"
    assert a[0][0] == pytest.approx(-0.4)
    assert a[1][0] == 0.0, "the penalty of another rollout pays nothing"
    paid = GroupRewards.from_rows((1.0, 1.0), ((0.0, 0.4), (0.0, 0.0)), (("start", "x"), ("start", "y")))
    a = load_estimator("state_anchor(discount=1.0)")(paid)
    assert a[0][0] == pytest.approx(0.4)
    assert a[1][0] == pytest.approx(-0.4)


@given(graded)
def test_state_anchor_without_known_states_is_outcome(group: GroupRewards) -> None:
    unknown = GroupRewards.from_rows(group.outcomes_G, group.rewards_G_L)
    assert load_estimator("state_anchor")(unknown) == load_estimator("outcome")(unknown)


def test_nothing_normalises_to_nothing() -> None:
    assert normalise(torch.tensor([])).tolist() == []


def too_few(group: GroupRewards) -> Advantages:
    return tuple(row[1:] for row in group.rewards_G_L)


def not_a_number(group: GroupRewards) -> Advantages:
    return tuple((math.nan,) * len(row) for row in group.rewards_G_L)


def broken(group: GroupRewards) -> Advantages:
    raise KeyError("gone")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", r"gave \[1, 0\] advantages for \[2, 1\] lines"),
        ("not_a_number", "gave nan"),
        ("broken", "raised KeyError: 'gone'"),
    ],
)
def test_an_estimator_that_lies_is_named_in_the_error(function: str, message: str) -> None:
    group = GroupRewards.from_rows((0.0, 1.0), ((0.0, 0.0), (0.0,)))
    with pytest.raises(UserCodeError, match=message):
        load_estimator(f"{__name__}:{function}")(group)


@pytest.mark.parametrize("name", ["outcom", "no_such_module:f", f"{__name__}:no_such", f"{__name__}:__name__"])
def test_an_unknown_estimator_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_estimator(name)


def test_a_potential_discounts_as_its_estimator_does() -> None:
    assert [get_discount(name) for name in ("return_to_go", "state_anchor", "two_stream")] == [1.0, 0.95, 1.0]
    assert get_discount("return_to_go(discount=0.5)") == 0.5


def test_an_option_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"option line_weight of estimator outcome is 0.5; it has no options"):
        load_estimator("outcome(line_weight=0.5)")
    with pytest.raises(ConfigError, match=r"option weight of estimator two_stream is 1; its options are line_weight"):
        load_estimator("two_stream(weight=1)")


@pytest.mark.parametrize(
    "text", ["two_stream(line_weight=-1)", "return_to_go(discount=0)", "return_to_go(discount=1.5)"]
)
def test_an_option_out_of_its_bounds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(line_weight|discount) of estimator .* is .*; give"):
        load_estimator(text)


@pytest.mark.parametrize("text", ["two_stream(0.5)", "two_stream(line_weight=f())", "two_stream(", "two_stream(**x)"])
def test_options_that_are_no_literals_by_name_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write options as"):
        load_estimator(text)


def lucky(group: GroupRewards, *, luck: float = 1.0) -> Advantages:
    return tuple((luck,) * len(row) for row in group.rewards_G_L)


def test_an_estimator_of_the_user_takes_options_of_its_own() -> None:
    group = GroupRewards.from_rows((1.0, 0.0), ((0.0,), (0.0, 0.0)))
    assert load_estimator(f"{__name__}:lucky(luck=0.5)")(group) == ((0.5,), (0.5, 0.5))
    with pytest.raises(ConfigError, match="its options are luck"):
        load_estimator(f"{__name__}:lucky(chance=0.5)")


def test_rewards_that_do_not_match_the_rollouts_are_refused() -> None:
    with pytest.raises(UserCodeError, match="2 outcomes and 1 rows"):
        GroupRewards.from_rows((0.0, 1.0), ((0.0,),))
    with pytest.raises(UserCodeError, match="nan"):
        GroupRewards.from_rows((0.0,), ((math.nan,),))
