"""Main loop of a judge's limited process.

It serves one request at a time over a socket, with one reply per request. A request is pickled, because it contains a
task and a rollout, and this side trusts the other. A reply is JSON, because the other side does not trust this one.
Output of a judge goes to standard error. The process ends when the other side closes the socket, when a judge runs out
of memory, or when its CPU time is used up.
"""

import importlib
import inspect
import json
import logging
import math
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TypedDict

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.record.trajectory import Trajectory
from repl_rl.settings.named import imported
from repl_rl.tasks import Task

Inner = Callable[..., object]
"""A judge of a task and an answer. With a third parameter it also gets the rollout, and its answer may be None."""


ROLLOUTS, CHECKS = 1, 2
"""Features of a judge, as bits: it takes rollouts, and it checks reference answers."""


class Request(TypedDict):
    """A request. With `task` None, the judge is imported, and the reply is the sum of its `ROLLOUTS` and `CHECKS`."""

    judge: str
    task: Task | None
    check: bool
    """Only read the task's reference answer, and reply 1."""
    answer: str | None
    trajectory: Trajectory | None
    path: list[str]
    """`sys.path` of the requesting process."""
    folder: str
    """Working folder of the requesting process."""
    cpu_s: float


class Reply(TypedDict, total=False):
    """A reply, with exactly one of these keys."""

    value: float
    refused: tuple[str, str, str]
    """Thing, value and remedy of a `ConfigError`: the judge or the reference answer cannot be used."""
    raised: str
    """A sentence: the judge raised, or returned an invalid value."""
    overran: str
    """A sentence: the judge ran into a limit, and this process ends now."""


def symbolic(task: Task, answer: str) -> float:
    """Return 1.0 if both are formulas of equal value. Each is read as a whole, as LaTeX or Python."""
    try:
        return float(_formulas().is_equal(task.answer, answer))
    except ValueError:
        _read_formula(task)
        return 0.0


def _read_formula(task: Task) -> None:
    if not _formulas().is_readable(task.answer):
        raise ConfigError(task.reference, task.answer[:80], "the math judge needs a formula")


def pattern(task: Task, answer: str) -> float:
    """Return 1.0 if the whole answer, stripped, matches the regular expression that is the task's answer."""
    return float(_compiled(task).fullmatch(answer.strip()) is not None)


def _compiled(task: Task) -> re.Pattern[str]:
    try:
        return re.compile(task.answer)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(task.reference, task.answer[:80], f"give a regular expression: {error}") from error


SHIPPED: Mapping[str, Inner] = {"math": symbolic, "regex": pattern}
_CHECKS: Mapping[str, Callable[[Task], object]] = {"math": _read_formula, "regex": _compiled}


@lru_cache(maxsize=64)
def load(name: str) -> Inner:
    """Import the judge with that name.

    Raises:
        ConfigError: the judge cannot be imported, or is not a function.
        UserCodeError: its module raised while it was imported.
    """
    if name in SHIPPED:
        if name == "math":
            _formulas()
        return SHIPPED[name]
    found = imported("judge", name)
    if not callable(found):
        raise ConfigError("judge", name, "it is not a function")
    judge: Inner = found
    return judge


def _formulas() -> ModuleType:
    # The import takes a second and loads sympy, so only a process that grades with it pays.
    try:
        return importlib.import_module("repl_rl.judges.formulas")
    except ImportError as error:
        remedy = f"it needs the package math-verify (pip install math-verify): {error}"
        raise ConfigError("judge", "math", remedy) from error


def looks_at_rollouts(judge: Inner) -> bool:
    """Return True for a judge that takes a third argument, the rollout."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(judge).parameters.values()
    except ValueError:
        # A C function may have no signature.
        return False
    return len([p for p in parameters if p.kind in kinds and p.default is p.empty]) > 2


def find_check(name: str, judge: Inner) -> Callable[[Task], object] | None:
    """Return the judge's check of a reference answer, its attribute `check`, or None if it has none.

    The check raises ValueError for an answer that the judge cannot read.
    """
    found = _CHECKS.get(name) or getattr(judge, "check", None)
    return found if callable(found) else None


def check(name: str, judge: Inner, task: Task) -> None:
    """Let a judge read the task's reference answer.

    Raises:
        ConfigError: the judge cannot read it.
    """
    try:
        (find_check(name, judge) or bool)(task)
    except ValueError as error:
        raise ConfigError(task.reference, task.answer[:80], f"judge {name} cannot read it: {error}") from error


def answer_to(request: Request) -> Reply:
    """Grade one answer, or report what is wrong with the judge."""
    name, task = request["judge"], request["task"]
    who = f"judge {name}: on task {task.id if task else None} it"
    try:
        judge = load(name)
        more = looks_at_rollouts(judge)
        if task is None:
            return Reply(value=float(ROLLOUTS * more + CHECKS * (find_check(name, judge) is not None)))
        # A check of the reference answer needs no grading.
        if request["check"]:
            check(name, judge, task)
            return Reply(value=1.0)
        value = judge(task, request["answer"], *[request["trajectory"]] * more)
    except ConfigError as error:
        return Reply(refused=(error.thing, str(error.value), error.remedy))
    except MemoryError:
        return Reply(overran="it ran out of memory")
    except UserCodeError as error:
        return Reply(raised=str(error))
    except Exception as error:
        return Reply(raised=f"{who} raised {error!r}; correct it")
    if not isinstance(value, int | float) or not math.isfinite(value):
        return Reply(raised=f"{who} returned {value!r:.200}; return a finite number")
    return Reply(value=float(value))


def main(fd: int, memory_mb: int) -> None:
    """Serve the socket `fd` with at most `memory_mb` MiB of address space, until the other side closes it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    with Connection(fd) as channel:
        while True:
            try:
                request: Request = pickle.loads(channel.recv_bytes())
            except EOFError:
                return
            sys.path[:] = request["path"]
            # The folder may have been removed since.
            with suppress(OSError):
                os.chdir(request["folder"])
            _allow_cpu(request["cpu_s"])
            reply = answer_to(request)
            channel.send_bytes(json.dumps(reply).encode())
            if "overran" in reply:
                # After a failed allocation, the state of the process cannot be trusted.
                return


def _allow_cpu(seconds: float) -> None:
    """Allow `seconds` of CPU time from now on. Then SIGXCPU ends the process, even if no other process can kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
