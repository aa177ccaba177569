"""Promises of `repl_rl.judges`."""

import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.judges import find_judge, grade, parse_number
from repl_rl.tasks import Task

BOMBS = (
    "9**9**9",
    "9" * 10_000_000,
    "(" * 100_000 + ")" * 100_000,
    "1e999",
    "1e" + "9" * 60,
    "1/0",
    "," * 64,
    "'" * 64,
)


def task(answer: str, judge: str = "exact") -> Task:
    return Task("t", "?", answer, judge)


@pytest.mark.parametrize("answer", ["abc", " abc\n", "'abc'", '"abc"', " 'abc' "])
def test_exact_strips_space_and_one_pair_of_quotes(answer: str) -> None:
    assert grade(task("abc"), answer) == 1.0


@pytest.mark.parametrize("answer", ["", "ABC", "ab c", "abc.", "''abc''", "'abc\"", "'abc", "'"])
def test_exact_refuses_everything_else(answer: str) -> None:
    assert grade(task("abc"), answer) == 0.0


def test_an_integer_and_its_text_are_one_answer() -> None:
    assert grade(task("160"), str(160)) == 1.0
    assert grade(task("[1, 2]"), str([1, 2])) == 1.0


@pytest.mark.parametrize("judge", ["exact", "numeric"])
def test_no_answer_is_worth_nothing(judge: str) -> None:
    assert grade(task("0", judge), None) == 0.0
    assert grade(task("0", judge), "") == 0.0


@pytest.mark.parametrize("answer", ["1234.5", "1,234.5", "$1,234.50", "+1234.5", "12345e-1", "2469/2", "'1234.5'"])
def test_numeric_reads_the_usual_spellings(answer: str) -> None:
    assert grade(task("1,234.5", "numeric"), answer) == 1.0


@pytest.mark.parametrize("answer", ["1234", "-1234.5", "12,34.5", "1234.5 eggs", "nan", "inf", "1_234.5", "0x4d2", "."])
def test_numeric_refuses_other_numbers_and_no_numbers(answer: str) -> None:
    assert grade(task("1234.5", "numeric"), answer) == 0.0


def test_numeric_forgives_the_last_bits_of_a_float_and_no_more() -> None:
    assert grade(task("0.3", "numeric"), repr(0.1 + 0.2)) == 1.0
    assert grade(task("1/3", "numeric"), repr(1 / 3)) == 1.0
    assert grade(task("0.3", "numeric"), "0.3001") == 0.0
    assert grade(task("0", "numeric"), "-0.0") == 1.0


def test_numeric_needs_a_reference_that_is_a_number() -> None:
    with pytest.raises(ConfigError, match="answer of task t is 'many'; the numeric judge needs a number"):
        grade(task("many", "numeric"), "1")


@pytest.mark.parametrize("judge", ["exact", "numeric"])
@pytest.mark.parametrize("bomb", BOMBS, ids=[bomb[:8] for bomb in BOMBS])
def test_a_bomb_is_wrong_at_once(judge: str, bomb: str) -> None:
    before = time.process_time()
    assert grade(task("1", judge), bomb) == 0.0
    assert time.process_time() - before < 0.5


@given(st.fractions(max_denominator=10**6))
def test_parse_number_reads_back_every_fraction(value: Fraction) -> None:
    assert parse_number(str(value)) == value


@given(st.text(max_size=80))
def test_no_text_makes_a_judge_raise(answer: str) -> None:
    for judge in ("exact", "numeric"):
        assert grade(task("1", judge), answer) in (0.0, 1.0)


def test_an_unknown_judge_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="judge is 'vibes'; choose among exact, numeric, or give module:function"):
        find_judge("vibes")
    for name in ("nowhere_at_all:f", "math:absent"):
        with pytest.raises(ConfigError, match="it cannot be imported"):
            find_judge(name)
    with pytest.raises(ConfigError, match="'pi' is not a function"):
        find_judge("math:pi")


def test_a_judge_of_the_user_is_called_and_its_errors_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_judges.py").write_text(
        "def half(task, answer): return 0.5 if answer == task.answer else 0\n"
        "def broken(task, answer): return 1 / 0\n"
        "def vague(task, answer): return 'good'\n"
        "def endless(task, answer): return float('nan')\n"
    )
    (tmp_path / "users_bad_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert grade(task("a", "users_judges:half"), "a") == 0.5
    assert grade(task("a", "users_judges:half"), "b") == 0.0
    assert grade(task("a", "users_judges:broken"), None) == 0.0
    with pytest.raises(UserCodeError, match="judge users_judges:broken raised on task t: ZeroDivisionError"):
        grade(task("a", "users_judges:broken"), "a")
    for name in ("vague", "endless"):
        with pytest.raises(UserCodeError, match=f"judge users_judges:{name} returned .* return a finite number"):
            grade(task("a", f"users_judges:{name}"), "a")
    with pytest.raises(UserCodeError, match="importing 'users_bad_module' raised ZeroDivisionError"):
        find_judge("users_bad_module:f")
