"""Judges that run Python in a console: `tests`, whose answer is a program, and `arguments`, whose answer is a call.

For `tests`, the task's reference answer is the tests.

The program runs in a separate console, never on the host. It is not the main program there: `__name__` is `submission`.
A rollout may submit a function in place of a program. Then the lines that the rollout typed are the program, and are
typed again.

A test in doctest form has lines after `>>> ` and `... `, which are typed into that console after the program. Their
output must be what the test expects, by the rules of the module `doctest`. For `assert f(2) == 4`, the console only
prints the value of `f(2)`. The expected value stays on the host and is compared here, so a program cannot read it. A
test that is not in doctest form is typed without its blank lines and must print nothing.
"""

import ast
import asyncio
import doctest
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import dropwhile

from repl_rl.errors import ConfigError, SandboxFault
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import LineResult, Sandbox, SandboxSession, open_console
from repl_rl.tasks import Task
from repl_rl.tasks.find_trivial_tests import can_fail, find_mistake
from repl_rl.tasks.parse_assertions import SplitAssertion, find_isclose_names, split_assertion
from repl_rl.tasks.validate_text import NotPython, parse_python
from repl_rl.trajectory.console_text import split_into_typed_lines
from repl_rl.trajectory.trajectory import LineStatus, Trajectory
from repl_rl.utils.timeouts import DaemonThread

_ATTEMPTS = 2
"""Number of consoles to try before a failure of ours is reported."""
_DECORATED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SHOWN_CHARS = 80
_TRACEBACK = "Traceback (most recent call last):\n"
_RAISED = (LineStatus.EXCEPTION, LineStatus.SYNTAX_ERROR)
_DEFINITION = re.compile(r"<(?:function|class) [^\n]*>\Z")
"""Text that `str()` returns for a function or a class; it is not Python."""
_IGNORE_ANSWERS = "submit_final_answer = lambda *given: None"
"""Line that disables `submit_final_answer`, so that lines that are typed again cannot end the console of the tests."""
_NO_MAIN = "__import__('sys').modules['submission'] = __import__('sys').modules[__name__]; __name__ = 'submission'"
"""Line that sets `__name__` to `submission`, as if tests imported the program. Its classes can be pickled."""
_RETURNED = "_returned_value"
"""Name of the value that the function of judge `arguments` returns."""
ConsoleJudge = Callable[[Sandbox, Task, str, Trajectory | None], Awaitable[float]]
"""Judge of a submitted answer that opens consoles of a sandbox. It may read the rollout."""


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """Lines to type, and their exact output or an assertion about it."""

    lines: tuple[str, ...]
    expected: str | SplitAssertion
    flags: int = 0
    """Options of the module `doctest`."""
    raises: bool = False
    """True if the last line must raise an exception. Then `expected` is the exception's text."""

    def check_output(self, printed: str) -> bool:
        """Return True if the console printed what the test expects."""
        if isinstance(self.expected, SplitAssertion):
            return self.expected.check_output(printed)
        if not self.raises:
            return _matches_output(self.expected, printed, self.flags)
        exception_text = _read_exception(printed)
        # This option compares the class alone.
        if self.flags & doctest.IGNORE_EXCEPTION_DETAIL and _get_class_name(exception_text) == _get_class_name(
            self.expected
        ):
            return True
        return _matches_output(self.expected, exception_text, self.flags)

    def accepts(self, status: LineStatus) -> bool:
        """Return True if the last line ended as the test expects."""
        return status in _RAISED if self.raises else status is LineStatus.OK


def _matches_output(expected: str, actual: str, flags: int) -> bool:
    return expected == actual or (bool(expected) and doctest.OutputChecker().check_output(expected, actual, flags))


def _read_exception(printed: str) -> str:
    """Return the text of an exception, which follows the last traceback's lines."""
    lines = printed.rpartition(_TRACEBACK)[2].splitlines(keepends=True)
    return "".join(dropwhile(lambda line: line.startswith(" "), lines))


def _get_class_name(exception_text: str) -> str:
    """Return the class name in the text of an exception, without its module."""
    return exception_text.partition("\n")[0].partition(":")[0].rpartition(".")[2]


def parse_tests(task: Task) -> tuple[ProgramTest, ...]:
    """Return the tests in a task's reference answer, at least one.

    Raises:
        ConfigError: the answer has no tests or tests nothing, or its prompts are malformed.
    """
    answer = task.answer.replace("\r\n", "\n").replace("\r", "\n")
    try:
        examples = doctest.DocTestParser().get_examples(answer)
        tests = _make_doctests(task, examples) if examples else _make_plain_tests(task, answer)
    except ValueError as error:
        raise ConfigError(task.answer_label, task.answer[:_SHOWN_CHARS], f"give tests: {error}") from error
    if not tests:
        raise ConfigError(task.answer_label, task.answer[:_SHOWN_CHARS], "give tests: '>>> f(2)' and what it prints")
    return tests


def _make_doctests(task: Task, examples: Sequence[doctest.Example]) -> tuple[ProgramTest, ...]:
    """Return the tests in doctest form, or none if no test can fail."""
    active = [example for example in examples if not example.options.get(doctest.SKIP)]
    parsed = [list(_parse_statements(example.source)) for example in active]
    # A test that expects output can fail.
    silent = [(e, body) for e, body in zip(active, parsed, strict=True) if not e.want]
    for example, body in silent:
        _refuse_mistakes(task, example.source, body)
    if len(silent) == len(active) and not any(can_fail(body) for _, body in silent):
        return ()
    isclose = find_isclose_names([node for body in parsed for statement in body for node in ast.walk(statement)])
    return tuple(_make_doctest(example, isclose) for example in active)


def _make_doctest(example: doctest.Example, isclose: Set[str]) -> ProgramTest:
    if example.exc_msg is None and not example.want:
        return _make_silent_test(example.source, isclose)
    flags = 0
    for option, enabled in example.options.items():
        flags |= option if enabled else 0
    lines = split_into_typed_lines(_close_block(example.source))
    if example.exc_msg is None:
        return ProgramTest(lines, example.want, flags)
    return ProgramTest(lines, example.exc_msg, flags, raises=True)


def _make_plain_tests(task: Task, answer: str) -> tuple[ProgramTest, ...]:
    """Return one test per statement of tests that are plain Python, or none if no statement can fail."""
    module = parse_python(answer)
    # A text alone is a comment, which a console would print.
    body = [statement for statement in module.body if not _is_text(statement)]
    for statement in body:
        _refuse_mistakes(task, _get_source(answer, statement), [statement])
    if not can_fail(body):
        return ()
    isclose = find_isclose_names(list(ast.walk(module)))
    return tuple(_make_silent_test(_get_source(answer, statement), isclose) for statement in body)


def _is_text(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _refuse_mistakes(task: Task, source: str, body: Sequence[ast.stmt]) -> None:
    """Refuse statements that look like tests and test nothing."""
    for statement in body:
        mistake = find_mistake(statement)
        if mistake is not None:
            raise ConfigError(task.answer_label, source[:_SHOWN_CHARS], f"give tests: {mistake}")


def _parse_statements(source: str) -> Iterator[ast.stmt]:
    """Yield the statements of a test; none if it is not Python, which a test may expect."""
    with suppress(NotPython):
        yield from parse_python(source).body


def _get_source(text: str, statement: ast.stmt) -> str:
    """Return the source of a statement with its decorators."""
    decorators = statement.decorator_list if isinstance(statement, _DECORATED) else []
    if not decorators:
        return ast.get_source_segment(text, statement) or ""
    lines = text.split("\n")
    start = min(node.lineno for node in decorators) - 1
    # The expression of a decorator may begin below its `@`.
    while not lines[start].lstrip().startswith("@"):
        start -= 1
    return "\n".join(lines[start : statement.end_lineno])


def _close_block(source: str) -> str:
    """Remove blank lines outside of string literals, since a blank line closes a block in a console."""
    string_lines: set[int] = set()
    for statement in _parse_statements(source):
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                string_lines.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    lines = source.split("\n")
    return "\n".join(line for n, line in enumerate(lines, start=1) if line.strip() or n in string_lines)


def _make_silent_test(source: str, isclose: Set[str]) -> ProgramTest:
    """Return a test that must print nothing.

    For an assertion, if possible, the console prints a value instead, and the host compares that value.
    """
    assertion = None
    if source.lstrip().startswith("assert"):
        body = list(_parse_statements(source))
        assertion = split_assertion(body[0], isclose) if len(body) == 1 else None
    return (
        ProgramTest(split_into_typed_lines(_close_block(source)), "")
        if assertion is None
        else ProgramTest((assertion.console_line,), assertion)
    )


class TestOutcome(StrEnum):
    """Result of a program and its tests."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "unread"
    """The program itself did not run to its end, so no test ran."""
    FAULT = "fault"
    """Our console failed, so the result is unknown."""


@dataclass(frozen=True, slots=True)
class CandidateProgram:
    """Physical lines that are typed before the tests."""

    lines: tuple[str, ...]
    was_typed_in_rollout: bool = False
    """True for lines that a rollout typed; errors in them are ignored. False: the first error ends the program."""


def find_programs(task: Task, answer: str, rollout: Trajectory | None) -> tuple[CandidateProgram, ...]:
    """Return the candidate programs for `answer`. Each is tried only if the one before it does not run to its end.

    Usually, `answer` is the text of a program. If the task's row has `prompt` and `entry_point`, as in HumanEval, the
    prompt with `answer` after it is a second candidate. If a rollout submitted a function or class, the only candidate
    is the lines that the rollout typed into its console.
    """
    if _DEFINITION.match(answer) and rollout is not None:
        typed_lines = tuple(physical for run in rollout.executions for physical in run.ran)
        return (CandidateProgram((_IGNORE_ANSWERS, *typed_lines, ""), was_typed_in_rollout=True),)
    prompt, entry = task.fields.get("prompt"), task.fields.get("entry_point")
    texts = (answer, f"{prompt}{answer}") if isinstance(prompt, str) and isinstance(entry, str) else (answer,)
    # One physical line for any program. `exec` gives it the names of the console.
    return tuple(CandidateProgram((_NO_MAIN, f"exec({text!r})")) for text in texts)


async def run_tests_in(sandbox: Sandbox, task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """Return 1.0 if the program runs without an error and passes every test.

    It runs in a fresh console with the task's workspace.

    Raises:
        ConfigError: the task has no tests.
        SandboxFault: our console failed twice. This does not depend on the answer.
    """
    tests, verdict = parse_tests(task), TestOutcome.NOT_RUN
    for program in find_programs(task, answer, rollout):
        verdict = await _run_candidate(sandbox, task, program, tests)
        if verdict is not TestOutcome.NOT_RUN:
            break
    return float(verdict is TestOutcome.PASSED)


async def run_call_in(sandbox: Sandbox, task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """Return 1.0 if the function `f` of the row's field `code` returns the reference answer for these arguments.

    The answer is the arguments as in a call, such as `[1, 2], key=3`, or the whole call. All are Python literals, so
    that the answer cannot run code. Any other answer is worth 0.0.

    Raises:
        ConfigError: the row has no field `code`, or the reference is not Python.
        SandboxFault: our console failed twice.
    """
    call_task = make_call_task(task)
    arguments = parse_call_arguments(answer)
    if arguments is None:
        return 0.0
    return await run_tests_in(sandbox, call_task, f"{task.fields['code']}\n{_RETURNED} = f({arguments})")


def make_call_task(task: Task) -> Task:
    """Return the task whose test compares the returned value with the reference answer of `task`.

    Raises:
        ConfigError: the row has no field `code`, or the reference is not Python.
    """
    code = task.fields.get("code")
    if not isinstance(code, str):
        raise ConfigError(f"field code of task {task.id}", code, "judge arguments needs the function f there")
    call_task = replace(task, answer=f"assert {_RETURNED} == ({task.answer})")
    parse_tests(call_task)
    return call_task


def parse_call_arguments(answer: str) -> str | None:
    """Return the arguments of a call, which are Python literals, or None for any other text."""
    text = answer.strip()
    text = text if text.startswith("f(") else f"f({text})"
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "f":
            return None
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(value)
        is_plain = all(keyword.arg is not None for keyword in call.keywords)
        return ast.unparse(call)[2:-1] if is_plain else None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


async def _run_candidate(
    sandbox: Sandbox, task: Task, program: CandidateProgram, tests: Sequence[ProgramTest]
) -> TestOutcome:
    """Run a program and its tests in a fresh console. Try again if our console fails."""
    for _ in range(_ATTEMPTS):
        async with open_console(sandbox, task.workspace) as console:
            verdict = await _run_candidate_in(console, program, tests)
        if verdict is not TestOutcome.FAULT:
            return verdict
    raise SandboxFault(f"the console that tests task {task.id} failed twice")


async def _run_candidate_in(
    console: SandboxSession, program: CandidateProgram, tests: Sequence[ProgramTest]
) -> TestOutcome:
    # Type the program.
    for line in program.lines:
        result = await console.push(line)
        if result.status is LineStatus.SANDBOX_FAULT:
            return TestOutcome.FAULT
        if console.ended or (result.status is not LineStatus.OK and not program.was_typed_in_rollout):
            return TestOutcome.NOT_RUN
    # Type the tests, each only if all before it passed.
    for test in tests:
        results: list[LineResult] = []
        for line in test.lines:
            if console.ended:
                return TestOutcome.FAILED
            results.append(await console.push(line))
        if any(r.status is LineStatus.SANDBOX_FAULT for r in results):
            return TestOutcome.FAULT
        if not test.accepts(results[-1].status) or not test.check_output("".join(r.text for r in results)):
            return TestOutcome.FAILED
    return TestOutcome.PASSED


def run_tests(task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """Call `run_tests_in` as `run_in_local_console` does."""
    return run_in_local_console(run_tests_in, task, answer, rollout)


def run_in_local_console(judge: ConsoleJudge, task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """Call a console judge with a `local` sandbox that is opened for it. Blocks; it also works inside an event loop.

    Raises:
        SandboxUnavailable: this machine offers no isolation. No weaker sandbox is used instead.
    """

    async def grade() -> float:
        async with open_sandbox("local", warm=1) as sandbox:
            return await judge(sandbox, task, answer, rollout)

    # This thread may be running an event loop already.
    return DaemonThread(lambda: asyncio.run(grade()), "unit tests").future.result()
