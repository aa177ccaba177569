"""Judge `tests`: the answer is a program, and the task's reference answer is its tests.

The program runs in a console of its own, never on the host. Each test is in doctest form: lines after `>>> ` and `... `
are typed into that console after the program, and what it prints must be what the test expects. What is expected stays
on the host and is compared here, so a program cannot read it. A test that is not in doctest form (`assert f(2) == 4`)
is typed as it stands and must print nothing.
"""

import asyncio
import doctest
from collections.abc import Sequence
from dataclasses import dataclass

from repl_rl.errors import ConfigError, SandboxFault
from repl_rl.machine.threads import InThread
from repl_rl.record.console import typed_lines
from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import PushResult, Sandbox, SandboxSession, console_of
from repl_rl.tasks import Task

_ATTEMPTS = 2


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
    except ValueError as error:
        raise ConfigError(f"answer of task {task.id}", task.answer[:80], f"give tests: {error}") from error
    if examples:
        return tuple(Check(typed_lines(example.source), example.want) for example in examples)
    lines = tuple(line for line in task.answer.split("\n") if line.strip())
    if not lines:
        raise ConfigError(f"answer of task {task.id}", task.answer, "give tests: '>>> f(2)' and what it prints")
    return tuple(Check((line,), "") for line in lines)


async def run_tests_in(sandbox: Sandbox, task: Task, answer: str) -> float:
    """1.0 when the program runs without an error and passes every test, in a fresh console with the task's workspace.

    Raises:
        ConfigError: the task has no tests.
        SandboxFault: our console failed, twice. It says nothing about the answer.
    """
    wanted = checks(task)
    for _ in range(_ATTEMPTS):
        async with console_of(sandbox, task.workspace) as console:
            verdict = await _passes(console, answer, wanted)
        if verdict is not None:
            return float(verdict)
    raise SandboxFault(f"the console that tests task {task.id} failed twice")


async def _passes(console: SandboxSession, program: str, wanted: Sequence[Check]) -> bool | None:
    """None: the console failed, nothing is known."""
    # One physical line whatever the program contains. `exec` here gives it the console's own names.
    result = await console.push(f"exec({program!r})")
    if result.status is LineStatus.SANDBOX_FAULT:
        return None
    if result.status is not LineStatus.OK:
        return False
    for check in wanted:
        results: list[PushResult] = []
        for line in check.lines:
            if console.ended:
                return False
            results.append(await console.push(line))
        if any(r.status is LineStatus.SANDBOX_FAULT for r in results):
            return None
        if results[-1].status is not LineStatus.OK or "".join(r.text for r in results) != check.expected:
            return False
    return True


def run_tests(task: Task, answer: str) -> float:
    """`run_tests_in` a `local` sandbox that is opened for it; blocks. It may be called inside an event loop.

    Raises:
        SandboxUnavailable: there is no isolation here. Nothing weaker is used instead.
    """

    async def played() -> float:
        async with open_sandbox("local", warm=1) as sandbox:
            return await run_tests_in(sandbox, task, answer)

    return InThread(lambda: asyncio.run(played()), "unit tests").outcome.result()
