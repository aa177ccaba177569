"""Grading of answers by the judges that a task names.

The parts, in order:

- `exact`, `numeric` and `named_values`, which compare texts and numbers. They take bounded time on any answer, so they
  run in this process;
- the table `JUDGES` and checks of judges before a run;
- grading of an answer or a rollout;
- group judges, which see all rollouts of a task, as a ranking needs.
"""

import asyncio
import atexit
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.judges.judge_subprocess import JudgeProcesses
from repl_rl.judges.unit_test_judge import (
    ConsoleJudge,
    make_call_task,
    parse_tests,
    run_call_in,
    run_in_local_console,
    run_tests_in,
)
from repl_rl.sandbox.base import Sandbox
from repl_rl.settings.component_registry import import_attribute
from repl_rl.tasks import Task
from repl_rl.tasks.task import WeightedJudge, parse_weighted_judges
from repl_rl.trajectory.trajectory import NamedReward, OutcomeClaims, Trajectory, add_outcome_part, set_outcome_parts
from repl_rl.utils.timeouts import DaemonThread

Judge = Callable[[Task, str], float]
"""Function of a task and a submitted answer that returns a finite outcome reward: 1.0 for right and 0.0 for wrong."""
GroupJudgeFn = Callable[[Task, Sequence[Trajectory]], Sequence[float]]
"""Function of a task and its rollouts that returns one finite number per rollout, in reward units."""
MAX_ANSWER_CHARS = 10_000
"""Longest answer that can be right, characters."""
_MAX_FORMULA_CHARS = 1000
"""Longest answer that can be right under `math`, characters."""
_MAX_PROGRAM_CHARS = 200_000
"""Longest answer that can be right under `tests` and under the user's own judges, characters."""
TIME_LIMIT_S = 60.0
"""Time limit of a group judge per group, wall clock seconds."""
_MAX_NUMBER_CHARS = 4000
"""Longest number, characters. Python itself reads no more than 4,300 digits."""
_MAX_EXPONENT = 400
"""Largest exponent of a number. Every finite float of 64 bits has a smaller one."""
_RELATIVE_TOLERANCE = Fraction(1, 10**9)
_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?(?:[eE]([+-]?\d{1,3}))?", re.ASCII)
_DECIMAL = re.compile(r"[.eE]")
_NAMED_VALUE = re.compile(r"@(\w+)\[")
"""Begin of a named value, such as `@mean[3.5]`."""
_NAMED_TOLERANCE = 1e-6
"""Absolute difference of numbers that `named_values` tolerates, as DABench's own evaluation does."""
_CONSOLE_JUDGES: Mapping[str, ConsoleJudge] = {"tests": run_tests_in, "arguments": run_call_in}
"""Judges that also take the rollout, and a sandbox to open consoles in."""
_IN_PROCESS = ("exact", "numeric", "named_values")
"""Judges that run in this process and never block."""


def grade_exact(task: Task, answer: str) -> float:
    """Return 1.0 if the texts are equal after normalisation.

    Normalisation strips white space at both ends, and then one pair of equal quotes around the whole. So `'abc'`,
    `"abc"` and `abc` are one answer, and the integer 160 equals `160`. Case and inner spaces count.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    return float(_normalize_text(answer) == _normalize_text(task.answer))


def grade_numeric(task: Task, answer: str) -> float:
    """Return 1.0 if both are equal numbers. With a point or an exponent in either, a relative 1e-9 is tolerated.

    A number is decimal digits with an optional sign, `$`, thousands commas, fraction (also `18.`) and exponent, or two
    such numbers divided by `/`. Any other text, and any text over 4,000 characters, is wrong.

    Raises:
        ConfigError: the reference answer is not a number.
    """
    reference = read_reference(task)
    value = parse_number(answer)
    if value is None:
        return 0.0
    tolerance = _RELATIVE_TOLERANCE if _DECIMAL.search(task.answer) or _DECIMAL.search(answer) else 0
    return float(abs(value - reference) <= tolerance * max(abs(value), abs(reference)))


def grade_named_values(task: Task, answer: str) -> float:
    """Return the share of the reference's named values that the answer has, from 0.0 to 1.0.

    A named value is written `@name[value]`, with any text around it. Values are equal as texts, or as numbers to 1e-6.
    Of a name that occurs twice, the last value counts. The answer is right as a whole if the share is 1.0.
    Source: the evaluation of DABench (arXiv 2401.05507).

    Raises:
        ConfigError: the reference answer has no named value.
    """
    reference = read_named_reference(task)
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    values = parse_named_values(answer)
    return sum(_equals_named_value(values.get(name), value) for name, value in reference.items()) / len(reference)


def read_named_reference(task: Task) -> dict[str, str]:
    """Return the reference answer of a task for `named_values`, at least one value by name.

    Raises:
        ConfigError: the answer has none.
    """
    reference = parse_named_values(task.answer)
    if not reference:
        remedy = "the named_values judge needs values such as @mean[3.5]"
        raise ConfigError(task.answer_label, task.answer[:80], remedy)
    return reference


def parse_named_values(text: str) -> dict[str, str]:
    """Return the values of the form `@name[value]` in a text, by name. Takes time in proportion to the text."""
    values: dict[str, str] = {}
    position = 0
    while match := _NAMED_VALUE.search(text, position):
        end = text.find("]", match.end())
        if end < 0:
            break
        # A value ends on its line, or is none.
        broken = text.find("\n", match.end(), end)
        if broken < 0:
            values[match[1]] = text[match.end() : end]
        position = end if broken < 0 else broken
    return values


def _equals_named_value(value: str | None, reference: str) -> bool:
    if value is None or value == reference:
        return value == reference
    try:
        return abs(float(value) - float(reference)) < _NAMED_TOLERANCE
    except ValueError:
        return False


def read_reference(task: Task) -> Fraction:
    """Return the reference answer of a task for `numeric`.

    Raises:
        ConfigError: the answer is not a number.
    """
    reference = parse_number(task.answer)
    if reference is None:
        raise ConfigError(task.answer_label, task.answer[:80], "the numeric judge needs a number")
    return reference


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a number as `numeric` reads it, or None. Takes bounded time on any text."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    numerator_text, slash, denominator_text = _normalize_text(text).partition("/")
    numerator = _parse_decimal(numerator_text)
    if not slash:
        return numerator
    denominator = _parse_decimal(denominator_text)
    return numerator / denominator if numerator is not None and denominator else None


def _parse_decimal(text: str) -> Fraction | None:
    """Return the value of one decimal number, or None for any other text."""
    match = _NUMBER.fullmatch(text.replace("$", "", 1).strip())
    if match is None:
        return None
    sign, whole, fraction, exponent = match[1], match[2].replace(",", ""), match[3] or "", int(match[4] or 0)
    if not whole + fraction or abs(exponent) > _MAX_EXPONENT:
        return None
    value = Fraction(int(whole + fraction), 10 ** len(fraction)) * Fraction(10) ** exponent
    return -value if sign == "-" else value


def _normalize_text(text: str) -> str:
    """Strip white space, and then one pair of equal quotes around the whole."""
    text = text.strip()
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


@lru_cache(maxsize=1)
def _get_judge_processes() -> JudgeProcesses:
    """Return the pool of limited processes, made when the first answer needs one."""
    processes = JudgeProcesses()
    atexit.register(processes.close)
    return processes


def _make_limited_judge(name: str, max_chars: int) -> Judge:
    """Return the judge with that name, which runs in a limited process."""

    def grade_limited(task: Task, answer: str) -> float:
        return 0.0 if len(answer) > max_chars else _get_judge_processes().grade(name, task, answer)

    return grade_limited


def _make_console_judge(judge: ConsoleJudge) -> Callable[..., float]:
    """Return the judge with a `local` sandbox. It takes the rollout as an optional third argument."""

    def grade_in_console(task: Task, answer: str, rollout: Trajectory | None = None) -> float:
        return 0.0 if len(answer) > _MAX_PROGRAM_CHARS else run_in_local_console(judge, task, answer, rollout)

    return grade_in_console


_BLOCKING_CONSOLE_JUDGES = {name: _make_console_judge(judge) for name, judge in _CONSOLE_JUDGES.items()}


JUDGES: MappingProxyType[str, Judge] = MappingProxyType(
    {
        "exact": grade_exact,
        "numeric": grade_numeric,
        "math": _make_limited_judge("math", _MAX_FORMULA_CHARS),
        "regex": _make_limited_judge("regex", MAX_ANSWER_CHARS),
        "literal": _make_limited_judge("literal", MAX_ANSWER_CHARS),
        "named_values": grade_named_values,
        **_BLOCKING_CONSOLE_JUDGES,
    }
)


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
    _get_judge_processes().load(name)
    return _make_limited_judge(name, _MAX_PROGRAM_CHARS)


@lru_cache(maxsize=64)
def _takes_rollout(name: str) -> bool:
    """Return True for a judge of the user that takes the rollout as its third argument.

    Such a judge is also called if no answer was submitted.
    """
    return name not in JUDGES and _get_judge_processes().load(name)


def check_judges(tasks: Iterable[Task]) -> None:
    """Refuse unusable judges, and reference answers that their judge cannot read, before a run begins.

    Raises:
        ConfigError, UserCodeError: see `find_judge` and `parse_weighted_judges`; or a judge cannot read a reference
            answer, which is named by file, line and field.
    """
    turns = [turn for task in tasks for turn in ((task, *task.split_turns()[1:]) if task.follow_ups else (task,))]
    # Load each judge once.
    for name in {
        judge.name: None for text in {turn.judge: None for turn in turns} for judge in parse_weighted_judges(text)
    }:
        find_judge(name)
        if name == "math":
            _get_judge_processes().load(name)
    checked: set[tuple[str, str]] = set()
    unchecked: set[str] = set()
    # A shipped judge reads each distinct answer once. A judge of the user may depend on the whole task.
    for turn in turns:
        for name in (judge.name for judge in parse_weighted_judges(turn.judge)):
            if (name in JUDGES and (name, turn.answer) in checked) or name in unchecked:
                continue
            checked.add((name, turn.answer))
            if not _check_reference(name, turn):
                unchecked.add(name)


def _check_reference(name: str, task: Task) -> bool:
    """Check that a judge can read a task's reference answer. Return False if the judge has no such check.

    Raises:
        ConfigError: the judge cannot read it.
    """
    longest = {"exact": MAX_ANSWER_CHARS, "math": _MAX_FORMULA_CHARS}.get(name)
    if longest and len(task.answer.strip()) > longest:
        remedy = f"no answer over {longest:,} characters is right under the judge {name}; shorten it"
        raise ConfigError(task.answer_label, task.answer[:80], remedy)
    if name == "numeric":
        read_reference(task)
    elif name == "named_values":
        read_named_reference(task)
    elif name == "tests":
        parse_tests(task)
    elif name == "arguments":
        make_call_task(task)
    elif name != "exact" and (name != "math" or parse_number(task.answer) is None):
        # For `math`, a plain number is a formula and needs no process.
        return _get_judge_processes().check(name, task)
    return True


def grade_answer(task: Task, answer: str | None, trajectory: Trajectory | None = None) -> float:
    """Return the outcome reward of `answer` under the task's judges.

    None means that nothing was submitted, which is worth 0.0 except to judges that take the rollout. A judge other than
    `exact` and `numeric` may block for seconds. Use `grade_async` in an event loop.

    Args:
        task: the task, which names its judges.
        answer: the submitted answer.
        trajectory: the rollout, for judges that take it.

    Raises:
        ConfigError: a judge does not exist, cannot read the task's reference answer, or needs the rollout.
        UserCodeError: a judge of the user raised, or returned something that is not a finite number.
        SandboxFault: our console failed twice under judge `tests`.
    """
    return math.fsum(
        j.weight * _grade_with_judge(j.name, task, answer, trajectory) for j in parse_weighted_judges(task.judge)
    )


def _grade_with_judge(name: str, task: Task, answer: str | None, trajectory: Trajectory | None) -> float:
    """Return the value of one judge, without its weight."""
    judge = find_judge(name)
    if name in _BLOCKING_CONSOLE_JUDGES and answer is not None:
        return _BLOCKING_CONSOLE_JUDGES[name](task, answer, trajectory)
    if _takes_rollout(name):
        if trajectory is None:
            raise ConfigError("judge", name, "it needs the rollout, which is missing; pass one")
        return _get_judge_processes().grade(name, task, answer, trajectory)
    return 0.0 if answer is None else judge(task, answer)


async def grade_async(
    task: Task, answer: str | None, sandbox: Sandbox | None = None, trajectory: Trajectory | None = None
) -> float:
    """Grade like `grade_answer` without blocking the event loop.

    Judges `tests` and `arguments` use a fresh console of `sandbox` if given.
    """
    return math.fsum(
        [
            j.weight * await _grade_with_judge_async(j.name, task, answer, sandbox, trajectory)
            for j in parse_weighted_judges(task.judge)
        ]
    )


async def grade_with_first_judge(task: Task, answer: str, sandbox: Sandbox, trajectory: Trajectory) -> float:
    """Return the unweighted value of the first of the task's judges. It is at least 1 if the answer is right.

    Raises:
        As `grade_answer`.
    """
    return await _grade_with_judge_async(parse_weighted_judges(task.judge)[0].name, task, answer, sandbox, trajectory)


async def _grade_with_judge_async(
    name: str, task: Task, answer: str | None, sandbox: Sandbox | None, trajectory: Trajectory | None
) -> float:
    """Return the value of one judge without blocking the event loop."""
    if name in _IN_PROCESS:
        return _grade_with_judge(name, task, answer, trajectory)
    if name in _CONSOLE_JUDGES and sandbox is not None and answer is not None:
        judge = _CONSOLE_JUDGES[name]
        return 0.0 if len(answer) > _MAX_PROGRAM_CHARS else await judge(sandbox, task, answer, trajectory)
    if name in JUDGES and answer is None:
        return 0.0
    return await asyncio.to_thread(_grade_with_judge, name, task, answer, trajectory)


async def grade_trajectory(task: Task, trajectory: Trajectory, claims: OutcomeClaims, sandbox: Sandbox) -> Trajectory:
    """Return the rollout with its outcome: the judges' values or the sampler's claim, plus additions.

    The judges are skipped if the sampler set the outcome and no answer was submitted.

    Raises:
        As `grade_answer`.
    """
    judges, answer = parse_weighted_judges(task.judge), trajectory.answer
    if claims.value is not None and answer is None:
        return set_outcome_parts(trajectory, claims.combine_with_judges(()), None)
    values = [await _grade_with_judge_async(j.name, task, answer, sandbox, trajectory) for j in judges]
    # The value of a single judge needs no parts.
    if claims == OutcomeClaims() and judges == (WeightedJudge(judges[0].name),):
        return replace(trajectory, outcome=values[0])
    parts = [NamedReward(j.name, j.weight * value) for j, value in zip(judges, values, strict=True)]
    return set_outcome_parts(trajectory, claims.combine_with_judges(parts), values[0])


@dataclass(frozen=True, slots=True)
class GroupJudge:
    """A `GroupJudgeFn` with a weight and checks of its result. It runs in a separate thread of this process."""

    name: str
    function: GroupJudgeFn
    weight: float = 1.0
    time_limit_s: float = TIME_LIMIT_S

    def __call__(self, task: Task, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """Return the addition to the outcome of each rollout, shape (G,).

        Raises:
            UserCodeError: the function raised, took too long, or did not return one finite number per rollout.
        """
        subject = f"group judge {self.name}: on task {task.id} it"
        call = DaemonThread(lambda: tuple(float(value) for value in self.function(task, tuple(group))), subject)
        call.join(self.time_limit_s)
        if not call.future.done():
            raise UserCodeError(f"{subject} took longer than {self.time_limit_s:g} s; make it faster")
        error = call.future.exception()
        if error is not None:
            raise UserCodeError(f"{subject} raised {error!r}; correct it") from error
        values = call.future.result()
        if len(values) != len(group) or not all(map(math.isfinite, values)):
            raise UserCodeError(
                f"{subject} returned {values!r:.200} for {len(group)} rollouts; return a finite number for each"
            )
        return tuple(self.weight * value for value in values)


def load_group_judges(weights: Mapping[str, float]) -> tuple[GroupJudge, ...]:
    """Return the group judges of the named functions, such as `my_judges:shortest`, each with its weight.

    Raises:
        ConfigError: a function does not exist.
        UserCodeError: a module raised while it was imported.
    """
    return tuple(GroupJudge(name, _import_group_judge(name), weight) for name, weight in weights.items())


def _import_group_judge(name: str) -> GroupJudgeFn:
    attribute = import_attribute("group judge", name)
    if not callable(attribute):
        raise ConfigError("group judge", name, "it is not a function")
    function: GroupJudgeFn = attribute
    return function


async def apply_group_judges(
    judges: Sequence[GroupJudge], tasks: Sequence[Task], rollouts: Sequence[Trajectory]
) -> list[Trajectory]:
    """Return the rollouts, given one task each, with the additions of group judges.

    No judge sees a failed rollout, which stays unchanged.

    Raises:
        UserCodeError: a judge broke its contract.
    """
    judged = list(rollouts)
    # Group the rollouts by task, without the failed ones.
    groups: dict[str, list[int]] = {}
    for index, (task, trajectory) in enumerate(zip(tasks, rollouts, strict=True)):
        if trajectory.failure is None:
            groups.setdefault(task.id, []).append(index)
    for judge in judges:
        for indices in groups.values():
            # A judge sees the additions of earlier judges.
            values = await asyncio.to_thread(judge, tasks[indices[0]], [judged[index] for index in indices])
            for index, value in zip(indices, values, strict=True):
                judged[index] = add_outcome_part(judged[index], NamedReward(judge.name, value))
    return judged
