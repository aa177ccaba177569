"""Judges that must not be trusted with this process run in a few limited ones, and are killed when they overrun."""

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
    """What judges outside this process may use."""

    timeout_s: float = 5.0
    """Wall clock of one answer, seconds (> 0); then the process is killed and the answer is wrong."""
    import_s: float = 60.0
    """Wall clock of starting a process and importing a judge, seconds (> 0)."""
    memory_mb: int = 2048
    """Address space of one process, MiB (>= 256)."""
    processes: int = 2
    """Processes at most (>= 1); each is started when it is first needed."""

    def __post_init__(self) -> None:
        for name, floor in (("timeout_s", 0.0), ("import_s", 0.0), ("memory_mb", 255), ("processes", 0)):
            if not getattr(self, name) > floor:
                raise ConfigError(f"judge limit {name}", getattr(self, name), f"give a number greater than {floor}")


class _Overrun(Exception):
    """A limit ended the process. The message is the rest of a sentence about the judge."""


class _Process:
    """One limited process and what was imported in it. It is never forked: nothing of this process is inside."""

    def __init__(self, memory_mb: int) -> None:
        self.alive = True
        self.loaded: dict[str, int] = {}
        """By judge, the sum of `ROLLOUTS` and `CHECKS` where it has them."""
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
        """The judge's value. A process that did not reply is killed: its state is unknown.

        Raises:
            _Overrun: it took too long, or ended.
            ConfigError, UserCodeError: what it replied.
        """
        try:
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
        """End it with whatever it started."""
        self.alive = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()


class JudgeProcesses:
    """A few limited processes that take turns. Any thread may call; more callers than processes wait."""

    def __init__(self, limits: JudgeLimits | None = None) -> None:
        self.limits = limits or JudgeLimits()
        # Last in, first out: a second process is only started when the first one is busy.
        self._places: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(self.limits.processes):
            self._places.put(None)

    def load(self, judge: str) -> bool:
        """Import a judge, so that a bad name is refused before a run. True: it looks at rollouts.

        Raises:
            ConfigError: it cannot be imported within `import_s`, or it is no function.
            UserCodeError: its module raised.
        """
        with self._leased(judge) as process:
            return bool(process.loaded[judge] & ROLLOUTS)

    def check(self, judge: str, task: Task) -> bool:
        """Have a judge read a task's reference answer. False: it checks none.

        Raises:
            ConfigError: it cannot read it within its limits, or as `load`.
            UserCodeError: its check raised something else than ValueError.
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
        """The outcome reward. An answer that the judge cannot grade within its limits is worth 0.0.

        Raises:
            ConfigError: as `load`, or the task's reference answer is nothing that this judge can read.
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
        """Kill all processes, as soon as each is free. They start again when they are needed."""
        for place in [self._places.get() for _ in range(self.limits.processes)]:
            if place is not None:
                place.kill()
            self._places.put(None)

    @contextmanager
    def _leased(self, judge: str) -> Iterator[_Process]:
        """A process that has imported the judge."""
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
    # What its console began with is not the judge's business, and may be large.
    bare = None if task is None else replace(task, workspace=None)
    return Request(
        judge=judge, task=bare, check=check, answer=answer, trajectory=trajectory, path=path, folder=here, cpu_s=cpu_s
    )
