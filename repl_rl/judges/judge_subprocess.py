"""Limited processes for judges that are not trusted with this process. One that exceeds a limit is killed.

`JudgeProcesses` is the pool in the main process, and `main` is the loop of a limited process. A process serves one
request at a time over a socket, with one reply per request. A request is pickled, because it contains a task and a
rollout, and the process trusts its parent. A reply is JSON, because the parent does not trust the process. Output of a
judge goes to standard error. A process ends when its parent closes the socket, when a judge runs out of memory, or when
its CPU time is used up.
"""

import ast
import importlib
import inspect
import json
import logging
import math
import os
import pickle
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.component_registry import import_attribute
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory

_LOGGER = logging.getLogger(__name__)
_ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains the package, which a new process must find."""
JudgeFn = Callable[..., object]
"""A judge of a task and an answer. With a third parameter it also gets the rollout, and its answer may be None."""
ROLLOUTS, CHECKS = 1, 2
"""Features of a judge, as bits: it takes rollouts, and it checks reference answers."""


class JudgeRequest(TypedDict):
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


class JudgeReply(TypedDict, total=False):
    """A reply, with exactly one of these keys."""

    value: float
    refused: tuple[str, str, str]
    """Thing, value and remedy of a `ConfigError`: the judge or the reference answer cannot be used."""
    raised: str
    """A sentence: the judge raised, or returned an invalid value."""
    overran: str
    """A sentence: the judge ran into a limit, and this process ends now."""


def _build_request(
    judge: str,
    cpu_s: float,
    task: Task | None = None,
    answer: str | None = None,
    trajectory: Trajectory | None = None,
    check: bool = False,
) -> JudgeRequest:
    """Return a request. The process searches for modules where this one would, in the same working folder."""
    cwd = os.getcwd()
    path = [folder or cwd for folder in sys.path]
    # A judge does not need the initial content of the console, which may be large.
    bare_task = None if task is None else replace(task, workspace=None)
    return JudgeRequest(
        judge=judge,
        task=bare_task,
        check=check,
        answer=answer,
        trajectory=trajectory,
        path=path,
        folder=cwd,
        cpu_s=cpu_s,
    )


# Loop of a limited process


def grade_symbolic(task: Task, answer: str) -> float:
    """Return 1.0 if both are formulas of equal value. Each is read as a whole, as LaTeX or Python."""
    try:
        return float(_import_formulas().is_equal(task.answer, answer))
    except ValueError:
        # If the reference is a formula, only the answer is wrong.
        _read_formula(task)
        return 0.0


def _read_formula(task: Task) -> None:
    """Refuse a reference answer that is not a formula."""
    if not _import_formulas().is_readable(task.answer):
        raise ConfigError(task.answer_label, task.answer[:80], "the math judge needs a formula")


def grade_pattern(task: Task, answer: str) -> float:
    """Return 1.0 if the whole answer, stripped, matches the regular expression that is the task's answer."""
    return float(_compile_pattern(task).fullmatch(answer.strip()) is not None)


def _compile_pattern(task: Task) -> re.Pattern[str]:
    try:
        return re.compile(task.answer)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(task.answer_label, task.answer[:80], f"give a regular expression: {error}") from error


def grade_literal(task: Task, answer: str) -> float:
    """Return 1.0 if both are Python literals of equal value, such as `{'a': [1, 2]}`. Nothing is executed."""
    reference = _read_literal(task)
    try:
        return float(ast.literal_eval(answer.strip()) == reference)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return 0.0


def _read_literal(task: Task) -> object:
    try:
        value: object = ast.literal_eval(task.answer.strip())
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(task.answer_label, task.answer[:80], f"give a Python literal: {error}") from error
    return value


SHIPPED: Mapping[str, JudgeFn] = {"math": grade_symbolic, "regex": grade_pattern, "literal": grade_literal}
_CHECKS: Mapping[str, Callable[[Task], object]] = {
    "math": _read_formula,
    "regex": _compile_pattern,
    "literal": _read_literal,
}


@lru_cache(maxsize=64)
def load_judge(name: str) -> JudgeFn:
    """Import the judge with that name.

    Raises:
        ConfigError: the judge cannot be imported, or is not a function.
        UserCodeError: its module raised while it was imported.
    """
    if name in SHIPPED:
        if name == "math":
            _import_formulas()
        return SHIPPED[name]
    attribute = import_attribute("judge", name)
    if not callable(attribute):
        raise ConfigError("judge", name, "it is not a function")
    judge: JudgeFn = attribute
    return judge


def _import_formulas() -> ModuleType:
    # The import takes a second and loads sympy, so only a process that grades with it pays.
    try:
        return importlib.import_module("repl_rl.judges.math_judge")
    except ImportError as error:
        remedy = f"it needs the package math-verify (pip install math-verify): {error}"
        raise ConfigError("judge", "math", remedy) from error


def takes_rollout(judge: JudgeFn) -> bool:
    """Return True for a judge that takes a third argument, the rollout."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(judge).parameters.values()
    except ValueError:
        # A C function may have no signature.
        return False
    return len([p for p in parameters if p.kind in kinds and p.default is p.empty]) > 2


def find_check(name: str, judge: JudgeFn) -> Callable[[Task], object] | None:
    """Return the judge's check of a reference answer, its attribute `check`, or None if it has none.

    The check raises ValueError for an answer that the judge cannot read.
    """
    check = _CHECKS.get(name) or getattr(judge, "check", None)
    return check if callable(check) else None


def check_reference(name: str, judge: JudgeFn, task: Task) -> None:
    """Let a judge read the task's reference answer.

    Raises:
        ConfigError: the judge cannot read it.
    """
    try:
        (find_check(name, judge) or bool)(task)
    except ValueError as error:
        raise ConfigError(task.answer_label, task.answer[:80], f"judge {name} cannot read it: {error}") from error


def handle_request(request: JudgeRequest) -> JudgeReply:
    """Grade one answer, or report what is wrong with the judge."""
    name, task = request["judge"], request["task"]
    subject = f"judge {name}: on task {task.id if task else None} it"
    try:
        judge = load_judge(name)
        with_rollout = takes_rollout(judge)
        if task is None:
            return JudgeReply(value=float(ROLLOUTS * with_rollout + CHECKS * (find_check(name, judge) is not None)))
        # A check of the reference answer needs no grading.
        if request["check"]:
            check_reference(name, judge, task)
            return JudgeReply(value=1.0)
        value = judge(task, request["answer"], *[request["trajectory"]] * with_rollout)
    except ConfigError as error:
        return JudgeReply(refused=(error.thing, str(error.value), error.remedy))
    except MemoryError:
        return JudgeReply(overran="it ran out of memory")
    except UserCodeError as error:
        return JudgeReply(raised=str(error))
    except Exception as error:
        return JudgeReply(raised=f"{subject} raised {error!r}; correct it")
    if not isinstance(value, int | float) or not math.isfinite(value):
        return JudgeReply(raised=f"{subject} returned {value!r:.200}; return a finite number")
    return JudgeReply(value=float(value))


def main(fd: int, memory_mb: int) -> None:
    """Serve the socket `fd` with at most `memory_mb` MiB of address space, until the other side closes it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    # Write no core dump, and bound the memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    with Connection(fd) as channel:
        while True:
            try:
                request: JudgeRequest = pickle.loads(channel.recv_bytes())
            except EOFError:
                return
            sys.path[:] = request["path"]
            # The folder may have been removed since.
            with suppress(OSError):
                os.chdir(request["folder"])
            _limit_cpu(request["cpu_s"])
            reply = handle_request(request)
            channel.send_bytes(json.dumps(reply).encode())
            if "overran" in reply:
                # After a failed allocation, the state of the process cannot be trusted.
                return


def _limit_cpu(seconds: float) -> None:
    """Allow `seconds` of CPU time from now on. Then SIGXCPU ends the process, even if no other process can kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


# Pool of processes


@dataclass(frozen=True, slots=True)
class JudgeLimits:
    """Limits of judges that run outside this process."""

    timeout_s: float = 5.0
    """Wall clock time per answer, seconds (> 0). Then the process is killed and the answer is wrong."""
    import_s: float = 60.0
    """Wall clock time for starting a process and importing a judge, seconds (> 0)."""
    memory_mb: int = 2048
    """Address space per process, MiB (>= 256)."""
    processes: int = 2
    """Largest number of processes (>= 1). Each starts when it is first needed."""

    def __post_init__(self) -> None:
        for name, floor in (("timeout_s", 0.0), ("import_s", 0.0), ("memory_mb", 255), ("processes", 0)):
            if not getattr(self, name) > floor:
                raise ConfigError(f"judge limit {name}", getattr(self, name), f"give a number greater than {floor}")


class _LimitExceeded(Exception):
    """A limit ended the process. The message completes a sentence about the judge."""


class _JudgeProcess:
    """One limited process and the judges it has imported. It is not forked, so it holds nothing of this process."""

    def __init__(self, memory_mb: int) -> None:
        self.is_alive = True
        self.loaded_judges: dict[str, int] = {}
        """Sum of `ROLLOUTS` and `CHECKS` per judge, if it has them."""
        # The process is a new interpreter, which gets one end of the socket.
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
            program = f"from repl_rl.judges.judge_subprocess import main; main({theirs.fileno()}, {memory_mb})"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self._channel = Connection(ours.detach())

    def send_request(self, request: JudgeRequest, timeout_s: float) -> float:
        """Return the judge's value. A process that did not reply is killed, because its state is unknown.

        Raises:
            _LimitExceeded: the judge took too long, or its process ended.
            ConfigError, UserCodeError: reported by the process.
        """
        # Any failure to get a reply kills the process.
        try:
            self._channel.send_bytes(pickle.dumps(request))
            if not self._channel.poll(timeout_s):
                raise _LimitExceeded(f"it took longer than {timeout_s:g} s")
            reply: JudgeReply = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError) as error:
            self.kill()
            raise _LimitExceeded("its process died") from error
        except BaseException:
            self.kill()
            raise
        # Translate the reply.
        if "overran" in reply:
            self.kill()
            raise _LimitExceeded(reply["overran"])
        if "refused" in reply:
            raise ConfigError(*reply["refused"])
        if "raised" in reply:
            raise UserCodeError(reply["raised"])
        return reply["value"]

    def kill(self) -> None:
        """Kill the process with everything that it started."""
        self.is_alive = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()


class JudgeProcesses:
    """Pool of a few limited processes. Any thread may call it; callers wait while all processes are busy."""

    def __init__(self, limits: JudgeLimits | None = None) -> None:
        self.limits = limits or JudgeLimits()
        # Last in, first out: a second process starts only when the first one is busy.
        self._slots: queue.LifoQueue[_JudgeProcess | None] = queue.LifoQueue()
        for _ in range(self.limits.processes):
            self._slots.put(None)

    def load(self, judge: str) -> bool:
        """Import a judge, so that a bad name is refused before a run. Return True if the judge takes rollouts.

        Raises:
            ConfigError: the judge cannot be imported within `import_s`, or is not a function.
            UserCodeError: its module raised.
        """
        with self._lease_process(judge) as process:
            return bool(process.loaded_judges[judge] & ROLLOUTS)

    def check(self, judge: str, task: Task) -> bool:
        """Let a judge read a task's reference answer. Return False if the judge has no check.

        Raises:
            ConfigError: the judge cannot read it within its limits; or see `load`.
            UserCodeError: its check raised an exception other than ValueError.
        """
        with self._lease_process(judge) as process:
            if not process.loaded_judges[judge] & CHECKS:
                return False
            try:
                process.send_request(
                    _build_request(judge, self.limits.timeout_s, task, check=True), self.limits.timeout_s
                )
            except _LimitExceeded as overrun:
                remedy = f"judge {judge} cannot read it: {overrun}"
                raise ConfigError(task.answer_label, task.answer[:80], remedy) from overrun
        return True

    def grade(self, judge: str, task: Task, answer: str | None, trajectory: Trajectory | None = None) -> float:
        """Return the outcome reward. An answer that the judge cannot grade within its limits is worth 0.0.

        Raises:
            ConfigError: the judge cannot read the task's reference answer; or see `load`.
            UserCodeError: the judge raised, or returned something that is not a finite number.
        """
        with self._lease_process(judge) as process:
            try:
                return process.send_request(
                    _build_request(judge, self.limits.timeout_s, task, answer, trajectory), self.limits.timeout_s
                )
            except _LimitExceeded as overrun:
                _LOGGER.warning("judge %s on task %s: %s; the answer counts as wrong", judge, task.id, overrun)
                return 0.0

    def close(self) -> None:
        """Kill all processes, each as soon as it is free. New ones start when they are needed."""
        for slot in [self._slots.get() for _ in range(self.limits.processes)]:
            if slot is not None:
                slot.kill()
            self._slots.put(None)

    @contextmanager
    def _lease_process(self, judge: str) -> Iterator[_JudgeProcess]:
        """Lease a process that has imported the judge."""
        process = self._slots.get()
        try:
            process = process or _JudgeProcess(self.limits.memory_mb)
            if judge not in process.loaded_judges:
                features = process.send_request(_build_request(judge, self.limits.import_s), self.limits.import_s)
                process.loaded_judges[judge] = int(features)
            yield process
        except _LimitExceeded as overrun:
            raise ConfigError("judge", judge, f"it cannot be imported: {overrun}") from overrun
        finally:
            # None keeps the slot of a process that was killed; a later lease starts a new one.
            self._slots.put(process if process is not None and process.is_alive else None)
