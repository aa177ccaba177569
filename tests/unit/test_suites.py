"""Known suites: the fields of the published files are read, and each task is graded as its suite says."""

import asyncio
import builtins
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from datasets import Dataset

from repl_rl.errors import ConfigError
from repl_rl.judges import grade_answer, grade_async
from repl_rl.judges.unit_test_judge import parse_tests
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task, load_tasks
from repl_rl.tasks.parse_assertions import SplitAssertion
from tests.support.scripted_rollouts import world

Fields = Mapping[str, object]
HUMANEVAL: Fields = {
    "task_id": "HumanEval/32",
    "prompt": (
        "import math\n\n\ndef poly(xs: list, x: float):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
        '\n\ndef root(xs: list):\n    """ A zero of poly, of degree one.\n    >>> root([1, 2])\n    -0.5\n    """\n'
    ),
    "entry_point": "root",
    "canonical_solution": "    return -xs[0] / xs[1]\n",
    "test": (
        "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n    text = '''\n\\d\n'''\n    assert text\n"
        "    for a in range(1, 5):\n        assert abs(poly([a, 2], candidate([a, 2]))) < 1e-4\n"
    ),
}
MBPP: Fields = {
    "task_id": 601,
    "text": "Write a function to double a number.",
    "code": "def double(n):\n  return n + n",
    "test_list": ["assert double(2) == 4", "assert double(base) == 2 * base", "assert double('a') == 'aa'"],
    "test_setup_code": "base = 7",
    "challenge_test_list": [],
}
SANITIZED: Fields = {
    "source_file": "x.json",
    "task_id": 2,
    "prompt": "Write a function to find the root of a number.",
    "code": "import math\ndef root(n):\n  return math.sqrt(n)",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(root(2), math.sqrt(2))"],
}


CUT_OFF = ["def f(n):\n", "def f(n):", "def f(\n    n: int,\n) -> int:\n", "def f(n):\n    # Twice n.\n", "def f(n"]
UNTYPED = ["def f(n: NoSuchName):\n    '''Twice.'''\n", "import no_such_module\n\ndef f(n):\n    '''Twice.'''\n"]
CHECK = "%s\n\ndef check(candidate):\n    assert candidate(1) == 2\n"


def file_of(folder: Path, *rows: Fields) -> Path:
    path = folder / "suite.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task_of(folder: Path, suite: str, row: Fields) -> Task:
    (task,) = load_tasks(f"{suite}:{file_of(folder, row)}")
    return task


@pytest.mark.parametrize(
    ("row", "id", "family"),
    [
        ({"ID": "2024-I-1", "Problem": "Sum?", "Solution": "...", "Answer": 25}, "aime-2024-I-1", "aime"),
        ({"id": 60, "problem": "Sum?", "answer": "025", "url": "u", "year": "2024"}, "aime-60", "2024"),
        ({"question": "Sum?", "answer": "25"}, "aime-0", "aime"),
        ({"problem_idx": 1, "problem": "Sum?", "answer": 25.0}, "aime-1", "aime"),
    ],
)
def test_aime_is_read_in_each_form_that_it_is_published_in(tmp_path: Path, row: Fields, id: str, family: str) -> None:
    task = task_of(tmp_path, "aime", row)
    assert (task.id, task.question, task.answer, task.judge, task.family) == (id, "Sum?", "25", "numeric", family)
    assert [grade_answer(task, answer) for answer in ("25", "025", "25.0", "26", "x")] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_gsm8k_keeps_its_grader(tmp_path: Path) -> None:
    task = task_of(tmp_path, "gsm8k", {"question": "Eggs?", "answer": "He has <<9*2=18>>18.\n#### 1,018"})
    assert grade_answer(task, "$1018") == 1.0


async def passes(task: Task, program: str) -> float:
    return await grade_async(task, program, InProcessSandbox())


PROGRAMS = [
    ("def root(xs):\n    return -xs[0] / xs[1]\n", 1.0),
    ("print('hello')\ndef root(xs):\n    print(xs)\n    return -xs[0] / xs[1]\n", 1.0),
    ("def root(xs):\n    return xs[0]\n", 0.0),
    ("def other(xs):\n    return 1\n", 0.0),
    ("def root(xs)", 0.0),
    ("def root(xs):\n    raise SystemExit\n", 0.0),
    ("exec = check = print\ndef root(xs): return 0\n", 0.0),
    ("exec = globals = lambda *given: {}\ndef root(xs): return 0\n", 0.0),
    ("import builtins\nbuiltins.exec = lambda *given: None\ndef root(xs): return 0\n", 0.0),
    ("def check(f): pass\ndef root(xs): return 0\n", 0.0),
    (str(HUMANEVAL["canonical_solution"]), 1.0),
    ("    zero = -xs[0] / xs[1]\n    return zero\n\n\ndef poly(xs, x):\n    return xs[0] + xs[1] * x\n", 1.0),
    ("    return xs[0]\n", 0.0),
    ("    raise SystemExit\n", 0.0),
    ("<function root at 0x7f0000000000>", 0.0),
]


@pytest.mark.parametrize(("program", "worth"), PROGRAMS)
def test_humaneval_is_graded_by_its_tests_and_a_program_cannot_keep_them_from_running(
    tmp_path: Path, program: str, worth: float
) -> None:
    task = task_of(tmp_path, "humaneval", HUMANEVAL)
    assert (task.id, task.family, task.judge) == ("humaneval-32", "humaneval", "tests")
    assert str(HUMANEVAL["prompt"]).rstrip() in task.question
    assert "check(" not in task.question
    before = builtins.exec
    try:
        assert asyncio.run(passes(task, program)) == worth
    finally:
        builtins.exec = before


GUARDS = [
    "int(input())",
    "__import__('sys').exit(1)",
    "__import__('argparse').ArgumentParser().parse_args(['--no-such-flag'])",
    "__import__('unittest').main()",
    "print(__import__('sys').argv[7])",
]


@pytest.mark.parametrize("guarded", GUARDS)
def test_main_guards_are_false_as_in_the_suites_own_harness(tmp_path: Path, guarded: str) -> None:
    guard = f"\nif __name__ == '__main__':\n    {guarded}\n"
    doctests = Task("t", "?", ">>> double(2)\n4\n", judge="tests")
    for task, program in (
        (task_of(tmp_path, "humaneval", HUMANEVAL), PROGRAMS[0][0]),
        (task_of(tmp_path, "mbpp", MBPP), str(MBPP["code"])),
        (doctests, str(MBPP["code"])),
        (Task("t", "?", "assert double(2) == 4", judge="tests"), str(MBPP["code"])),
    ):
        assert asyncio.run(passes(task, program + guard)) == 1.0
        assert asyncio.run(passes(task, program + f"\nif __name__ != 'nothing':\n    {GUARDS[0]}\n")) == 0.0


VALUES = [
    ("f() == 4", "4", 1),
    ("f() == 4", "4.0", 1),
    ("f() == 4", "__import__('collections').namedtuple('N', 'x')(4)[0]", 1),
    ("4 == f()", "5", 0),
    ("f() == [1, 2]", "[1, 2]", 1),
    ("f() == [1, 2]", "(1, 2)", 0),
    ("f() == (1, 2)", "__import__('collections').namedtuple('N', 'x y')(1, 2)", 1),
    ("f() == {1, 2}", "{2, 1}", 1),
    ("f() == {'a': [1]}", "__import__('collections').defaultdict(list, a=[1])", 1),
    ("f() == {'a': 2}", "__import__('collections').Counter('aa')", 1),
    ("f() == {'a'}", "{'a': 1}.keys()", 1),
    ("f() == set()", "frozenset()", 1),
    ("f() == ()", "()", 1),
    ("f() == 'a\\nb'", "'a' + chr(10) + 'b'", 1),
    ("f() == 0.5", "__import__('fractions').Fraction(1, 2)", 1),
    ("f() == 2", "__import__('decimal').Decimal('2')", 1),
    ("f() == 0.5", "__import__('numpy').float64(0.5)", 1),
    ("f() == [1, 2]", "__import__('numpy').array([1, 2])", 0),
    ("f() == -1", "-1", 1),
    ("f() == 10**9 + 7", "1000000007", 1),
    ("f() is None", "None", 1),
    ("f() is None", "0", 0),
    ("f()", "[0]", 1),
    ("not f()", "[]", 1),
    ("f() == True", "1", 1),
    ("f() != 4", "5", 1),
    ("f() < 4", "3", 1),
    ("f() in (1, 2)", "2", 1),
    ("f() not in 'ab'", "'c'", 1),
    ("'b' in f()", "'abc'", 1),
    ("abs(f() - 0.1) < 1e-6", "0.1000000001", 1),
    ("abs(0.1 - f()) <= 1e-6", "0.2", 0),
    ("math.isclose(f(), 0.1, rel_tol=0.001)", "0.10001", 1),
    ("math.isclose(f(), 0.1)", "0.10001", 0),
    ("f() == float('inf')", "1e999", 1),
    ("f() == [[1.5, None], {'x': (True, b'y')}]", "[[1.5, None], {'x': (True, b'y')}]", 1),
    ("f() == 4", "print('4') or 5", 0),
    ("f() == 4", "[4][3]", 0),
]


@pytest.mark.parametrize(("test", "value", "worth"), VALUES)
def test_values_are_compared_on_the_host_as_python_compares_them(test: str, value: str, worth: int) -> None:
    task = Task("t", "?", f"assert {test}, 'a message'", judge="tests")
    (check,) = parse_tests(task)
    assert isinstance(check.expected, SplitAssertion)
    assert asyncio.run(passes(task, f"f = lambda: {value}")) == worth


@pytest.mark.parametrize(
    "test",
    ["f() == g()", "x == 4", "all(f(n) == n for n in (1, 2))", "f() == 'a' * 10**9", "1 < f() < 3", "f() == [*f()]"],
)
def test_other_assertions_run_in_the_console_as_they_stand(test: str) -> None:
    (check,) = parse_tests(Task("t", "?", f"assert {test}", judge="tests"))
    assert check.expected == ""
    assert check.lines == (f"assert {test}",)


@pytest.mark.parametrize(
    "printed", ["", "4 5", "4 if 1 else 5", "(" * 500, "-" * 9000 + "4", "9**9**9", "x", "[4" * 9000]
)
def test_what_a_console_prints_is_read_as_a_literal_and_never_run(printed: str) -> None:
    (check,) = parse_tests(Task("t", "?", "assert f() == 4", judge="tests"))
    assert not check.check_output(printed)


HELPER = ["from math import fabs\n", "def half(x):\n", "    return x / 2\n", "\n"]
GOOD = ["def root(xs):\n", "    low = -xs[0]\n", "    return low / xs[1] if fabs(half(2)) == 1 else 0\n", "\n"]


@pytest.mark.parametrize(
    ("lines", "worth"),
    [
        ([*HELPER, *GOOD, "root([1, 2])\n", "submit_final_answer(root)\n"], 1.0),
        (["root([1, 2])\n", "def root(xs)\n", *HELPER, *GOOD, "submit_final_answer(root)\n"], 1.0),
        ([*HELPER, *GOOD, "for f in [root]: submit_final_answer(f)\n", "\n"], 1.0),
        ([*HELPER, *GOOD, "submit_final_answer(str(root))\n"], 1.0),
        ([*GOOD, "submit_final_answer(root)\n"], 0.0),
        ([*HELPER, *GOOD, "root = half\n", "submit_final_answer(root)\n"], 0.0),
        (["submit_final_answer(print)\n"], 0.0),
        (["def check(f): pass\n", "\n", "def root(xs): return 0\n", "\n", "submit_final_answer(root)\n"], 0.0),
        (["class root:\n", "    pass\n", "\n", "submit_final_answer(root)\n"], 0.0),
    ],
)
def test_in_the_line_console_a_function_is_submitted_and_what_was_typed_is_the_program(
    tmp_path: Path, lines: list[str], worth: float
) -> None:
    task = task_of(tmp_path, "humaneval", HUMANEVAL)
    (t,) = asyncio.run(world(lines, limits=RolloutLimits(max_lines=16, max_line_tokens=200)).collect([task]))
    assert (t.failure, t.outcome) == (None, worth)


def test_a_function_of_the_line_console_is_graded_by_the_tests_of_mbpp_too(tmp_path: Path) -> None:
    lines = ["def double(n):\n", "    return n + n\n", "\n", "submit_final_answer(double)\n"]
    tasks = [task_of(tmp_path, "mbpp", row) for row in (MBPP, SANITIZED)]
    found = asyncio.run(world(lines, limits=RolloutLimits(max_line_tokens=200)).collect(tasks))
    assert [t.outcome for t in found] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "program", "worth"),
    [
        (MBPP, MBPP["code"], 1.0),
        (MBPP, "def double(n): return 2 * n", 1.0),
        (MBPP, "def double(n): return n ** 2", 0.0),
        (SANITIZED, SANITIZED["code"], 1.0),
        (SANITIZED, "def root(n): return n ** 0.5", 1.0),
        (SANITIZED, "def root(n): return n", 0.0),
    ],
)
def test_mbpp_is_graded_by_its_tests_whole_or_sanitized(
    tmp_path: Path, row: Fields, program: object, worth: float
) -> None:
    task = task_of(tmp_path, "mbpp", row)
    assert task.id == f"mbpp-{row['task_id']}"
    tests = row["test_list"]
    assert isinstance(tests, list)
    assert all(test in task.question for test in tests)
    assert str(row["code"]) not in task.question
    assert asyncio.run(passes(task, str(program))) == worth


def test_suites_are_read_from_parquet_too(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.parquet"
    Dataset.from_list([dict(MBPP), {**MBPP, "task_id": 602}]).to_parquet(str(path))
    tasks = load_tasks(f"mbpp:{path}")
    assert [task.id for task in tasks] == ["mbpp-601", "mbpp-602"]
    assert all(parse_tests(task) for task in tasks)


@pytest.mark.parametrize(
    ("suite", "row", "told"),
    [
        ("aime", {"problem": "?", "answer": "1/2"}, ":1: answer is '1/2'; answers of AIME are whole numbers"),
        ("aime", {"problem": "?", "answer": 1000}, "whole numbers, 0 to 999"),
        ("math500", {"problem": "?"}, "field 'answer' is None; add it"),
        ("humaneval", {**HUMANEVAL, "entry_point": "a b"}, "field 'entry_point' is 'a b'; give the name of a function"),
        ("humaneval", {**HUMANEVAL, "test": "def check(:"}, "they are not Python"),
        (
            "humaneval",
            {**HUMANEVAL, "test": "x = " + "-" * 100_000 + "1"},
            "they are not Python: it is nested too deeply",
        ),
        (
            "humaneval",
            {**HUMANEVAL, "test": "x = " + "+".join("1" * 3000)},
            "they are not Python: it is nested too deeply",
        ),
        ("humaneval", {**HUMANEVAL, "test": CHECK % ("x = " + "+".join("1" * 600))}, "it is nested too deeply"),
        ("humaneval", {**HUMANEVAL, "test": CHECK % ("x = 0x" + "f" * 9000)}, "they are not Python: Exceeds the limit"),
        ("humaneval", {**HUMANEVAL, "test": "x = '\0'"}, "they are not Python: .*null bytes"),
        ("mbpp", {**MBPP, "test_list": ["assert double(" + "-" * 100_000 + "1)"]}, "it is nested too deeply"),
        ("mbpp", {**MBPP, "test_list": ["assert double(2) == " + "+".join("1" * 600)]}, "it is nested too deeply"),
        ("mbpp", {**MBPP, "test_list": "[" * 100_000}, "they are not Python: "),
        ("mbpp", {**MBPP, "test_setup_code": "-" * 100_000 + "1"}, "it is nested too deeply"),
        ("aime", {"problem": "?", "answer": "1" * 5000}, "whole numbers, 0 to 999"),
        ("humaneval", {"task_id": "HumanEval/0"}, "field 'prompt' is None"),
        ("mbpp", {**MBPP, "test_list": []}, "give at least one test"),
        ("mbpp", {**MBPP, "test_list": [3]}, "give a list of texts"),
        ("mbpp", {"task_id": 1, "test_list": ["assert f()"]}, "field 'text' is None"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_place(tmp_path: Path, suite: str, row: Fields, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        task_of(tmp_path, suite, row)


@pytest.mark.parametrize("prompt", [*CUT_OFF, *UNTYPED])
@pytest.mark.parametrize(
    "checked", ["assert candidate(2) == half(8)", "for n in (2, 3):\n        assert candidate(n) == 2 * n"]
)
def test_a_prompt_without_a_body_and_one_that_fails_are_graded_like_others(
    tmp_path: Path, prompt: str, checked: str
) -> None:
    check = f"def half(n):\n    return n // 2\n\ndef check(candidate):\n    {checked}\n"
    row = {"task_id": "x", "prompt": prompt, "entry_point": "f", "test": check}
    task = task_of(tmp_path, "humaneval", row)
    programs = ("def f(n):\n    return n * 2\n", "def f(n):\n    return n * 3\n")
    assert [asyncio.run(passes(task, program)) for program in programs] == [1.0, 0.0]


def test_helpers_before_a_prompt_without_a_body_are_used(tmp_path: Path) -> None:
    prompt = "def half(n):\n    return n // 2\n\n\ndef f(n):\n"
    check = "def check(candidate):\n    assert candidate(2) == half(8)\n"
    task = task_of(tmp_path, "humaneval", {"task_id": "x", "prompt": prompt, "entry_point": "f", "test": check})
    assert [asyncio.run(passes(task, f"def f(n): return n * {k}")) for k in (2, 3)] == [1.0, 0.0]
    assert asyncio.run(passes(task, "    return n * 2\n")) == 1.0


EMPTY_CHECKS = [
    ("pass", "define the function check"),
    ("async def check(candidate):\n    assert candidate(1) == 1", "define a plain function"),
    ("def check(candidate):\n    assert candidate(1) == 1\n    yield", "define a plain function"),
    ("def check():\n    assert True == 1", "let it take one"),
    ("def check(a, b):\n    assert a == b", "let it take one"),
    ("def check(candidate):\n    pass", "tests nothing"),
    ("def check(candidate):\n    '''Text.'''\n    assert True", "tests nothing"),
    ("def check(candidate):\n    return\n    assert candidate(1) == 1", "tests nothing"),
    (
        "def check(candidate):\n    for n in range(3):\n        continue\n        assert candidate(n) == n",
        "tests nothing",
    ),
    ("def check(candidate):\n    candidate(1) == 1", "tests nothing"),
    ("def check(candidate):\n    print(candidate(1) == 1)", "tests nothing"),
    ("def check(candidate):\n    assert (candidate(1) == 1, 'message')", "tests nothing"),
    ("def check(candidate):\n    assert (candidate(n) == n for n in (1, 2))", "tests nothing"),
]


@pytest.mark.parametrize(("test", "told"), EMPTY_CHECKS)
def test_a_check_that_tests_nothing_is_refused_with_its_field(tmp_path: Path, test: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"suite\.jsonl:1: field 'test' is .*{told}"):
        task_of(tmp_path, "humaneval", {**HUMANEVAL, "test": test})


@pytest.mark.parametrize(
    "test",
    [
        "def assertion(out, exp):\n    assert out == exp\n\ndef check(candidate):\n    assertion(candidate(1), 2)",
        "def check(candidate):\n    for n in range(3):\n        if candidate(n) != n:\n            raise ValueError(n)",
        "def check(candidate):\n    def inner(n):\n        assert candidate(n) == n\n    list(map(inner, (1, 2)))",
        "import numpy as np\ndef check(candidate):\n    np.testing.assert_allclose(candidate(1), 1)",
        "def check(root):\n    assert True\n    assert root([1, 2]) == 3\n\ncheck(root)",
        "def check(candidate, n=1):\n    try:\n        assert candidate(n) == n\n    finally:\n        pass",
        "check = lambda candidate: None",
        "from checks import check",
        "if True:\n    def check(candidate):\n        assert candidate(1) == 1",
    ],
)
def test_a_check_that_may_fail_is_accepted(tmp_path: Path, test: str) -> None:
    assert parse_tests(task_of(tmp_path, "humaneval", {**HUMANEVAL, "test": test}))


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        (["# nothing"], "is '# nothing'; it tests nothing; give an assert"),
        ([""], "is ''; it tests nothing; give an assert"),
        (["import math", "x = 1"], "it tests nothing; give an assert"),
        (["assert f(1) == 2", "f(2) == 4"], "is 'f\\(2\\) == 4'; it tests nothing; write `assert` before it"),
        (["assert f(1) == 2", "assert (f(2) == 4, 'x')"], "a tuple is always true; drop the brackets"),
        (["assert [f(2) == 4]"], "always true; write one that may be false"),
    ],
)
def test_tests_of_mbpp_that_test_nothing_are_refused_with_their_field(
    tmp_path: Path, tests: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"suite\.jsonl:1: field 'test_list'.* {told}"):
        task_of(tmp_path, "mbpp", {**MBPP, "test_list": tests})


@pytest.mark.parametrize(
    "tests",
    [
        ["assert f(2) == 4", "# nothing", ""],
        ["x = f(2)", "assert x == 4"],
        ["check(f)"],
        ["if f(2) != 4:\n    raise ValueError"],
    ],
)
def test_tests_of_mbpp_that_may_fail_are_accepted(tmp_path: Path, tests: list[str]) -> None:
    assert parse_tests(task_of(tmp_path, "mbpp", {**MBPP, "test_list": tests}))


OWN = "def isclose(a, b):\n    return abs(a - b) < 0.01"


@pytest.mark.parametrize(
    ("before", "called", "value", "worth"),
    [
        ("import numpy as np", "np.isclose(f(2), 0.1)", "0.1000001", 1.0),
        ("import numpy as np", "np.isclose(f(2), 0.1)", "0.11", 0.0),
        (OWN, "isclose(f(2), 0.1)", "0.105", 1.0),
        (OWN, "isclose(f(2), 0.1)", "0.2", 0.0),
        (f"from math import isclose\n{OWN}", "isclose(f(2), 0.1)", "0.105", 1.0),
        ("from math import isclose", "isclose(f(2), 0.1)", "0.1000001", 0.0),
        ("from math import isclose as near", "near(f(2), 0.1)", "0.1", 1.0),
        ("import math as m", "m.isclose(f(2), 0.1, abs_tol=0.1)", "0.11", 1.0),
    ],
)
def test_isclose_is_the_function_that_the_tests_define(
    tmp_path: Path, before: str, called: str, value: str, worth: float
) -> None:
    suite = task_of(tmp_path, "mbpp", {**MBPP, "test_list": [f"assert {called}"], "test_setup_code": before})
    check = f"{before}\n\ndef check(candidate):\n    assert {called.replace('f(', 'candidate(')}\n"
    row = {"task_id": "x", "prompt": "def f(x):\n", "entry_point": "f", "test": check}
    plain = Task("t", "?", f"{before}\nassert {called}\n", judge="tests")
    for task in (suite, task_of(tmp_path, "humaneval", row), plain):
        assert asyncio.run(passes(task, f"def f(x):\n    return {value}\n")) == worth
        shown = [check.lines for check in parse_tests(task) if isinstance(check.expected, SplitAssertion)]
        if "math" in before and OWN not in before:
            assert len(shown) == 1
            assert "0.1" not in "".join(shown[0])


TRACEBACK = "Traceback (most recent call last):\n    ...\n"
F = "def f(n):\n    "


@pytest.mark.parametrize(
    ("tests", "body", "worth"),
    [
        (f">>> f(1)\n{TRACEBACK}ValueError: bad\n", "raise ValueError('bad')", 1.0),
        (f">>> f(1)\n{TRACEBACK}ValueError: bad\n", "print('a line'); raise ValueError('bad')", 1.0),
        (f">>> f(1)\n{TRACEBACK}ValueError: bad\n", "raise ValueError('other')", 0.0),
        (f">>> f(1)\n{TRACEBACK}ValueError: bad\n", "raise TypeError('bad')", 0.0),
        (f">>> f(1)\n{TRACEBACK}ValueError: bad\n", f"print({TRACEBACK!r} + 'ValueError: bad')", 0.0),
        (f">>> f(1)  # doctest: +IGNORE_EXCEPTION_DETAIL\n{TRACEBACK}ValueError: bad\n", "raise ValueError(n)", 1.0),
        (f">>> f(1)  # doctest: +ELLIPSIS\n{TRACEBACK}ValueError: b...\n", "raise ValueError('bad')", 1.0),
        (f">>> return 1\n{TRACEBACK}SyntaxError: 'return' outside function\n>>> f(1)\n1\n", "return n", 1.0),
        (">>> f(1)\na\n<BLANKLINE>\nb\n", "print('a\\n\\nb')", 1.0),
        (">>> f(1)\na\n<BLANKLINE>\nb\n", "print('a\\nb')", 0.0),
        (">>> f(1)  # doctest: +ELLIPSIS\n[0, ..., 9]\n", "return list(range(10))", 1.0),
        (">>> f(1)\n[0, ..., 9]\n", "return list(range(10))", 0.0),
        (">>> f(1)  # doctest: +NORMALIZE_WHITESPACE\na   b\n", "print('a b')", 1.0),
        (">>> f(1)  # doctest: +SKIP\n8\n>>> f(2)\n2\n", "return n", 1.0),
        (">>> def g(n):\n...     x = f(n)\n...\n...     return x\n>>> g(1)\n1\n", "return n", 1.0),
        ("def g(n):\n    x = f(n)\n\n    return x\nassert g(1) == 1", "return n", 1.0),
        ("def g(n):\n    x = f(n)\n\n    return x\nassert g(1) == 1", "return 2", 0.0),
        ("'''Tests.'''\n@staticmethod\ndef g(n):\n    return f(n)\nassert g.__func__(1) == 1", "return n", 1.0),
        ("@(\n  lambda c: c()\n)\nclass g:\n\n    x = 3\n\n    y = 4\nassert f(g.y) == 4", "return n", 1.0),
        ("def g():\n    return '''a\n\nb'''\n\nassert f(g()) == 'a\\n\\nb'", "return n", 1.0),
        ("assert f(1) == 1; assert f(2) == 2", "return n", 1.0),
        ("assert f(1) == 1; assert f(2) == 2", "return 1", 0.0),
    ],
)
def test_references_are_typed_and_compared_as_python_and_doctest_would(tests: str, body: str, worth: float) -> None:
    assert asyncio.run(passes(Task("t", "?", tests, judge="tests"), F + body)) == worth


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ("f(2) == 4", "give tests: it tests nothing; write `assert` before it"),
        ("assert f(1) == 1\nf(2) == 4", "is 'f\\(2\\) == 4'; give tests: it tests nothing"),
        ("18", "give tests: it tests nothing"),
        ("[f(2), 4]", "give tests: it tests nothing"),
        ("assert (f(2) == 4, 'message')", "give tests: a tuple is always true"),
        ("assert True", "give tests: '>>> f"),
        ("import math\nx = 1", "give tests: '>>> f"),
        ("'''Tests.'''", "give tests: '>>> f"),
        (">>> f(2) == 4\n", "give tests: it tests nothing"),
        (">>> assert (f(2) == 4, 'message')\n", "give tests: a tuple is always true"),
        (">>> import math\n", "give tests: '>>> f"),
        (">>> f(2)  # doctest: +SKIP\n4\n", "give tests: '>>> f"),
    ],
)
def test_references_that_test_nothing_are_refused(tests: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_tests(Task("t", "?", tests, judge="tests"))


@pytest.mark.parametrize("test", ["assert double({}) == 4", "assert not double({})"])
@pytest.mark.parametrize("value", ["+".join("1" * 600), "0x" + "f" * 9000, "3**6000 * 3**6000", "[" * 80 + "]" * 80])
def test_a_test_whose_call_cannot_be_printed_is_typed_as_it_stands(tmp_path: Path, test: str, value: str) -> None:
    task = task_of(tmp_path, "mbpp", {**MBPP, "test_list": [test.format(value)]})
    assert test.format(value) in task.question
    assert parse_tests(task)


@pytest.mark.parametrize("value", ["0x" + "f" * 9000, "3**6000 * 3**6000"])
def test_an_expected_number_that_is_too_long_to_print_is_typed_as_it_stands(tmp_path: Path, value: str) -> None:
    assert parse_tests(task_of(tmp_path, "mbpp", {**MBPP, "test_list": [f"assert double(2) == {value}"]}))


def test_fields_of_other_names_can_be_said(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"q": "Sum?", "a": 3, "n": "x/1"})
    (task,) = load_tasks(f"aime:{path}?question=q&answer=a&id=n")
    assert (task.id, task.question, task.answer) == ("aime-x-1", "Sum?", "3")
