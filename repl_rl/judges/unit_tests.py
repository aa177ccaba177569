"""Judge `tests`: the answer is a program, and the task's reference answer is its tests.

The program runs in a console of its own, never on the host, and is no main program there: `__name__` is `submission`.
A rollout may submit a function in its place: then what it typed is the program, typed again. Each test is in doctest
form: lines after `>>> ` and `... ` are typed into that console after the program, and what it prints must be what the
test expects. Of `assert f(2) == 4` the console only prints the value of `f(2)`. What is expected stays on the host and
is compared here, so a program cannot read it. Another test that is not in doctest form is typed as it stands and must
print nothing.
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
"""What `str()` makes of a function or a class, and no Python."""
_UNHEARD = "submit_final_answer = lambda *given: None"
"""So that lines that are typed again do not end the console that tests them."""


_NO_MAIN = "__import__('sys').modules['submission'] = __import__('sys').modules[__name__]; __name__ = 'submission'"
"""So that `if __name__ == '__main__':` is false, as where a suite imports the program; its classes can be pickled."""


@dataclass(frozen=True, slots=True)
class Check:
    """Lines to type, and exactly what they must print; or an assertion for what they print."""

    lines: tuple[str, ...]
    expected: str | Assertion

    def passes(self, printed: str) -> bool:
        """True for what the console must print."""
        return self.expected.passes(printed) if isinstance(self.expected, Assertion) else printed == self.expected


def checks(task: Task) -> tuple[Check, ...]:
    """The tests in a task's reference answer, at least one.

    Raises:
        ConfigError: there is none, or its prompts are malformed.
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
    """One test; an assertion that prints nothing is cut in two where it can be."""
    assertion = None
    if not want and source.lstrip().startswith("assert"):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            (statement,) = ast.parse(source).body
            assertion = assertion_of(statement)
    return Check(typed_lines(source), want) if assertion is None else Check((assertion.line,), assertion)


class Verdict(StrEnum):
    """What came of a program and its tests."""

    PASSED = "passed"
    FAILED = "failed"
    UNREAD = "unread"
    """The program itself did not run to its end, so no test did."""
    FAULT = "fault"
    """Our console failed: nothing is known."""


@dataclass(frozen=True, slots=True)
class Program:
    """Physical lines that are typed before the tests."""

    lines: tuple[str, ...]
    typed: bool = False
    """They were a rollout's own, whose errors are its past; False: an error among them is one of the program."""


def programs(task: Task, answer: str, rollout: Trajectory | None) -> tuple[Program, ...]:
    """What `answer` stands for; a later program counts where the one before it cannot be read.

    A text is a program. Where the task's row has `prompt` and `entry_point`, as HumanEval's have, it may also be what
    follows that prompt. A function or class that a rollout submitted stands for what it typed into its console.
    """
    if _DEFINED.match(answer) and rollout is not None:
        typed = tuple(physical for run in rollout.executions for physical in run.ran)
        return (Program((_UNHEARD, *typed, ""), typed=True),)
    prompt, entry = task.fields.get("prompt"), task.fields.get("entry_point")
    texts = (answer, f"{prompt}{answer}") if isinstance(prompt, str) and isinstance(entry, str) else (answer,)
    # One physical line whatever the program contains. `exec` here gives it the console's own names.
    return tuple(Program((_NO_MAIN, f"exec({text!r})")) for text in texts)


async def run_tests_in(sandbox: Sandbox, task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    """1.0 when the program runs without an error and passes every test, in a fresh console with the task's workspace.

    Raises:
        ConfigError: the task has no tests.
        SandboxFault: our console failed, twice. It says nothing about the answer.
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
    for line in program.lines:
        result = await console.push(line)
        if result.status is LineStatus.SANDBOX_FAULT:
            return Verdict.FAULT
        if console.ended or (result.status is not LineStatus.OK and not program.typed):
            return Verdict.UNREAD
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
    """`run_tests_in` a `local` sandbox that is opened for it; blocks. It may be called inside an event loop.

    Raises:
        SandboxUnavailable: there is no isolation here. Nothing weaker is used instead.
    """

    async def played() -> float:
        async with open_sandbox("local", warm=1) as sandbox:
            return await run_tests_in(sandbox, task, answer, rollout)

    return InThread(lambda: asyncio.run(played()), "unit tests").outcome.result()
