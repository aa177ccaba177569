"""From a task's `judge` field to an outcome reward."""

import asyncio
import atexit
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import MappingProxyType

from repl_rl.errors import ConfigError
from repl_rl.judges.limited import JudgeProcesses
from repl_rl.judges.plain import MAX_ANSWER_CHARS, exact, numeric
from repl_rl.judges.unit_tests import run_tests, run_tests_in
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task

Judge = Callable[[Task, str], float]
"""Takes a task and a submitted answer, returns an outcome reward: finite, 1.0 for right and 0.0 for wrong."""

_MAX_FORMULA_CHARS = 1000
"""A longer answer is wrong under `math`."""
_MAX_PROGRAM_CHARS = 200_000
"""A longer answer is wrong under `tests` and under the user's own judges."""
_TESTS = "tests"


@lru_cache(maxsize=1)
def _processes() -> JudgeProcesses:
    """This process's limited processes, made when the first answer needs one."""
    processes = JudgeProcesses()
    atexit.register(processes.close)
    return processes


def _limited(name: str, max_chars: int) -> Judge:
    """The judge of that name in a limited process."""

    def judge(task: Task, answer: str) -> float:
        return 0.0 if len(answer) > max_chars else _processes().grade(name, task, answer)

    return judge


def _tests(task: Task, answer: str) -> float:
    return 0.0 if len(answer) > _MAX_PROGRAM_CHARS else run_tests(task, answer)


JUDGES: MappingProxyType[str, Judge] = MappingProxyType(
    {
        "exact": exact,
        "numeric": numeric,
        "math": _limited("math", _MAX_FORMULA_CHARS),
        "regex": _limited("regex", MAX_ANSWER_CHARS),
        _TESTS: _tests,
    }
)
_IN_PROCESS = ("exact", "numeric")


@lru_cache(maxsize=64)
def find_judge(name: str) -> Judge:
    """The judge of that name. It imports nothing here: a judge of the user is imported in a limited process.

    Raises:
        ConfigError: it is neither a shipped judge nor an importable `module:function`.
        UserCodeError: the user's module raised while it was imported.
    """
    if name in JUDGES:
        return JUDGES[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError("judge", name, f"choose among {', '.join(JUDGES)}, or give module:function")
    _processes().load(name)
    return _limited(name, _MAX_PROGRAM_CHARS)


def check_judges(tasks: Iterable[Task]) -> None:
    """Refuse a judge that does not exist or cannot be imported before a run begins.

    Raises:
        ConfigError, UserCodeError: as `find_judge`.
    """
    for name in {task.judge: None for task in tasks}:
        find_judge(name)
        if name == "math":
            _processes().load(name)


def grade(task: Task, answer: str | None) -> float:
    """The outcome reward of `answer` under the task's judge. None: nothing was submitted, which is worth 0.0.

    It may block for seconds where the judge is not `exact` or `numeric`: in an event loop use `graded`.

    Raises:
        ConfigError: there is no such judge, or it cannot read the task's reference answer.
        UserCodeError: a judge of the user raised, or returned something that is not a finite number.
        SandboxFault: judge `tests`, and our console failed twice.
    """
    judge = find_judge(task.judge)
    return 0.0 if answer is None else judge(task, answer)


async def graded(task: Task, answer: str | None, sandbox: Sandbox | None = None) -> float:
    """`grade` without blocking the event loop. Judge `tests` takes a fresh console of `sandbox` where one is given."""
    if answer is None or task.judge in _IN_PROCESS:
        return grade(task, answer)
    if task.judge == _TESTS and sandbox is not None:
        return 0.0 if len(answer) > _MAX_PROGRAM_CHARS else await run_tests_in(sandbox, task, answer)
    return await asyncio.to_thread(partial(grade, task, answer))
