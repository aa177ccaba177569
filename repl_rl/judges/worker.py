"""What runs in a judge's limited process.

One request at a time over a socket, one reply each. A request is pickled, since it brings a task and a rollout, and
this side trusts the other; a reply is JSON, since the other side does not trust this one. What a judge prints goes to
standard error. The process ends when the other side closes the socket, when a judge runs out of memory, or when its CPU
time is over.
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
"""Takes a task and an answer, and a rollout too where it has a third parameter; its answer is None then if none is."""


ROLLOUTS, CHECKS = 1, 2
"""What a judge has: a look at rollouts, and a check of reference answers."""


class Request(TypedDict):
    """`task` None: import the judge, and reply the sum of `ROLLOUTS` and `CHECKS` where it has them."""

    judge: str
    task: Task | None
    check: bool
    """Only read the task's reference answer, and reply 1."""
    answer: str | None
    trajectory: Trajectory | None
    path: list[str]
    """`sys.path` of the asking process."""
    folder: str
    """Its working folder."""
    cpu_s: float


class Reply(TypedDict, total=False):
    """Exactly one of them."""

    value: float
    refused: tuple[str, str, str]
    """Thing, value and remedy of a `ConfigError`: the judge cannot be used, or the reference answer cannot be."""
    raised: str
    """The judge raised or returned nonsense: a sentence."""
    overran: str
    """It ran into a limit, and this process ends now: a sentence."""


def symbolic(task: Task, answer: str) -> float:
    """1.0 when both are formulas of one value, each read as a whole, LaTeX or Python."""
    try:
        return float(_formulas().is_equal(task.answer, answer))
    except ValueError:
        _read_formula(task)
        return 0.0


def _read_formula(task: Task) -> None:
    if not _formulas().is_readable(task.answer):
        raise ConfigError(task.reference, task.answer[:80], "the math judge needs a formula")


def pattern(task: Task, answer: str) -> float:
    """1.0 when the whole answer, stripped, matches the regular expression that the task has as its answer."""
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
    """The judge of that name, imported.

    Raises:
        ConfigError: it cannot be imported, or is no function.
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
    # It takes a second and imports sympy: only a process that grades with it pays.
    try:
        return importlib.import_module("repl_rl.judges.formulas")
    except ImportError as error:
        remedy = f"it needs the package math-verify (pip install math-verify): {error}"
        raise ConfigError("judge", "math", remedy) from error


def looks_at_rollouts(judge: Inner) -> bool:
    """True for a judge that takes a third argument, the rollout."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(judge).parameters.values()
    except ValueError:  # a function of C tells nothing
        return False
    return len([p for p in parameters if p.kind in kinds and p.default is p.empty]) > 2


def find_check(name: str, judge: Inner) -> Callable[[Task], object] | None:
    """The judge's check of a reference answer, which raises ValueError: its attribute `check`. None: it has none."""
    found = _CHECKS.get(name) or getattr(judge, "check", None)
    return found if callable(found) else None


def check(name: str, judge: Inner, task: Task) -> None:
    """Have a judge read the task's reference answer.

    Raises:
        ConfigError: it cannot.
    """
    try:
        (find_check(name, judge) or bool)(task)
    except ValueError as error:
        raise ConfigError(task.reference, task.answer[:80], f"judge {name} cannot read it: {error}") from error


def answer_to(request: Request) -> Reply:
    """Grade one answer, or say what is wrong with the judge."""
    name, task = request["judge"], request["task"]
    who = f"judge {name}: on task {task.id if task else None} it"
    try:
        judge = load(name)
        more = looks_at_rollouts(judge)
        if task is None:
            return Reply(value=float(ROLLOUTS * more + CHECKS * (find_check(name, judge) is not None)))
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
        return Reply(raised=f"{who} raised {error!r}; mend it")
    if not isinstance(value, int | float) or not math.isfinite(value):
        return Reply(raised=f"{who} returned {value!r:.200}; return a finite number")
    return Reply(value=float(value))


def main(fd: int, memory_mb: int) -> None:
    """Serve the socket `fd` with at most `memory_mb` MiB of address space, until the other side hangs up."""
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
            with suppress(OSError):  # it was removed since
                os.chdir(request["folder"])
            _allow_cpu(request["cpu_s"])
            reply = answer_to(request)
            channel.send_bytes(json.dumps(reply).encode())
            if "overran" in reply:
                return  # what is left after a failed allocation is not to be trusted


def _allow_cpu(seconds: float) -> None:
    """From now on, so much CPU time; SIGXCPU ends the process then, should nobody be left to kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
