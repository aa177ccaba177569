"""vLLM's process, without an import of vLLM: log level, environment variables, watchdog and sleep mode.

- log level and progress bars
- environment variables, set for a block and then restored
- the watchdog, which kills a process that hangs or is stopped, since the host would wait forever
- sleep mode, which leaves vLLM's GPU memory to the trainer during an update

The module is separate from `vllm_engine` and `vllm_worker_extension`, so that its tests run without vLLM.
"""

import asyncio
import importlib
import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Protocol

from repl_rl.utils.atomic_files import open_private_folder

log = logging.getLogger(__name__)

QUIET = "ERROR"
"""Level of vLLM's log, unless the user sets another one."""
_LEVEL_AT_IMPORT = os.environ.get("VLLM_LOGGING_LEVEL", QUIET)
USER_LOG_LEVEL = "" if _LEVEL_AT_IMPORT == QUIET else _LEVEL_AT_IMPORT
"""Log level that the user has set; "" if none. It is read once, at import, since another thread may set the variable
later within a block.

The quiet level does not count as the user's choice. TRL sets it at import, and processes inherit it from there.
"""

_LONGEST_FOLDER = 60
"""Maximum length of a socket folder's path, bytes. A longer one would exceed the limit of 107 bytes per socket path."""
_ENVIRONMENT_LOCK = threading.RLock()
"""Lock of `set_environment`. Two blocks that overlap would each restore the values of the other."""

SILENCE_S = 120.0
"""Seconds that the process may take no CPU time while calls wait for it. This is far longer than a slow disk read."""
_CHECKS = 20
"""Number of checks within the allowed time."""


def get_log_variables() -> Mapping[str, str]:
    """Return the variables that vLLM and torch read at import. A VLLM_LOGGING_LEVEL of the user is kept."""
    if USER_LOG_LEVEL:
        return {"VLLM_LOGGING_LEVEL": USER_LOG_LEVEL, "VLLM_NO_USAGE_STATS": "1"}
    return {
        "VLLM_LOGGING_LEVEL": QUIET,
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def set_vllm_log_level() -> None:
    """Set the level of `get_log_variables` on vLLM's logger.

    Call it before vLLM is imported, since vLLM logs before it reads its variable.
    """
    logging.getLogger("vllm").setLevel(get_log_variables()["VLLM_LOGGING_LEVEL"])


def disable_tqdm_semaphores() -> None:
    """Give tqdm's bars a lock that only this process uses. Call it before the first bar.

    tqdm's default lock includes a named semaphore. The host's resource tracker reports it as leaked if this process
    exits without cleanup. Bars of one process do not need it.
    """
    importlib.import_module("tqdm.std").tqdm.set_lock(threading.RLock())


@contextmanager
def set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, then restore all of them, including those that vLLM set.

    vLLM leaves LD_PRELOAD and thread counts behind, which the consoles' processes would inherit. A block waits for that
    of another thread, so call it in a worker thread.
    """
    with _ENVIRONMENT_LOCK:
        before = dict(os.environ)
        os.environ.update(values)
        try:
            yield
        finally:
            # Remove variables that were added in the block, then restore the others.
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def get_preload_variables(packages: Path) -> Mapping[str, str]:
    """Return paths without spaces for the libraries that vLLM preloads on CPU, or nothing if its path has no space.

    vLLM writes paths into LD_PRELOAD, in which a space or a colon separates two paths. It keeps paths that are already
    there.
    """
    if not re.search(r"[\s:]", str(packages)):
        return {}
    # One version of each library is enough; the alias has no space.
    openmp = [*packages.glob("torch.libs/libgomp*.so*"), *packages.glob("torch/lib/libgomp*.so*")]
    allocator = [*packages.glob("vllm/libs/libtcmalloc*.so*")]
    libraries = [make_short_alias(packages) / path.relative_to(packages) for path in (*openmp[:1], *allocator[:1])]
    return {"LD_PRELOAD": ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), *map(str, libraries)])}


@contextmanager
def open_socket_folder() -> Iterator[Mapping[str, str]]:
    """Create a folder for vLLM's sockets, and yield the variable with its short path.

    vLLM leaves its sockets behind. The folder is private to this process and is removed at the end.
    """
    root = Path(tempfile.gettempdir())
    with open_private_folder(root, "repl-rl-sockets-") as folder:
        # Linux refuses a socket whose path is too long.
        short_root = root if len(os.fsencode(folder)) <= _LONGEST_FOLDER else make_short_alias(root)
        yield {"VLLM_RPC_BASE_PATH": str(short_root / folder.name)}


@cache
def make_short_alias(folder: Path) -> Path:
    """Return a short path without spaces for a folder.

    This process and its children can use it while this process lives.
    """
    # The descriptor stays open, so the path stays valid.
    return Path(f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")


class PendingCalls:
    """Counter of the calls that wait for vLLM's process."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count one more call during the block."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


async def kill_when_silent(processes: Sequence[int], pending: PendingCalls, silence_s: float) -> None:
    """Watch vLLM's processes. Kill them once calls wait and they take no CPU time for `silence_s` seconds.

    vLLM then notices the death as any other. Runs until it is cancelled or has killed the processes. A long prefill
    takes CPU time, even if a GPU computes it, so it is never interrupted.
    """
    cpu_ticks, since_s = _read_cpu_ticks(processes), time.monotonic()
    while True:
        await asyncio.sleep(silence_s / _CHECKS)
        now = _read_cpu_ticks(processes)
        # No call waits, or the processes made progress: restart the clock.
        if not pending.count or now != cpu_ticks:
            cpu_ticks, since_s = now, time.monotonic()
        elif time.monotonic() - since_s >= silence_s:
            log.error("vLLM's process made no progress for %g s; it is killed", silence_s)
            for process in processes:
                _kill_process(process)
            return


def _read_cpu_ticks(processes: Sequence[int]) -> int:
    """Return the CPU time of processes and their threads in kernel ticks; a process that is gone counts 0."""
    total = 0
    for process in processes:
        try:
            # The program name may hold spaces, so split behind its closing parenthesis (proc(5)).
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Fields utime and stime.
        total += int(fields[11]) + int(fields[12])
    return total


def _kill_process(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


class SleepableLLM(Protocol):
    """Methods of `AsyncLLM` for its sleep mode."""

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self) -> object: ...


class SleepMode:
    """Sleep state of one vLLM; repeated calls have no effect.

    Sleep of level 1 moves weights to the host's memory and drops keys and values.
    """

    def __init__(self, llm: SleepableLLM, enabled: bool) -> None:
        """Take vLLM, awake. False as `enabled` disables both methods."""
        self._llm = llm
        self._enabled = enabled
        self._asleep = False
        self._lock = asyncio.Lock()

    async def enter(self) -> None:
        """Put vLLM to sleep. No session may be open."""
        async with self._lock:
            if self._enabled and not self._asleep:
                await self._llm.sleep(level=1)
                self._asleep = True

    async def wake(self) -> None:
        """Wake vLLM, if it sleeps."""
        async with self._lock:
            if self._asleep:
                await self._llm.wake_up()
                self._asleep = False
