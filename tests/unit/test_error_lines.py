"""Penalties that count only where they can teach something: the first of a streak, and where another did without."""

import asyncio

import pytest

from repl_rl.credit.advantage_estimators import penalize_first_error
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
