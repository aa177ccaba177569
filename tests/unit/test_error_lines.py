"""Penalties that count only where they can teach something: the first of a streak, and where another did without."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantage_estimators import GroupRewards, load_estimator, penalize_first_error
from tests.support.scripted_rollouts import TASK, world

ERROR, FINE, OPEN = "1 / 0\n", "6 * 7\n", "if True:\n"


@pytest.mark.parametrize(
    ("lines", "paid"),
    [
        ([ERROR, ERROR, ERROR], [-1, 0, 0]),
        ([FINE, ERROR, FINE, ERROR], [0, -1, 0, -1]),
        # A cell that is not complete says nothing yet: the streak goes on behind it.
        ([ERROR, OPEN, "  1 / 0\n\n", FINE], [-1, 0, 0, 0]),
        ([OPEN, "  1 / 0\n\n", ERROR], [0, -1, 0]),
    ],
)
def test_only_the_first_error_of_a_streak_costs(lines: list[str], paid: list[int]) -> None:
    (played,) = asyncio.run(world([*lines, "submit_final_answer(42)\n"]).collect([TASK]))
    assert len(played.lines) == len(lines) + 1
    assert penalize_first_error(played) == [*paid, 0]


entries = st.lists(st.sampled_from([0.0, -0.1, 0.05]), max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(entries, min_size=2, max_size=5), seed=st.integers(0, 1))
def test_penalties_count_only_where_a_rollout_of_the_group_did_without(
    rows: list[tuple[float, ...]], seed: int
) -> None:
    outcomes = tuple(float((i + seed) % 2) for i in range(len(rows)))
    group = GroupRewards.from_rows(outcomes, tuple(rows), shaping_G_L=tuple(rows))
    playing = [row for row in rows if row]
    without = tuple(tuple(max(s, 0.0) for s in row) for row in rows)
    left = (
        group
        if any(min(row) >= 0 for row in playing)
        else GroupRewards.from_rows(outcomes, without, shaping_G_L=without)
    )
    assert load_estimator("repl_rl.credit.advantage_estimators:two_stream_avoidable_errors")(group) == load_estimator(
        "two_stream"
    )(left)


def test_a_group_without_a_table_is_two_stream_of_what_was_given() -> None:
    group = GroupRewards.from_rows((1.0, 0.0), ((0.5, 0.0), (0.0,)))
    assert load_estimator("repl_rl.credit.advantage_estimators:two_stream_avoidable_errors")(group) == load_estimator(
        "two_stream"
    )(group)
