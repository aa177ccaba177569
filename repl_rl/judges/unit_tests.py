"""Judge `tests`: the answer is a program, and the task's reference answer is its tests.

The program runs in a console of its own, never on the host. A rollout may submit a function in its place: then what it
typed is the program, typed again. Each test is in doctest form: lines after `>>> ` and `... `
are typed into that console after the program, and what it prints must be what the test expects. What is expected stays
on the host and is compared here, so a program cannot read it. A test that is not in doctest form (`assert f(2) == 4`)
is typed as it stands and must print nothing.
"""

import ast
import asyncio
import doctest
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from repl_rl.errors import ConfigError, SandboxFault
from repl_rl.machine.threads import InThread
from repl_rl.record.console import typed_lines
from repl_rl.record.trajectory import LineStatus, Trajectory
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession, console_of
from repl_rl.tasks import Task

_ATTEMPTS = 2
_DEFINED = re.compile(r"<(?:function|class) [^\n]*>\Z")
"""What `str()` makes of a function or a class, and no Python."""
_UNHEARD = "submit_final_answer = lambda *given: None"
"""So that lines that are typed again do not end the console that tests them."""


@dataclass(frozen=True, slots=True)
class Check:
    """Lines to type, and exactly what they must print."""

    lines: tuple[str, ...]
    expected: str


def checks(task: Task) -> tuple[Check, ...]:
    """The tests in a task's reference answer, at least one.

    Raises:
        ConfigError: there is none, or its prompts are malformed.
    """
    try:
        examples = doctest.DocTestParser().get_examples(task.answer)
        if not examples:
            ast.parse(task.answer)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ConfigError(task.reference, task.answer[:80], f"give tests: {error}") from error
    if examples:
        return tuple(Check(typed_lines(example.source), example.want) for example in examples)
    lines = tuple(line for line in task.answer.split("\n") if line.strip())
    if not lines:
        raise ConfigError(task.reference, task.answer[:80], "give tests: '>>> f(2)' and what it prints")
    return tuple(Check((line,), "") for line in lines)


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
    return tuple(Program((f"exec({text!r})",)) for text in texts)


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
        if results[-1].status is not LineStatus.OK or "".join(r.text for r in results) != check.expected:
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
