"""Tasks of many lines: right answers, both sides of the split, and slips that nothing tells of."""

import random

from benchmarks.credit import long_problems as long
from benchmarks.credit.conditions import LONG_LIMITS
from repl_rl.sft.demonstrations import ECHO
from repl_rl.tasks import Split, get_split


def shown(lines: tuple[str, ...]) -> str:
    """What the last line before the answer prints; "": a name was never assigned."""
    space: dict[str, object] = {}
    try:
        for line in lines[:-2]:
            exec(line, space)
        return str(eval(lines[-2], space))
    except NameError:
        return ""


def test_a_clean_demonstration_comes_to_the_answer_in_nine_to_eleven_lines() -> None:
    rng = random.Random(0)
    for _ in range(200):
        one = long.draw_long_problem(rng)
        lines = long.clean_plan(one).lines
        assert shown(lines) == one.answer
        assert all(f"{line}" in one.question for line in one.setup)
        assert ECHO in lines[-1]
        assert long.FEWEST + 2 <= len(lines) <= long.MOST + 2 <= LONG_LIMITS.max_lines


def test_slips_are_silent_and_spoil_most_ends_but_not_all() -> None:
    rng, solved, silent = random.Random(0), 0, 0
    for _ in range(1000):
        one = long.draw_long_problem(rng)
        found = shown(long.slipping_plan(one, rng).lines)
        solved, silent = solved + (found == one.answer), silent + (found != "")
    assert 0.05 < solved / 1000 < 0.25
    assert silent / 1000 > 0.9


def test_tasks_are_different_ones_of_their_split_and_the_same_with_equal_arguments() -> None:
    train, held_out = (long.tasks(split, 40, seed=0) for split in (Split.TRAIN, Split.HELD_OUT))
    assert len({task.id for task in (*train, *held_out)}) == 80
    assert {get_split(task.question) for task in train} == {Split.TRAIN}
    assert {get_split(task.question) for task in held_out} == {Split.HELD_OUT}
    assert long.tasks(Split.TRAIN, 40, seed=0) == train
