"""An error never becomes cheaper by making more of them, in any estimator, wherever the additional one stands (K17)."""

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantage_estimators import (
    ESTIMATORS,
    GroupRewards,
    compute_reward_to_go,
    get_discount,
    load_estimator,
)
from repl_rl.credit.rewards import RewardTable

LEAST = 1e-6
"""What rounding may move."""
TABLE = RewardTable()
EXACT = ["outcome", "two_stream", "process", "return_to_go"]
"""Estimators in which it holds wherever the error stands, and whatever console state it leaves."""
entries = st.sampled_from([0.0, 0.0, -0.1, -0.1, -0.3, 0.05])
"""Of a table: harmless lines, errors of two sizes, and a line that pays."""
paid = st.sampled_from([0.0, 0.0, 0.0, 0.25, -0.5, 2.0])
"""What a line was given by others than the table."""


def rewarded(
    outcomes: list[float | None], given_G_L: list[list[float]], shaping_G_L: list[list[float]], states: list[list[str]]
) -> GroupRewards:
    rows = [[g + s for g, s in zip(*pair, strict=True)] for pair in zip(given_G_L, shaping_G_L, strict=True)]
    frozen = [tuple(tuple(row) for row in each) for each in (rows, shaping_G_L)]
    return GroupRewards.from_rows(tuple(outcomes), frozen[0], tuple(map(tuple, states)), frozen[1], TABLE.bound)


@st.composite
def one_error_more(draw: st.DrawFn, least: float = -2.0) -> tuple[GroupRewards, GroupRewards, int, int]:
    """A group, the same with one more error line in one rollout, which rollout, and where the line stands.

    The error leaves the console's state as it was, as a syntax error does. `least` is the smallest outcome.
    """
    size = draw(st.integers(1, 6))
    numbers = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(least, 2, width=16))
    outcomes = draw(st.lists(st.one_of(st.none(), numbers), min_size=size, max_size=size))
    lengths = draw(st.lists(st.integers(1, 6), min_size=size, max_size=size))
    shaping = [draw(st.lists(entries, min_size=n, max_size=n)) for n in lengths]
    given_G_L = [draw(st.lists(paid, min_size=n, max_size=n)) for n in lengths]
    if least >= 0:
        given_G_L = [[abs(g) for g in row] for row in given_G_L]
    states = [draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n)) for n in lengths]
    i = draw(st.integers(0, size - 1))
    at = draw(st.integers(0, lengths[i]))
    before = rewarded(outcomes, given_G_L, shaping, states)
    here = states[i][at] if at < lengths[i] else draw(st.sampled_from("abc"))
    shaping[i].insert(at, draw(st.sampled_from([-0.1, -0.3])))
    given_G_L[i].insert(at, 0.0)
    states[i].insert(at, here)
    return before, rewarded(outcomes, given_G_L, shaping, states), i, at


def raised(name: str, before: GroupRewards, after: GroupRewards, i: int, at: int) -> list[float]:
    """By how much the advantage of each error line of rollout `i` rose through the additional one."""
    old, new = (load_estimator(name)(group)[i] for group in (before, after))
    kept = (*new[:at], *new[at + 1 :])
    return [b - a for a, b, s in zip(old, kept, before.shaping_G_L[i], strict=True) if s < 0]


# Each drawn group is given to all estimators: to draw it takes ten times as long as to compare one.


@settings(max_examples=150, deadline=None)
@given(case=one_error_more())
def test_an_additional_error_raises_no_errors_advantage(case: tuple[GroupRewards, GroupRewards, int, int]) -> None:
    for name in EXACT:
        assert max(raised(name, *case), default=0.0) <= LEAST, name


@settings(max_examples=150, deadline=None)
@given(case=one_error_more(least=0.0))
def test_with_a_discount_and_by_states_the_same_holds_where_what_was_given_is_not_below_0(
    case: tuple[GroupRewards, GroupRewards, int, int],
) -> None:
    for name in ("return_to_go(discount=0.9)", "state_anchor", "state_anchor(discount=1.0)"):
        assert max(raised(name, *case), default=0.0) <= LEAST, name


@settings(max_examples=80, deadline=None)
@given(case=one_error_more())
def test_where_nothing_is_compared_at_a_step_it_raises_none_in_other_rollouts_either(
    case: tuple[GroupRewards, GroupRewards, int, int],
) -> None:
    before, after, i, _ = case
    for name in ("outcome", "two_stream", "process"):
        old, new = (load_estimator(name)(group) for group in (before, after))
        others = [j for j in range(len(old)) if j != i]
        assert all(new[j] == pytest.approx(old[j], abs=LEAST) for j in others), name


@settings(max_examples=80, deadline=None)
@given(case=one_error_more())
def test_what_the_table_takes_never_becomes_less_in_any_of_them(
    case: tuple[GroupRewards, GroupRewards, int, int],
) -> None:
    """The share of an advantage that is the table's, by leaving the table out: whatever outcomes and states are."""
    before, after, i, at = case

    def table_s(name: str, group: GroupRewards) -> list[float]:
        bare = group.map_lines(lambda line: replace(line, reward=line.given_reward, shaping=0.0))
        rows = zip(load_estimator(name)(group)[i], load_estimator(name)(bare)[i], strict=True)
        return [with_table - without for with_table, without in rows]

    for name in sorted(ESTIMATORS):
        old, new = table_s(name, before), table_s(name, after)
        kept = [*new[:at], *new[at + 1 :]]
        assert all(b <= a + LEAST for a, b in zip(old, kept, strict=True)), name
        assert new[at] <= LEAST or name == "outcome" or 0.05 in after.shaping_G_L[i], f"{name}: an error never pays"


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("errors", [8, 32])
def test_a_rollout_of_errors_is_worth_no_more_than_seven_honest_ones_with_one_each(name: str, errors: int) -> None:
    """The case that was found: 32 errors earned an advantage above 0 beside honest rollouts at -0.79."""
    honest = [[-0.1, 0.0] for _ in range(7)]
    rows = tuple(map(tuple, [[-0.1] * errors, *honest]))
    states = tuple(tuple("s" * len(row)) for row in rows)
    advantages = load_estimator(name)(GroupRewards.from_rows((0.0,) * 8, rows, states, rows, TABLE.bound))
    spam, error = advantages[0], advantages[1][0]
    assert max(spam) <= error + LEAST
    assert fmean(spam) <= error + LEAST
    assert error == 0.0 if name == "outcome" else error < 0.0


def test_a_loss_that_is_put_off_weighs_less_under_a_discount_and_that_is_not_ours_to_promise() -> None:
    """The counterexample of docs/specification.md: an error before a loss of 1, and one more error after it."""
    one, two = ((-0.1, 0.0), (0.0,)), ((-0.1, -0.1, 0.0), (0.0,))
    name = "return_to_go(discount=0.5)"
    old, new = (
        load_estimator(name)(GroupRewards.from_rows((-1.0, 0.0), rows, (), rows, TABLE.bound))[0][0]
        for rows in (one, two)
    )
    assert [old, new] == pytest.approx([-0.6, -0.45])


def test_an_exception_may_leave_a_state_that_nobody_shares_and_that_is_not_ours_to_promise() -> None:
    """The other counterexample: after an exception the console is in another state, where nothing is compared."""
    one, two = ((0.0, -0.1), (0.0, 0.0)), ((0.0, -0.1, -0.1), (0.0, 0.0))
    here, there = (("a", "b"), ("a", "b")), (("a", "b", "c"), ("a", "b"))
    plain = "state_anchor(discount=1.0)"
    old = load_estimator(plain)(GroupRewards.from_rows((0.0, 1.0), one, here, one, TABLE.bound))[0][1]
    new = load_estimator(plain)(GroupRewards.from_rows((0.0, 1.0), two, there, two, TABLE.bound))[0][2]
    outcome = load_estimator("outcome")(GroupRewards.from_rows((0.0, 1.0), one))[0][1]
    assert [old - outcome, new - outcome] == pytest.approx([-1.2, -0.2])


AS_GIVEN = ["two_stream", "process", "return_to_go", "return_to_go(discount=0.5)", "state_anchor"]


def as_given(name: str) -> str:
    return f"{name.removesuffix(')')}{', ' if '(' in name else '('}given='as_given')"


def without_given(group: GroupRewards) -> GroupRewards:
    return group.map_lines(lambda line: replace(line, reward=line.shaping))


@settings(max_examples=80, deadline=None)
@given(case=one_error_more())
def test_a_reward_that_arrives_as_given_is_added_as_it_is_whatever_others_of_the_group_were_given(
    case: tuple[GroupRewards, GroupRewards, int, int],
) -> None:
    group, *_ = case
    for name in AS_GIVEN:
        discount = 0.0 if name == "two_stream" else get_discount(name)
        with_them, plain = load_estimator(as_given(name))(group), load_estimator(name)(without_given(group))
        for row, plain_row, given_L in zip(with_them, plain, group.given_G_L, strict=True):
            added = [a - b for a, b in zip(row, plain_row, strict=True)]
            assert added == pytest.approx(list(compute_reward_to_go(given_L, discount)), abs=1e-5), name


@settings(max_examples=80, deadline=None)
@given(case=one_error_more(), penalty=st.sampled_from([-0.3, -2.0]))
def test_one_more_penalty_of_a_samplers_own_raises_no_penalised_lines_advantage_where_it_arrives_as_given(
    case: tuple[GroupRewards, GroupRewards, int, int], penalty: float
) -> None:
    before, after, i, at = case
    rows = [[*row] for row in without_shaping(after, i, at).rewards_G_L]
    rows[i][at] = penalty
    more = GroupRewards.from_rows(after.outcomes_G, rows, after.states_G_L, (), after.shaping_bound)
    for name in (*EXACT[1:], "state_anchor(discount=1.0)"):
        old, new = (load_estimator(as_given(name))(group)[i] for group in (without_shaping(before, i, None), more))
        kept = (*new[:at], *new[at + 1 :])
        penalised = [b - a for a, b, g in zip(old, kept, before.given_G_L[i], strict=True) if g < 0]
        assert max(penalised, default=0.0) <= LEAST, name


def without_shaping(group: GroupRewards, i: int, at: int | None) -> GroupRewards:
    """What was given alone, and nothing to line `at` of rollout `i`."""
    rows = [[0.0 if (j, n) == (i, at) else g for n, g in enumerate(row)] for j, row in enumerate(group.given_G_L)]
    return GroupRewards.from_rows(group.outcomes_G, rows, group.states_G_L, (), group.shaping_bound)


def test_compared_a_penalty_that_is_due_more_often_is_nearer_to_the_mean_and_as_given_it_is_what_it_is() -> None:
    once, often = ((-0.3, 0.0), (0.0,)), ((-0.3,) * 8, (0.0,))
    first = [load_estimator("two_stream")(GroupRewards.from_rows((0.0, 0.0), rows))[0][0] for rows in (once, often)]
    assert first[0] < first[1] < 0
    first = [
        load_estimator(as_given("two_stream"))(GroupRewards.from_rows((0.0, 0.0), rows))[0][0] for rows in (once, often)
    ]
    assert first == [-0.3, -0.3]


PENALTIES = [
    *sorted(ESTIMATORS),
    "two_stream(line_weight=1.0)",
    "return_to_go(discount=0.5)",
    "state_anchor(discount=1.0)",
    *map(as_given, AS_GIVEN),
]


@st.composite
def penalised(draw: st.DrawFn) -> GroupRewards:
    """A group whose lines were given nothing, or less, beside what the table gives."""
    group, *_ = draw(one_error_more())
    penalty = st.sampled_from([0.0, 0.0, -0.1, -0.5, -3.0, -1e-9])
    rows = [[s + draw(penalty) for s in row] for row in group.shaping_G_L]
    return GroupRewards.from_rows(group.outcomes_G, rows, group.states_G_L, group.shaping_G_L, group.shaping_bound)


@settings(max_examples=150, deadline=None)
@given(group=penalised())
def test_rewards_that_are_all_at_most_0_raise_the_advantage_of_no_line(group: GroupRewards) -> None:
    for name in PENALTIES:
        rows = zip(load_estimator(name)(group), load_estimator(name)(without_given(group)), strict=True)
        raised_by = [a - b for with_them, without in rows for a, b in zip(with_them, without, strict=True)]
        assert max(raised_by, default=0.0) <= LEAST, name


@pytest.mark.parametrize("name", PENALTIES)
def test_many_small_penalties_beside_a_large_one_pay_nothing(name: str) -> None:
    """The case that was found: six lines given -0.1 beside one line given -0.5, in rollouts of equal outcome."""
    rows, states = ((-0.1,) * 6, (-0.5,)), (("s",) * 6, ("s",))
    advantages = load_estimator(name)(GroupRewards.from_rows((0.0, 0.0), rows, states, (), TABLE.bound))
    assert max(max(row) for row in advantages) <= 0
    if name not in ("outcome",):
        assert min(min(row) for row in advantages) < 0, "a penalty costs"


@pytest.mark.parametrize("name", ["two_stream", "process", "return_to_go", "state_anchor"])
def test_rewards_of_which_none_is_below_0_are_compared_with_their_mean(name: str) -> None:
    states = (("s", "t"), ("s", "t"))
    advantages = load_estimator(name)(GroupRewards.from_rows((0.0, 0.0), ((0.5, 0.1), (0.1, 0.1)), states))
    assert advantages[0][0] > 0 > advantages[1][0]
