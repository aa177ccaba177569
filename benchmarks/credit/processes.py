"""Worker processes: each has one engine and plays one job after the other."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

from benchmarks.credit.jobs import Job
from benchmarks.credit.rows import Row
from benchmarks.credit.settings import Settings
from repl_rl.engine.vllm_subprocess import set_environment
from repl_rl.errors import ReplRLError
from repl_rl.utils.stop_signals import handle_stop_signals

ONE_CORE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_POLL_S = 1.0
_END_S = 30.0


class Processes:
    """Worker pool with processes of one core each. Open it with `started`."""

    def __init__(self, processes: list[BaseProcess], given: "Queue[Job | None]", made: "Queue[Row | str]") -> None:
        self.places = len(processes)
        self._processes = processes
        self._given = given
        self._made = made

    def give(self, job: Job) -> None:
        """See `Players.give`."""
        self._given.put(job)

    def take(self) -> Row:
        """See `Players.take`."""
        while True:
            try:
                made = self._made.get(timeout=_POLL_S)
            # Without this check, `take` would wait forever for a dead worker.
            except Empty:
                if not all(process.is_alive() for process in self._processes):
                    raise ReplRLError("a worker's process is gone; what it finished is kept, so run it again") from None
                continue
            if isinstance(made, str):
                raise ReplRLError(f"a worker failed: {made}")
            return made

    def stop(self) -> None:
        """Terminate every process; each stops its job as at SIGTERM."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()

    def close(self) -> None:
        """Let every process finish its job, and terminate those that do not end."""
        for _ in self._processes:
            self._given.put(None)
        for process in self._processes:
            if process.pid is None:
                # An earlier process failed to start, so this one was never started.
                continue
            process.join(_END_S)
            if process.is_alive():
                process.terminate()
                process.join()


@contextmanager
def started(count: int, settings: Settings, out: Path) -> Iterator[Processes]:
    """Start `count` (>= 1) worker processes; end them with the block."""
    # A fork would copy the locks of the caller's threads.
    context = get_context("spawn")
    given: Queue[Job | None] = context.Queue()
    made: Queue[Row | str] = context.Queue()
    processes = [context.Process(target=_work, args=(given, made, settings, out)) for _ in range(count)]
    players = Processes(list(processes), given, made)
    try:
        with set_environment(ONE_CORE):
            for process in processes:
                process.start()
        yield players
    except KeyboardInterrupt:
        # A signal to this process alone does not reach the workers.
        players.stop()
        raise
    finally:
        players.close()


def _work(given: "Queue[Job | None]", made: "Queue[Row | str]", settings: Settings, out: Path) -> None:
    # Import here, because torch takes seconds and reads its environment at import.
    from benchmarks.credit.worker import opened

    try:
        with handle_stop_signals(), opened(settings, out) as worker:
            while (job := _next(given)) is not None:
                made.put(worker.play(job))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        made.put(f"{error!r}\n{traceback.format_exc()}")


def _next(given: "Queue[Job | None]") -> Job | None:
    """Return the next job, or None if no job is left or the parent process has died."""
    while True:
        try:
            return given.get(timeout=_POLL_S)
        except Empty:
            parent = parent_process()
            if parent is not None and not parent.is_alive():
                return None
