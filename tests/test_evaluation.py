"""Held-out figures, and the question whether answers follow what the console printed."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from repl_rl.evaluation import TamperedSandbox, evaluate, tamper, tamper_followed
from repl_rl.metrics import describe, families
from repl_rl.samplers import Rollouts, RolloutThread
from repl_rl.trajectory import Trajectory
from tests.test_samplers import thread
from tests.worlds import TASK, world


def play(lines: list[str], altered: bool = False) -> list[Trajectory]:
    rollouts = world(lines)
    if altered:
        rollouts = replace(rollouts, sandbox=TamperedSandbox(rollouts.sandbox))
    return asyncio.run(rollouts.collect([TASK]))


def test_altered_output_differs_in_every_digit_and_letter_and_keeps_its_shape() -> None:
    assert tamper("[160, -9]\n'abz'\n") == "[275, -1]\n'ecb'\n"


def test_a_console_is_altered_in_what_it_shows_and_not_in_what_it_computes() -> None:
    (t,) = play(["x = 6 * 7\n", "x\n", "submit_final_answer(x)\n"], altered=True)
    assert "53\n>>> " in "".join(s.text for s in t.segments if hasattr(s, "text"))
    assert t.answer == "42"


def test_an_answer_that_repeats_what_was_shown_follows_it() -> None:
    assert tamper_followed(play(["6 * 7\n", "submit_final_answer(53)\n"], altered=True)) == 1.0
    assert tamper_followed(play(["'ab'\n", "submit_final_answer('ec')\n"], altered=True)) == 1.0


def test_an_answer_that_repeats_the_truth_does_not_follow() -> None:
    assert tamper_followed(play(["6 * 7\n", "submit_final_answer(42)\n"], altered=True)) == 0.0


@pytest.mark.parametrize("lines", [["submit_final_answer(42)\n"], ["6 * 7\n", "submit_final_answer(6 * 7)\n"]])
def test_without_an_output_or_a_literal_there_is_nothing_to_follow(lines: list[str]) -> None:
    assert tamper_followed(play(lines, altered=True)) is None


def test_errors_are_shown_unaltered() -> None:
    (t,) = play(["1/0\n", "submit_final_answer(1)\n"], altered=True)
    assert any("ZeroDivisionError" in s.text for s in t.segments if hasattr(s, "text"))


def test_rates_count_what_they_say() -> None:
    figures = describe(play(["1/0\n", "# why\n", "print(1)\n", "print(1)\n", "submit_final_answer(42)\n"]))
    assert figures["solve_rate"] == 1.0
    assert figures["line_error_rate"] == pytest.approx(1 / 5)
    assert figures["void_line_rate"] == pytest.approx(1 / 5)
    assert figures["print_rate"] == pytest.approx(2 / 5)
    assert figures["repeat_rate"] == pytest.approx(1 / 4)
    assert figures["lines_per_rollout"] == 5


def test_nothing_has_rates_of_nought() -> None:
    assert set(describe([]).values()) == {0.0}


def test_an_evaluation_tells_solve_rates_by_family() -> None:
    async def opener(_: AsyncExitStack) -> Rollouts:
        return world(["submit_final_answer(42)\n"])

    tasks = [replace(TASK, id="a", family="easy"), replace(TASK, id="b", answer="7", family="hard")]
    with RolloutThread(opener, {}) as source:
        result = evaluate(source, tasks)
    assert (result.solve_rate, result.greedy, dict(result.families)) == (0.5, 0.5, {"easy": 1.0, "hard": 0.0})
    with thread(world(["submit_final_answer(42)\n"])) as source:
        assert families(source.sample([TASK]), {TASK.id: ""}) == {"": 1.0}
