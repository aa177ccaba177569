"""Limited processes for judges that are not trusted with this process. One that exceeds a limit is killed."""

import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.judges.worker import CHECKS, ROLLOUTS, Reply, Request
from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Task

_LOGGER = logging.getLogger(__name__)
_ROOT = Path(__file__).resolve().parents[2]


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


class _Overrun(Exception):
    """A limit ended the process. The message completes a sentence about the judge."""


class _Process:
    """One limited process and the judges it has imported. It is not forked, so it holds nothing of this process."""

    def __init__(self, memory_mb: int) -> None:
        self.alive = True
        self.loaded: dict[str, int] = {}
        """Sum of `ROLLOUTS` and `CHECKS` per judge, if it has them."""
        # The process is a new interpreter, which gets one end of the socket.
        ours, theirs = socket.socketpair()
        with theirs:
            path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
            program = f"from repl_rl.judges.worker import main; main({theirs.fileno()}, {memory_mb})"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self._channel = Connection(ours.detach())

    def ask(self, request: Request, timeout_s: float) -> float:
        """Return the judge's value. A process that did not reply is killed, because its state is unknown.

        Raises:
            _Overrun: the judge took too long, or its process ended.
            ConfigError, UserCodeError: reported by the process.
        """
        try:
            # Any failure to get a reply kills the process.
            self._channel.send_bytes(pickle.dumps(request))
            if not self._channel.poll(timeout_s):
                raise _Overrun(f"it took longer than {timeout_s:g} s")
            reply: Reply = json.loads(self._channel.recv_bytes())
        except (EOFError, OSError) as error:
            self.kill()
            raise _Overrun("its process died") from error
        except BaseException:
            self.kill()
            raise
        if "overran" in reply:
            self.kill()
            raise _Overrun(reply["overran"])
        if "refused" in reply:
            raise ConfigError(*reply["refused"])
        if "raised" in reply:
            raise UserCodeError(reply["raised"])
        return reply["value"]

    def kill(self) -> None:
        """Kill the process with everything that it started."""
        self.alive = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()


class JudgeProcesses:
    """Pool of a few limited processes. Any thread may call it; callers wait while all processes are busy."""

    def __init__(self, limits: JudgeLimits | None = None) -> None:
        self.limits = limits or JudgeLimits()
        # Last in, first out: a second process starts only when the first one is busy.
        self._places: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(self.limits.processes):
            self._places.put(None)

    def load(self, judge: str) -> bool:
        """Import a judge, so that a bad name is refused before a run. Return True if the judge takes rollouts.

        Raises:
            ConfigError: the judge cannot be imported within `import_s`, or is not a function.
            UserCodeError: its module raised.
        """
        with self._leased(judge) as process:
            return bool(process.loaded[judge] & ROLLOUTS)

    def check(self, judge: str, task: Task) -> bool:
        """Let a judge read a task's reference answer. Return False if the judge has no check.

        Raises:
            ConfigError: the judge cannot read it within its limits; or see `load`.
            UserCodeError: its check raised an exception other than ValueError.
        """
        with self._leased(judge) as process:
            if not process.loaded[judge] & CHECKS:
                return False
            try:
                process.ask(_request(judge, self.limits.timeout_s, task, check=True), self.limits.timeout_s)
            except _Overrun as overrun:
                remedy = f"judge {judge} cannot read it: {overrun}"
                raise ConfigError(task.reference, task.answer[:80], remedy) from overrun
        return True

    def grade(self, judge: str, task: Task, answer: str | None, trajectory: Trajectory | None = None) -> float:
        """Return the outcome reward. An answer that the judge cannot grade within its limits is worth 0.0.

        Raises:
            ConfigError: the judge cannot read the task's reference answer; or see `load`.
            UserCodeError: the judge raised, or returned something that is not a finite number.
        """
        with self._leased(judge) as process:
            try:
                return process.ask(
                    _request(judge, self.limits.timeout_s, task, answer, trajectory), self.limits.timeout_s
                )
            except _Overrun as overrun:
                _LOGGER.warning("judge %s on task %s: %s; the answer counts as wrong", judge, task.id, overrun)
                return 0.0

    def close(self) -> None:
        """Kill all processes, each as soon as it is free. New ones start when they are needed."""
        for place in [self._places.get() for _ in range(self.limits.processes)]:
            if place is not None:
                place.kill()
            self._places.put(None)

    @contextmanager
    def _leased(self, judge: str) -> Iterator[_Process]:
        """Lease a process that has imported the judge."""
        process = self._places.get()
        try:
            process = process or _Process(self.limits.memory_mb)
            if judge not in process.loaded:
                more = process.ask(_request(judge, self.limits.import_s), self.limits.import_s)
                process.loaded[judge] = int(more)
            yield process
        except _Overrun as overrun:
            raise ConfigError("judge", judge, f"it cannot be imported: {overrun}") from overrun
        finally:
            # None keeps the place of a process that was killed; a later lease starts a new one.
            self._places.put(process if process is not None and process.alive else None)


def _request(
    judge: str,
    cpu_s: float,
    task: Task | None = None,
    answer: str | None = None,
    trajectory: Trajectory | None = None,
    check: bool = False,
) -> Request:
    here = os.getcwd()
    path = [folder or here for folder in sys.path]
    # A judge does not need the initial content of the console, which may be large.
    bare = None if task is None else replace(task, workspace=None)
    return Request(
        judge=judge, task=bare, check=check, answer=answer, trajectory=trajectory, path=path, folder=here, cpu_s=cpu_s
    )
