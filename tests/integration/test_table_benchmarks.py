"""DABench and CRUXEval: their files are read, and answers are graded as the suites say."""

import asyncio
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError
from repl_rl.evaluation.evaluate import Study, build_task_result, read_study, write_study
from repl_rl.judges import check_judges, grade_answer, grade_async
from repl_rl.judges.apply_judges import parse_named_values
from repl_rl.judges.unit_test_judge import parse_call_arguments
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import open_console
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task, load_tasks
from repl_rl.tasks.load_tasks import validate_recorded_source
from tests.support.scripted_rollouts import world

QUESTIONS = (
    {"id": 3, "question": "Mean of a?", "constraints": "Two decimals.", "format": "@mean[x]", "file_name": "t.csv"},
    {"id": 5, "question": "Shape?", "constraints": "", "format": "@rows[n] @kind[k]", "file_name": "t.csv"},
)
LABELS = (
    {"id": 5, "common_answers": [["rows", "2"], ["kind", "small"]]},
    {"id": 3, "common_answers": [["mean", "1.50"]]},
)
ROW = {"code": "def f(a, b=1):\n    return sorted(a)[b:]", "input": "[3, 1, 2]", "output": "[2, 3]", "id": "sample_7"}


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "t.csv").write_text("a\n1\n2\n")
    write_rows(tmp_path / "questions.jsonl", *({**row, "level": "easy", "concepts": []} for row in QUESTIONS))
    write_rows(tmp_path / "labels.jsonl", *LABELS)
    return tmp_path


def test_a_question_about_a_table_has_the_table_in_its_console(suite: Path) -> None:
    first, second = tasks = load_tasks(f"dabench:{suite}")
    check_judges(tasks)
    assert (first.id, first.family, first.judge, first.answer) == ("dabench-3", "easy", "named_values", "@mean[1.50]")
    assert "Two decimals." in first.question
    assert "@mean[x]" in first.question
    assert "'t.csv'" in first.full_question
    assert first.workspace is second.workspace

    async def read_table() -> str:
        async with open_sandbox("local", warm=1) as sandbox, open_console(sandbox, first.workspace) as console:
            return (await console.push("print(open('t.csv').read())")).text

    assert asyncio.run(read_table()) == "a\n1\n2\n\n"
    assert grade_answer(second, "@rows[3] @kind[small]") == 0.5


def test_the_names_that_the_authors_gave_their_files_are_found(suite: Path) -> None:
    for name in ("questions.jsonl", "labels.jsonl", "tables"):
        (suite / name).rename(suite / f"da-dev-{name}")
    assert len(load_tasks(f"dabench:{suite}")) == 2


@pytest.mark.parametrize(
    ("file", "rows", "said"),
    [
        ("labels.jsonl", LABELS[:1], r"questions.jsonl:1: field 'id' is '3'; .*labels.jsonl has no answer"),
        ("labels.jsonl", [{"id": 3, "common_answers": [["mean", 1.5]]}], "give a name and a value, both texts"),
        ("labels.jsonl", [{"id": 3, "common_answers": []}], "give pairs of a name and a value"),
        ("questions.jsonl", [{**QUESTIONS[0], "file_name": "../labels.jsonl"}], "give a path below the folder"),
        ("questions.jsonl", [{**QUESTIONS[0], "file_name": "/etc/passwd"}], "give a path below the folder"),
        ("questions.jsonl", [{**QUESTIONS[0], "file_name": "u.csv"}], "it cannot be read"),
    ],
)
def test_a_broken_suite_is_refused_by_file_and_line(suite: Path, file: str, rows: list[object], said: str) -> None:
    write_rows(suite / file, *rows)
    with pytest.raises(ConfigError, match=said):
        load_tasks(f"dabench:{suite}")


def test_a_folder_without_the_suite_is_refused_and_its_tables_are_no_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no questions\.jsonl"):
        load_tasks(f"dabench:{tmp_path}")
    validate_recorded_source("tasks", f"dabench:{tmp_path}")


@pytest.mark.parametrize(
    ("reference", "answer", "share"),
    [
        ("@mean[34.65]", "The mean is @mean[34.65].", 1.0),
        ("@mean[34.65]", "@mean[34.6500]", 1.0),
        ("@mean[34.65]", "@mean[34.6500009]", 1.0),
        ("@mean[34.65]", "@mean[34.651]", 0.0),
        ("@mean[34.65]", "34.65", 0.0),
        ("@is_normal[no]", "@is_normal[No]", 0.0),
        ("@m[nan]", "@m[nan]", 1.0),
        ("@m[nan]", "@m[0]", 0.0),
        ("@list[[]", "@list[[]", 1.0),
        ("@none[]", "@none[]", 1.0),
        ("@a[1] @b[x] @c[2.0]", "@b[x]\n@c[2]", 2 / 3),
        ("@a[1]", "@a[2] @a[1]", 1.0),
        ("@a[1]", "@a[1\n]", 0.0),
    ],
)
def test_named_values_are_compared_as_texts_or_numbers(reference: str, answer: str, share: float) -> None:
    assert grade_answer(Task("t", "q", reference, judge="named_values"), answer) == pytest.approx(share)


@given(
    st.dictionaries(st.from_regex(r"[a-zA-Z_]\w{0,8}", fullmatch=True), st.from_regex(r"[^\]\n]{0,12}", fullmatch=True))
)
def test_written_values_are_read_back(values: dict[str, str]) -> None:
    text = " and ".join(f"@{name}[{value}]" for name, value in values.items())
    if not any("@" in value for value in values.values()):
        assert parse_named_values(text) == values


def test_named_values_of_any_text_are_found_in_bounded_time() -> None:
    begun = time.process_time()
    for text in ("@a[" * 300_000, "@a[\n" * 300_000, "@" * 900_000, "a" * 900_000 + "["):
        parse_named_values(text)
    assert time.process_time() - begun < 10.0, "a search to the end per name would take minutes"


def test_a_reference_without_a_named_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the named_values judge needs values such as @mean\[3\.5\]"):
        check_judges([Task("t", "q", "34.65", judge="named_values")])


def test_a_value_that_a_function_returns_is_a_literal(tmp_path: Path) -> None:
    (task,) = tasks = load_tasks(f"cruxeval:{write_rows(tmp_path / 'c.jsonl', ROW)}")
    check_judges(tasks)
    assert (task.id, task.family, task.judge) == ("cruxeval-output-7", "output", "literal")
    assert "def f(a, b=1)" in task.question
    assert "f([3, 1, 2])" in task.question
    given = ["[2, 3]", " [2,3] ", "[2.0, 3]", "(2, 3)", "[2, 3", "f([3, 1, 2])", "__import__('os')"]
    assert [grade_answer(task, answer) for answer in given] == [1, 1, 1, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="give a Python literal"):
        check_judges([Task("t", "q", "f(2)", judge="literal")])


def test_arguments_are_right_if_the_call_returns_the_value(tmp_path: Path) -> None:
    (task,) = tasks = load_tasks(f"cruxeval-input:{write_rows(tmp_path / 'c.jsonl', ROW)}")
    check_judges(tasks)
    assert (task.id, task.family, task.judge, task.answer) == ("cruxeval-input-7", "input", "arguments", "[2, 3]")

    async def grade(answer: str) -> float:
        return await grade_async(task, answer, InProcessSandbox())

    given = ["[3, 1, 2]", "[2, 3], 0", "f([9, 3, 2], b=0)", "[2, 3], b=0", "[2, 3]", "open('x')", "*[[2, 3, 1]]"]
    assert [asyncio.run(grade(answer)) for answer in given] == [1, 1, 0, 1, 0, 0, 0]


def test_a_function_without_arguments_is_asked_too(tmp_path: Path) -> None:
    row = {"code": "def f():\n    return 3", "input": "", "output": "3"}
    (task,) = load_tasks(f"cruxeval:{write_rows(tmp_path / 'c.jsonl', row)}")
    assert "What does f() return?" in task.question
    (task,) = load_tasks(f"cruxeval-input:{tmp_path / 'c.jsonl'}")
    assert asyncio.run(grade_async(task, "", InProcessSandbox())) == 1.0


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ("1, 'a'", "1, 'a'"),
        ("f(x={'k': (1,)})", "x={'k': (1,)}"),
        ("f(1)(2)", None),
        ("g(1)", None),
        ("1); import os; f(2", None),
        ("**{'a': 1}", None),
        ("[" * 3000, None),
        ("x", None),
    ],
)
def test_arguments_are_literals(answer: str, arguments: str | None) -> None:
    assert parse_call_arguments(answer) == arguments


def test_the_judge_of_arguments_needs_the_function() -> None:
    with pytest.raises(ConfigError, match="judge arguments needs the function f there"):
        check_judges([Task("t", "q", "3", judge="arguments")])


def test_an_evaluation_has_the_mean_outcome_of_answers_with_parts(tmp_path: Path) -> None:
    task = Task("t", "q", "@a[1] @b[2]", judge="named_values")
    played = [
        asyncio.run(world([f"submit_final_answer({answer!r})\n"]).collect([task]))[0]
        for answer in ("@a[1]", "@a[1] @b[2]", "nothing")
    ]
    study = Study((build_task_result(task, played, []),))
    assert study.solve_rate.value == pytest.approx(1 / 3)
    assert study.mean_outcome == pytest.approx(0.5)
    write_study(tmp_path / "eval.json", study, 1, {})
    assert read_study(tmp_path / "eval.json").mean_outcome == pytest.approx(0.5)
    # Files of older releases have no outcomes.
    record = json.loads((tmp_path / "eval.json").read_text())
    del record["results"][0]["mean_outcome"]
    (tmp_path / "eval.json").write_text(json.dumps(record))
    assert read_study(tmp_path / "eval.json").mean_outcome is None
