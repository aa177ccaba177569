"""Promises of `repl_rl.judges`."""

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.cli import main
from repl_rl.engine import ENGINES, EngineConfig
from repl_rl.engine.base import Engine
from repl_rl.engine.config import EngineOptions
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.judges import (
    JudgeLimits,
    JudgeProcesses,
    check_judges,
    find_judge,
    grade_answer,
    grade_async,
    parse_number,
)
from repl_rl.sandbox import InProcessSandbox
from repl_rl.tasks import Task, load_tasks

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
    assert grade_answer(task("abc"), answer) == 1.0


@pytest.mark.parametrize("answer", ["", "ABC", "ab c", "abc.", "''abc''", "'abc\"", "'abc", "'"])
def test_exact_refuses_everything_else(answer: str) -> None:
    assert grade_answer(task("abc"), answer) == 0.0


def test_an_integer_and_its_text_are_one_answer() -> None:
    assert grade_answer(task("160"), str(160)) == 1.0
    assert grade_answer(task("[1, 2]"), str([1, 2])) == 1.0


@pytest.mark.parametrize("judge", ["exact", "numeric"])
def test_no_answer_is_worth_nothing(judge: str) -> None:
    assert grade_answer(task("0", judge), None) == 0.0
    assert grade_answer(task("0", judge), "") == 0.0


@pytest.mark.parametrize("answer", ["1234.5", "1,234.5", "$1,234.50", "+1234.5", "12345e-1", "2469/2", "'1234.5'"])
def test_numeric_reads_the_usual_spellings(answer: str) -> None:
    assert grade_answer(task("1,234.5", "numeric"), answer) == 1.0


@pytest.mark.parametrize("answer", ["1234", "-1234.5", "12,34.5", "1234.5 eggs", "nan", "inf", "1_234.5", "0x4d2", "."])
def test_numeric_refuses_other_numbers_and_no_numbers(answer: str) -> None:
    assert grade_answer(task("1234.5", "numeric"), answer) == 0.0


def test_numeric_forgives_the_last_bits_of_a_float_and_no_more() -> None:
    assert grade_answer(task("0.3", "numeric"), repr(0.1 + 0.2)) == 1.0
    assert grade_answer(task("1/3", "numeric"), repr(1 / 3)) == 1.0
    assert grade_answer(task("0.3", "numeric"), "0.3001") == 0.0
    assert grade_answer(task("1.0", "numeric"), "0.9999999992") == 1.0
    assert grade_answer(task("1.0", "numeric"), "0.9999999988") == 0.0
    assert grade_answer(task("0", "numeric"), "-0.0") == 1.0


def test_numeric_compares_whole_numbers_and_fractions_exactly() -> None:
    assert grade_answer(task("123456789012", "numeric"), "123456789013") == 0.0
    assert grade_answer(task("123456789012", "numeric"), "123456789012.00001") == 1.0
    assert grade_answer(task("1/3", "numeric"), "2/6") == 1.0
    assert grade_answer(task("1/1000000000001", "numeric"), "1/1000000000000") == 0.0
    assert grade_answer(task(str(2**300), "numeric"), str(2**300)) == 1.0


def test_numeric_needs_a_reference_that_is_a_number() -> None:
    with pytest.raises(ConfigError, match="answer of task t is 'many'; the numeric judge needs a number"):
        grade_answer(task("many", "numeric"), "1")


@pytest.mark.parametrize("judge", ["exact", "numeric"])
@pytest.mark.parametrize("bomb", BOMBS, ids=[bomb[:8] for bomb in BOMBS])
def test_a_bomb_is_wrong_at_once(judge: str, bomb: str) -> None:
    before = time.process_time()
    assert grade_answer(task("1", judge), bomb) == 0.0
    assert time.process_time() - before < 0.5


@given(st.fractions(max_denominator=10**6))
def test_parse_number_reads_back_every_fraction(value: Fraction) -> None:
    assert parse_number(str(value)) == value


@given(st.text(max_size=80))
def test_no_text_makes_a_judge_raise(answer: str) -> None:
    for judge in ("exact", "numeric"):
        assert grade_answer(task("1", judge), answer) in (0.0, 1.0)


def test_an_unknown_judge_is_refused_by_name() -> None:
    known = "exact, numeric, math, regex, literal, named_values, tests, arguments"
    with pytest.raises(ConfigError, match=f"judge is 'vibes'; choose among {known}, or give"):
        find_judge("vibes")
    for name in ("nowhere_at_all:f", "math:absent"):
        with pytest.raises(ConfigError, match="it cannot be imported"):
            find_judge(name)
    with pytest.raises(ConfigError, match="'math:pi'; it is not a function"):
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
    assert grade_answer(task("a", "users_judges:half"), "a") == 0.5
    assert grade_answer(task("a", "users_judges:half"), "b") == 0.0
    assert grade_answer(task("a", "users_judges:broken"), None) == 0.0
    with pytest.raises(UserCodeError, match="judge users_judges:broken: on task t it raised ZeroDivisionError"):
        grade_answer(task("a", "users_judges:broken"), "a")
    for name in ("vague", "endless"):
        with pytest.raises(UserCodeError, match=f"judge users_judges:{name}: on task t it returned .* return a finite"):
            grade_answer(task("a", f"users_judges:{name}"), "a")
    with pytest.raises(UserCodeError, match=r"judge users_bad_module:f: importing .* raised ZeroDivisionError"):
        find_judge("users_bad_module:f")


@pytest.fixture(scope="module")
def processes() -> Iterator[JudgeProcesses]:
    """One limited process with short limits, shared: starting one costs a second."""
    made = JudgeProcesses(JudgeLimits(timeout_s=1.0, memory_mb=1024, processes=1))
    yield made
    made.close()


EQUAL_FORMULAS = (
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    ("x^2+1", "1 + x**2"),
    (r"\frac{2\sqrt{3}}{3}", "2*sqrt(3)/3"),
    (r"\frac{\pi}{4}", "pi/4"),
    ("1+2i", "1 + 2*I"),
    (r"(-\infty, 3]", "(-oo, 3]"),
    (r"\{1,2\}", "{2, 1}"),
    (r"\boxed{7}", "7"),
    ("$x=3$", "3"),
)
UNEQUAL_FORMULAS = (("18", "17 or 18"), ("18", "18 eggs"), ("18", "{17, 18}"), ("1/2", "1/3"), ("x", "y"), ("3", ""))


def test_math_reads_latex_and_python_and_picks_nothing_out_of_a_text(processes: JudgeProcesses) -> None:
    assert [processes.grade("math", task(a), b) for a, b in EQUAL_FORMULAS] == [1.0] * len(EQUAL_FORMULAS)
    assert [processes.grade("math", task(a), b) for a, b in UNEQUAL_FORMULAS] == [0.0] * len(UNEQUAL_FORMULAS)


def test_regex_takes_the_whole_answer(processes: JudgeProcesses) -> None:
    reference = task(r"\d{4}-\d\d-\d\d")
    answers = ("2024-02-29", " 2024-02-29\n", "on 2024-02-29", "2024-2-29")
    assert [processes.grade("regex", reference, answer) for answer in answers] == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"answer of task t is '\('; give a regular expression"):
        processes.grade("regex", task("("), "a")


@pytest.mark.parametrize(
    ("judge", "reference", "bomb", "reason"),
    [
        ("math", "1", "9**9**9", ""),
        ("math", "1", r"\binom{1000000000}{500000000}", "it took longer than 1 s"),
        ("regex", "(a+)+b", "a" * 60 + "c", "it took longer than 1 s"),
        ("tests.support.user_judges:sleeps", "1", "1", "it took longer than 1 s"),
        ("tests.support.user_judges:eats_memory", "1", "1", "it ran out of memory"),
        ("tests.support.user_judges:dies", "1", "1", "its process died"),
    ],
)
def test_a_judge_that_overruns_is_ended_in_time_its_answer_is_wrong_and_the_next_is_graded(
    processes: JudgeProcesses, caplog: pytest.LogCaptureFixture, judge: str, reference: str, bomb: str, reason: str
) -> None:
    processes.load(judge)
    before = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert processes.grade(judge, task(reference), bomb) == 0.0
    assert time.monotonic() - before < processes.limits.timeout_s + 2
    assert reason in caplog.text
    assert processes.grade("regex", task("a"), "a") == 1.0


def test_an_overrun_is_told_once_an_answer(processes: JudgeProcesses, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        processes.grade("tests.support.user_judges:dies", task("1"), "1")
    assert [record.getMessage() for record in caplog.records] == [
        "judge tests.support.user_judges:dies on task t: its process died; the answer counts as wrong"
    ]


@pytest.mark.parametrize("judge", ["math", "regex", "tests"])
@pytest.mark.parametrize("bomb", ["9" * 10_000_000, "(" * 1_000_000], ids=["digits", "brackets"])
def test_a_huge_answer_is_wrong_at_once_under_every_judge(judge: str, bomb: str) -> None:
    before = time.process_time()
    assert grade_answer(task("1", judge), bomb) == 0.0
    assert time.process_time() - before < 0.5


def test_a_judge_of_the_user_never_runs_in_this_process(processes: JudgeProcesses) -> None:
    pid = processes.grade("tests.support.user_judges:pid", task("1"), "1")
    assert pid != os.getpid()
    assert processes.grade("tests.support.user_judges:prints", task("1"), "1") == 1.0


def test_all_judges_of_the_tasks_are_checked_before_a_run() -> None:
    check_judges([task("1"), task("1", "tests.support.user_judges:pid")])
    with pytest.raises(ConfigError, match="judge is 'nowhere_at_all:f'; it cannot be imported"):
        check_judges([task("1"), task("1", "nowhere_at_all:f")])


ROWS = (
    ("numeric", "67 eggs", "the numeric judge needs a number"),
    ("regex", "(", "give a regular expression"),
    ("math", r"\\text{}", "the math judge needs a formula"),
    ("math", r"\\frac{1}{", "the math judge needs a formula"),
    ("tests", "def f(", "give tests"),
    ("tests", "67 eggs", "give tests"),
    ("math", "10^{10^{10}}", "the math judge needs a formula"),
    ("math", "0/0", "the math judge needs a formula"),
    ("math", "41 = 42", "the math judge needs a formula"),
    ("math", "1+" * 500 + "1", "no answer over 1,000 characters is right under the judge math; shorten it"),
    ("math", "1" * 1001, "no answer over 1,000 characters is right under the judge math; shorten it"),
    ("exact", "a" * 10_001, "no answer over 10,000 characters is right under the judge exact; shorten it"),
    ("math + 0.5*numeric", "x + 1", "the numeric judge needs a number"),
    ("tests.support.user_judges:even", "3", "judge tests.support.user_judges:even cannot read it: 3 is odd"),
)


@pytest.mark.parametrize(("judge", "answer", "told"), ROWS)
def test_a_reference_that_its_judge_cannot_read_is_found_with_file_line_and_field(
    tmp_path: Path, judge: str, answer: str, told: str
) -> None:
    rows = [f'{{"id": "{n}", "question": "q{n}", "answer": "2", "judge": "numeric"}}' for n in range(9)]
    rows.append(f'{{"id": "bad", "question": "q", "answer": "{answer}", "judge": "{judge}"}}')
    (tmp_path / "t.jsonl").write_text("\n".join(rows) + "\n")
    tasks = load_tasks(str(tmp_path / "t.jsonl"), trust=True)
    with pytest.raises(ConfigError) as refused:
        check_judges(tasks)
    assert f"{tmp_path}/t.jsonl:10: field 'answer' is " in str(refused.value)
    assert told in str(refused.value)
    check_judges(tasks[:-1])


@pytest.mark.parametrize(
    ("source", "row", "place"),
    [
        ("gsm8k:{}", {"question": "q", "answer": "so\n#### 18 eggs"}, "field 'answer' is '18 eggs'"),
        ("gsm8k:{}?answer=a&question=b", {"b": "q", "a": "#### x"}, "field 'a' is 'x'"),
        ("math:{}", {"problem": "q", "solution": r"\boxed{\text{}}"}, r"field 'solution' is '\\text{}'"),
        ("math:{}", {"problem": "q", "answer": "("}, "field 'answer' is '('"),
        ("math500:{}", {"problem": "q", "answer": r"\sqrt{", "unique_id": "u"}, r"field 'answer' is '\\sqrt{'"),
        ("{}?judge=numeric", {"id": "a", "question": "q", "answer": "many"}, "field 'answer' is 'many'"),
        ("humaneval:{}?judge=numeric", {"prompt": "1", "test": "2", "entry_point": "f"}, "field 'test' is "),
        ("mbpp:{}?judge=numeric", {"text": "q", "test_list": ["assert f()"]}, "field 'test_list' is "),
        (
            "{}",
            {
                "id": "a",
                "question": "q",
                "answer": 1,
                "follow_ups": [{"question": "q", "answer": "x", "judge": "numeric"}],
            },
            "follow-up 1: field 'answer' is 'x'",
        ),
    ],
)
def test_a_reference_of_any_source_is_checked(tmp_path: Path, source: str, row: dict[str, object], place: str) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError) as refused:
        check_judges(load_tasks(source.format(tmp_path / "t.jsonl")))
    assert f"t.jsonl:1: {place}" in str(refused.value)


def test_a_reference_of_a_data_set_is_checked(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"question": ["a", "b"], "answer": ["1", "x"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="saved, row 2: field 'answer' is 'x'; the numeric judge needs a number"):
        check_judges(load_tasks(f"dataset:{tmp_path}/saved?judge=numeric"))


@dataclass(frozen=True, slots=True)
class Unopened(EngineConfig):
    """Engine that must not be opened."""

    kind: ClassVar[str] = "unopened"
    about: ClassVar[str] = "of these tests"

    def open(self, opening: EngineOptions) -> AbstractAsyncContextManager[Engine]:
        raise AssertionError("it was opened")


@pytest.fixture
def unopened() -> Iterator[str]:
    ENGINES.register(Unopened)
    yield Unopened.kind
    del ENGINES.entries[Unopened.kind]


@pytest.mark.parametrize("verb", [["train", "--name", "n"], ["eval"], ["rollout"], ["sft", "--samples", "2"]])
def test_verbs_that_play_tasks_refuse_such_a_reference_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str], unopened: str
) -> None:
    lines = [json.dumps({"id": str(n), "question": f"q{n}", "answer": "x", "judge": "numeric"}) for n in range(30)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    words = [*verb, "--tasks", str(tmp_path / "t.jsonl"), "--engine", unopened, "--sandbox", "unsafe"]
    if verb[0] in ("train", "sft"):
        words += ["--out", str(tmp_path / "out")]
    assert main(words) == 2
    told = capsys.readouterr().err.strip()
    assert "field 'answer' is 'x'; the numeric judge needs a number" in told.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_references_of_ten_thousand_tasks_are_read_in_bounded_time() -> None:
    tasks = [Task(str(n), "?", f"{n}\\sqrt{{{n + 1}}}" if n % 10 == 0 else str(n), "math") for n in range(10_000)]
    before = time.monotonic()
    check_judges(tasks)
    print(f"10,000 references in {time.monotonic() - before:.1f} s")
    assert time.monotonic() - before < 120


@pytest.mark.parametrize(("name", "value"), [("timeout_s", 0.0), ("memory_mb", 10), ("processes", 0)])
def test_judge_limits_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"judge limit {name} is {value}"):
        JudgeLimits(**{name: value})  # type: ignore[arg-type]


DOCTESTS = ">>> f(2)\n4\n>>> for n in range(2):\n...     print(f(n))\n0\n1\n"


@pytest.mark.parametrize(
    ("tests", "program", "value"),
    [
        (DOCTESTS, "def f(x):\n    return x * x\n", 1.0),
        (DOCTESTS, "def f(x):\n    return x + x\n", 0.0),
        (DOCTESTS, "def f(x):\n    return x *\n", 0.0),
        (DOCTESTS, "raise SystemExit", 0.0),
        (DOCTESTS, "def f(x):\n    exit()\n", 0.0),
        (DOCTESTS, "class E:\n    __eq__ = lambda s, o: True\ndef f(x):\n    return E()\n", 0.0),
        ("assert f(3) == 9\nassert f(0) == 0", "f = lambda x: x * x", 1.0),
        ("assert f(3) == 9\nassert f(0) == 0", "f = lambda x: 9", 0.0),
    ],
)
def test_a_program_is_right_when_its_own_console_prints_what_every_test_expects(
    tests: str, program: str, value: float
) -> None:
    assert asyncio.run(grade_async(task(tests, "tests"), program, InProcessSandbox())) == value


def test_without_a_sandbox_the_tests_run_in_a_local_one_even_inside_an_event_loop() -> None:
    async def inside() -> tuple[float, float]:
        right, wrong = "def f(x): return x * x", "import os; os.kill(os.getpid(), 9)"
        return await grade_async(task(DOCTESTS, "tests"), right), grade_answer(task(DOCTESTS, "tests"), wrong)

    assert asyncio.run(inside()) == (1.0, 0.0)


def test_a_task_without_tests_is_refused() -> None:
    with pytest.raises(ConfigError, match="answer of task t is ' '; give tests"):
        asyncio.run(grade_async(task(" ", "tests"), "x = 1", InProcessSandbox()))


DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def gsm8k(folder: Path) -> Path:
    """The real test file where it is at hand; else as many problems of the same form, made here."""
    if DATA.exists():
        return DATA
    rng = random.Random(0)
    numbers = [rng.choice((f"{rng.randint(1000, 10**6):,}", str(rng.randint(0, 999)))) for _ in range(1319)]
    lines = [json.dumps({"question": f"problem {n}?", "answer": f"so\n#### {a}"}) for n, a in enumerate(numbers)]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines))
    return folder / "gsm8k.jsonl"


def perturbed(number: str, kind: int, rng: random.Random) -> str:
    """A wrong answer that a person or a policy could give instead of `number`."""
    value = int(number.replace(",", ""))
    digits = str(abs(value))
    at = rng.randrange(len(digits))
    other = digits[:at] + rng.choice([d for d in "123456789" if d != digits[at]]) + digits[at + 1 :]
    return (
        other,
        str(value + rng.choice((-1, 1))),
        str(-value) if value else "1",
        f"{value}0" if value else "10",
        f"{value}.5",
        f"{value} dollars",
        f"{value}/{rng.randint(2, 9)}" if value else "1/2",
        f"{value} or {value + 1}",
    )[kind]


def test_every_reference_answer_of_gsm8k_is_right_and_200_perturbed_ones_are_wrong(tmp_path: Path) -> None:
    tasks = load_tasks(f"gsm8k:{gsm8k(tmp_path)}")
    assert len(tasks) == 1319
    assert {t.judge for t in tasks} == {"numeric"}
    assert sum(grade_answer(t, t.answer) for t in tasks) == 1319
    assert sum(grade_answer(t, str(int(t.answer.replace(",", "")))) for t in tasks) == 1319
    rng = random.Random(200)
    wrong = [(t, perturbed(t.answer, n % 8, rng)) for n, t in enumerate(rng.sample(tasks, 200))]
    assert [(t.answer, answer) for t, answer in wrong if grade_answer(t, answer) != 0.0] == []


@pytest.mark.heavy
def test_math_agrees_with_numeric_on_every_reference_answer_of_gsm8k(tmp_path: Path) -> None:
    tasks = load_tasks(f"gsm8k:{gsm8k(tmp_path)}")
    judges = JudgeProcesses()
    try:
        assert [t.id for t in tasks if judges.grade("math", t, t.answer) != 1.0] == []
    finally:
        judges.close()
