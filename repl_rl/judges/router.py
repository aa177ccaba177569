"""Grading of answers by the judges that a task names."""

import asyncio
import atexit
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from repl_rl.errors import ConfigError
from repl_rl.judges.limited import JudgeProcesses
from repl_rl.judges.plain import MAX_ANSWER_CHARS, exact, numeric, parse_number, read_reference
from repl_rl.judges.unit_tests import checks, run_tests, run_tests_in
from repl_rl.record.line import NamedReward
from repl_rl.record.outcome import Claims, with_parts
from repl_rl.record.trajectory import Trajectory
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Task
from repl_rl.tasks.weights import Weighed, weighed

Judge = Callable[[Task, str], float]
"""Function of a task and a submitted answer that returns a finite outcome reward: 1.0 for right and 0.0 for wrong."""

_MAX_FORMULA_CHARS = 1000
"""Longest answer that can be right under `math`, characters."""
_MAX_PROGRAM_CHARS = 200_000
"""Longest answer that can be right under `tests` and under the user's own judges, characters."""
_TESTS = "tests"


@lru_cache(maxsize=1)
def _processes() -> JudgeProcesses:
    """Return the pool of limited processes, made when the first answer needs one."""
    processes = JudgeProcesses()
    atexit.register(processes.close)
    return processes


def _limited(name: str, max_chars: int) -> Judge:
    """Return the judge with that name, which runs in a limited process."""

    def judge(task: Task, answer: str) -> float:
        return 0.0 if len(answer) > max_chars else _processes().grade(name, task, answer)

    return judge


def _tests(task: Task, answer: str, rollout: Trajectory | None = None) -> float:
    return 0.0 if len(answer) > _MAX_PROGRAM_CHARS else run_tests(task, answer, rollout)


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
    """Return the judge with that name. A judge of the user is imported in a limited process, not here.

    Raises:
        ConfigError: the name is neither a shipped judge nor an importable `module:function`.
        UserCodeError: the user's module raised while it was imported.
    """
    if name in JUDGES:
        return JUDGES[name]
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError("judge", name, f"choose among {', '.join(JUDGES)}, or give module:function")
    _processes().load(name)
    return _limited(name, _MAX_PROGRAM_CHARS)


@lru_cache(maxsize=64)
def _looks_at_rollouts(name: str) -> bool:
    """Return True for a judge of the user that takes the rollout as its third argument. It is also called without an
    answer."""
    return name not in JUDGES and _processes().load(name)


def check_judges(tasks: Iterable[Task]) -> None:
    """Refuse unusable judges, and reference answers that their judge cannot read, before a run begins.

    Raises:
        ConfigError, UserCodeError: see `find_judge` and `weighed`; or a judge cannot read a reference answer, which is
            named by file, line and field.
    """
    turns = [turn for task in tasks for turn in ((task, *task.turns()[1:]) if task.follow_ups else (task,))]
    # Load each judge once.
    for name in {judge.name: None for text in {turn.judge: None for turn in turns} for judge in weighed(text)}:
        find_judge(name)
        if name == "math":
            _processes().load(name)
    seen: set[tuple[str, str]] = set()
    unchecked: set[str] = set()
    # A shipped judge reads each distinct answer once. A judge of the user may depend on the whole task.
    for turn in turns:
        for name in (judge.name for judge in weighed(turn.judge)):
            if (name in JUDGES and (name, turn.answer) in seen) or name in unchecked:
                continue
            seen.add((name, turn.answer))
            if not _check_reference(name, turn):
                unchecked.add(name)


def _check_reference(name: str, task: Task) -> bool:
    """Let a judge read a reference answer. Return False if the judge accepts any.

    Raises:
        ConfigError: the judge cannot read it.
    """
    longest = {"exact": MAX_ANSWER_CHARS, "math": _MAX_FORMULA_CHARS}.get(name)
    if longest and len(task.answer.strip()) > longest:
        remedy = f"no answer over {longest:,} characters is right under the judge {name}; shorten it"
        raise ConfigError(task.reference, task.answer[:80], remedy)
    if name == "numeric":
        read_reference(task)
    elif name == _TESTS:
        checks(task)
    elif name != "exact" and (name != "math" or parse_number(task.answer) is None):
        # For `math`, a plain number is a formula and needs no process.
        return _processes().check(name, task)
    return True


def grade(task: Task, answer: str | None, trajectory: Trajectory | None = None) -> float:
    """Return the outcome reward of `answer` under the task's judges.

    None means that nothing was submitted, which is worth 0.0 except to judges that take the rollout. A judge other than
    `exact` and `numeric` may block for seconds. Use `graded` in an event loop.

    Args:
        task: the task, which names its judges.
        answer: the submitted answer.
        trajectory: the rollout, for judges that take it.

    Raises:
        ConfigError: a judge does not exist, cannot read the task's reference answer, or needs the rollout.
        UserCodeError: a judge of the user raised, or returned something that is not a finite number.
        SandboxFault: our console failed twice under judge `tests`.
    """
    return math.fsum(j.weight * _value(j.name, task, answer, trajectory) for j in weighed(task.judge))


def _value(name: str, task: Task, answer: str | None, trajectory: Trajectory | None) -> float:
    """Return the value of one judge."""
    judge = find_judge(name)
    if name == _TESTS and answer is not None:
        return _tests(task, answer, trajectory)
    if _looks_at_rollouts(name):
        if trajectory is None:
            raise ConfigError("judge", name, "it looks at the rollout, which is not there; give one")
        return _processes().grade(name, task, answer, trajectory)
    return 0.0 if answer is None else judge(task, answer)


async def graded(
    task: Task, answer: str | None, sandbox: Sandbox | None = None, trajectory: Trajectory | None = None
) -> float:
    """Grade like `grade` without blocking the event loop. Judge `tests` uses a fresh console of `sandbox` if given."""
    return math.fsum([j.weight * await _valued(j.name, task, answer, sandbox, trajectory) for j in weighed(task.judge)])


async def verdict(task: Task, answer: str, sandbox: Sandbox, trajectory: Trajectory) -> float:
    """Return the unweighted value of the first of the task's judges. It is at least 1 if the answer is right.

    Raises:
        As `grade`.
    """
    return await _valued(weighed(task.judge)[0].name, task, answer, sandbox, trajectory)


async def _valued(
    name: str, task: Task, answer: str | None, sandbox: Sandbox | None, trajectory: Trajectory | None
) -> float:
    if name in _IN_PROCESS:
        return _value(name, task, answer, trajectory)
    if name == _TESTS and sandbox is not None and answer is not None:
        return 0.0 if len(answer) > _MAX_PROGRAM_CHARS else await run_tests_in(sandbox, task, answer, trajectory)
    if name in JUDGES and answer is None:
        return 0.0
    return await asyncio.to_thread(_value, name, task, answer, trajectory)


async def settled(task: Task, trajectory: Trajectory, claims: Claims, sandbox: Sandbox) -> Trajectory:
    """Return the rollout with its outcome: the judges' values or the sampler's claim, plus additions.

    The judges are skipped if the sampler set the outcome and no answer was submitted.

    Raises:
        As `grade`.
    """
    judges, answer = weighed(task.judge), trajectory.answer
    if claims.value is not None and answer is None:
        return with_parts(trajectory, claims.parts(()), None)
    values = [await _valued(j.name, task, answer, sandbox, trajectory) for j in judges]
    # The value of a single judge needs no parts.
    if claims == Claims() and judges == (Weighed(judges[0].name),):
        return replace(trajectory, outcome=values[0])
    parts = [NamedReward(j.name, j.weight * value) for j, value in zip(judges, values, strict=True)]
    return with_parts(trajectory, claims.parts(parts), values[0])
