"""Judge `tests`: the answer is a program, and the task's reference answer is its tests.

The program runs in a separate console, never on the host. It is not the main program there: `__name__` is `submission`.
A rollout may submit a function in place of a program. Then the lines that the rollout typed are the program, and are
typed again.

A test in doctest form has lines after `>>> ` and `... `, which are typed into that console after the program. Their
output must be what the test expects. For `assert f(2) == 4`, the console only prints the value of `f(2)`. The expected
value stays on the host and is compared here, so a program cannot read it. A test that is not in doctest form is typed
unchanged and must print nothing.
"""

import ast
import asyncio
import doctest
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from repl_rl.errors import ConfigError, SandboxFault
from repl_rl.machine.threads import InThread
from repl_rl.record.console import typed_lines
from repl_rl.record.trajectory import LineStatus, Trajectory
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession, console_of
from repl_rl.tasks import Task
from repl_rl.tasks.assertions import Assertion, assertion_of

_ATTEMPTS = 2
_DEFINED = re.compile(r"<(?:function|class) [^\n]*>\Z")
"""Text that `str()` returns for a function or a class; it is not Python."""
_UNHEARD = "submit_final_answer = lambda *given: None"
"""Replacement that keeps lines that are typed again from ending the console that tests them."""


_NO_MAIN = "__import__('sys').modules['submission'] = __import__('sys').modules[__name__]; __name__ = 'submission'"
"""Makes `if __name__ == '__main__':` false, as in a suite that imports the program. Its classes can be pickled."""


@dataclass(frozen=True, slots=True)
class Check:
    """Lines to type, and their exact output or an assertion about it."""

    lines: tuple[str, ...]
    expected: str | Assertion

    def passes(self, printed: str) -> bool:
        """Return True if the console printed what the test expects."""
        return self.expected.passes(printed) if isinstance(self.expected, Assertion) else printed == self.expected


def checks(task: Task) -> tuple[Check, ...]:
    """Return the tests in a task's reference answer, at least one.

    Raises:
        ConfigError: the answer has no tests, or its prompts are malformed.
    """
    try:
        examples = doctest.DocTestParser().get_examples(task.answer)
        if examples:
            return tuple(_check(example.source, example.want) for example in examples)
        statements = ast.parse(task.answer).body
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(task.reference, task.answer[:80], f"give tests: {error}") from error
    if not statements:
        raise ConfigError(task.reference, task.answer[:80], "give tests: '>>> f(2)' and what it prints")
    return tuple(_check(ast.get_source_segment(task.answer, statement) or "", "") for statement in statements)


def _check(source: str, want: str) -> Check:
    """Return one test. An assertion without output is split in two if possible."""
    assertion = None
    if not want and source.lstrip().startswith("assert"):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            (statement,) = ast.parse(source).body
            assertion = assertion_of(statement)
    return Check(typed_lines(source), want) if assertion is None else Check((assertion.line,), assertion)


class Verdict(StrEnum):
    """Result of a program and its tests."""

    PASSED = "passed"
    FAILED = "failed"
    UNREAD = "unread"
    """The program itself did not run to its end, so no test ran."""
    FAULT = "fault"
    """Our console failed, so the result is unknown."""


@dataclass(frozen=True, slots=True)
class Program:
    """Physical lines that are typed before the tests."""

    lines: tuple[str, ...]
    typed: bool = False
    """True for a rollout's own lines, whose errors are ignored. Otherwise, an error is an error of the program."""


def programs(task: Task, answer: str, rollout: Trajectory | None) -> tuple[Program, ...]:
    """Return the programs that `answer` may mean. A later one is used only if the one before it cannot be read.

    A text is a program. If the task's row has `prompt` and `entry_point`, as in HumanEval, the text may also continue
    that prompt. A function or class that a rollout submitted means the lines that it typed into its console.
    """
    if _DEFINED.match(answer) and rollout is not None:
        typed = tuple(physical for run in rollout.executions for physical in run.ran)
        return (Program((_UNHEARD, *typed, ""), typed=True),)
    prompt, entry = task.fields.get("prompt"), task.fields.get("entry_point")
    texts = (answer, f"{prompt}{answer}") if isinstance(prompt, str) and isinstance(entry, str) else (answer,)
    # One physical line for any program. `exec` gives it the names of the console.
    return tuple(Program((_NO_MAIN, f"exec({text!r})")) for text in texts)


async def run_tests_in(sandbox: Sandbox, task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """Return 1.0 if the program runs without an error and passes every test.

    It runs in a fresh console with the task's workspace.

    Raises:
        ConfigError: the task has no tests.
        SandboxFault: our console failed twice. This does not depend on the answer.
    """
    wanted, verdict = checks(task), Verdict.UNREAD
    for program in programs(task, answer, rollout):
        verdict = await _tried(sandbox, task, program, wanted)
        if verdict is not Verdict.UNREAD:
            break
    return float(verdict is Verdict.PASSED)


async def _tried(sandbox: Sandbox, task: Task, program: Program, wanted: Sequence[Check]) -> Verdict:
    for _ in range(_ATTEMPTS):
        async with console_of(sandbox, task.workspace) as console:
            verdict = await _verdict(console, program, wanted)
        if verdict is not Verdict.FAULT:
            return verdict
    raise SandboxFault(f"the console that tests task {task.id} failed twice")


async def _verdict(console: SandboxSession, program: Program, wanted: Sequence[Check]) -> Verdict:
    # Type the program.
    for line in program.lines:
        result = await console.push(line)
        if result.status is LineStatus.SANDBOX_FAULT:
            return Verdict.FAULT
        if console.ended or (result.status is not LineStatus.OK and not program.typed):
            return Verdict.UNREAD
    # Type the tests, each only if all before it passed.
    for check in wanted:
        results: list[PushResult] = []
        for line in check.lines:
            if console.ended:
                return Verdict.FAILED
            results.append(await console.push(line))
        if any(r.status is LineStatus.SANDBOX_FAULT for r in results):
            return Verdict.FAULT
        if results[-1].status is not LineStatus.OK or not check.passes("".join(r.text for r in results)):
            return Verdict.FAILED
    return Verdict.PASSED


def run_tests(task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """Call `run_tests_in` with a `local` sandbox that is opened for it. Blocks; it also works inside an event loop.

    Raises:
        SandboxUnavailable: this machine offers no isolation. No weaker sandbox is used instead.
    """

    async def played() -> float:
        async with open_sandbox("local", warm=1) as sandbox:
            return await run_tests_in(sandbox, task, answer, rollout)

    # This thread may be running an event loop already.
    return InThread(lambda: asyncio.run(played()), "unit tests").outcome.result()
