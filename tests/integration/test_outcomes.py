"""Outcomes by judges of the user, which run in processes."""

import asyncio
from dataclasses import replace

import pytest

from repl_rl.errors import ConfigError
from repl_rl.judges import grade_answer, grade_async
from tests.support.scripted_rollouts import TASK
from tests.unit.test_outcomes import RIGHT, WRONG, played

LENGTH, LINES = "tests.support.user_judges:length", "tests.support.user_judges:lines"


def test_several_judges_add_up_and_the_first_says_whether_it_is_solved() -> None:
    task = replace(TASK, judge=f"0.5*exact + 0.25*{LENGTH}")
    right, wrong = played(RIGHT, task=task), played(WRONG, task=task)
    assert [(part.name, part.value) for part in right.outcomes] == [("exact", 0.5), (LENGTH, 0.5)]
    assert (right.outcome, right.solved) == (1.0, True)
    assert (wrong.outcome, wrong.solved) == (0.5, False)
    assert grade_answer(task, "42") == 1.0


def test_a_judge_with_a_third_parameter_sees_the_rollout_and_the_tasks_other_fields_even_without_an_answer() -> None:
    task = replace(TASK, judge=f"exact + {LINES}", fields={"each": 0.25})
    t = played(["x = 1\n", "exit()\n"], task=task)
    assert (t.answer, t.outcome, t.grade) == (None, 0.5, 0.0)
    assert asyncio.run(grade_async(task, "42", None, t)) == 1.5
    with pytest.raises(ConfigError, match="it needs the rollout, which is missing"):
        grade_answer(task, "42")
