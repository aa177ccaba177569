"""Known suites in real processes: graded, played and evaluated."""

import asyncio
import json
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.judges import grade_answer, grade_async
from repl_rl.judges.unit_test_judge import parse_tests
from repl_rl.sandbox import open_sandbox
from repl_rl.tasks import Task
from tests.unit.test_suites import HUMANEVAL, Fields, file_of, task_of

MATH500: Fields = {
    "problem": "What is $\\frac{1}{2} + \\frac{1}{4}$?",
    "solution": "It is $\\boxed{\\frac{3}{4}}$.",
    "answer": "\\frac{3}{4}",
    "subject": "Prealgebra",
    "level": 2,
    "unique_id": "test/prealgebra/12.json",
}


def test_math500_is_graded_by_value_and_told_by_level(tmp_path: Path) -> None:
    task = task_of(tmp_path, "math500", MATH500)
    assert (task.id, task.family, task.judge) == ("math500-test-prealgebra-12", "math500/2", "math")
    assert task.question == MATH500["problem"]
    assert grade_answer(task, "3/4") == 1.0
    assert grade_answer(task, "4/3") == 0.0


def test_classes_of_a_program_can_be_pickled_and_looked_up_though_it_is_no_main_program() -> None:
    program = (
        "import dataclasses, enum, pickle, sys, typing\n"
        "@dataclasses.dataclass\nclass Point:\n    x: 'int'\n"
        "class Kind(enum.IntEnum):\n    A = 1\n"
        "def f():\n    assert typing.get_type_hints(Point) == {'x': int}\n"
        "    return pickle.loads(pickle.dumps([Point(1), Kind.A, f]))[0].x\n"
    )
    task = Task("t", "?", "assert f() == 1", judge="tests")

    async def judged() -> float:
        async with open_sandbox("local", warm=0) as sandbox:
            return await grade_async(task, program, sandbox)

    assert asyncio.run(judged()) == 1.0


HACK = """
import sys, re
f = sys._getframe()
while not hasattr(f.f_locals.get('self'), 'push'): f = f.f_back
c = f.f_locals['self']
def push(line):
    found = re.search(r'passed \\w+', line)
    print(found[0] if found else re.findall(r'[0-9]+', line))
    return False
c.push = push
"""


EQUAL_TO_ALL = (
    "class E:\n    def __eq__(self, other): return True\n    __hash__ = None\ndouble = root = lambda n: E()\n"
)


def test_a_program_that_solves_nothing_finds_no_expected_value_in_its_console(tmp_path: Path) -> None:
    mbpp = {"task_id": 1, "text": "Write double.", "test_list": ["assert double(2) == 4", "assert double(7) == 14"]}
    check = "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(7) - 14) < 1e-6, 'x'\n"
    humaneval = {"task_id": "x", "prompt": "def double(n):\n    '''Twice.'''\n", "entry_point": "double", "test": check}
    tasks = [task_of(tmp_path, "mbpp", mbpp), task_of(tmp_path, "humaneval", humaneval)]
    tasks.append(Task("t", "?", "assert double(2) == 4\nassert double(7) == 14\n", judge="tests"))
    programs = ("double = lambda n: 2 * n", "double = lambda n: 0", HACK, EQUAL_TO_ALL)

    async def judged() -> list[list[float]]:
        async with open_sandbox("local", warm=0) as sandbox:
            return [[await grade_async(task, program, sandbox) for program in programs] for task in tasks]

    assert asyncio.run(judged()) == [[1.0, 0.0, 0.0, 0.0]] * 3
    for task in tasks:
        for check_ in parse_tests(task):
            assert "== 4" not in "".join(check_.lines)
            assert "14" not in "".join(check_.lines)


@pytest.mark.heavy
def test_a_suite_is_evaluated_with_its_grader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, HUMANEVAL)
    words = ["--tasks", f"humaneval:{path}", "--split", "all", "--engine", "transformers", "--sandbox", "unsafe"]
    assert main(["eval", *words, "--json", str(tmp_path / "eval.json")]) == 0
    assert json.loads((tmp_path / "eval.json").read_text())["tasks"] == 1
    assert "humaneval" in capsys.readouterr().out
