"""Watchdog that kills vLLM's process if it hangs or is stopped. Without it, the host would wait forever.

A long prefill takes CPU time, even if a GPU computes it, so the watchdog never interrupts it.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)
SILENCE_S = 120.0
"""Seconds that the process may take no CPU time while calls wait for it. This is far longer than a slow disk read."""
_LOOKS = 20
"""Number of checks within the allowed time."""


class Waiting:
    """Counter of the calls that wait for vLLM's process."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more call during the block."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


async def end_where_silent(processes: Sequence[int], waiting: Waiting, silence_s: float) -> None:
    """Watch vLLM's processes. Kill them once calls wait and they take no CPU time for `silence_s` seconds.

    vLLM then notices the death as any other. Runs until it is cancelled or has killed the processes.
    """
    used, since_s = _cpu_ticks(processes), time.monotonic()
    while True:
        await asyncio.sleep(silence_s / _LOOKS)
        now = _cpu_ticks(processes)
        # No call waits, or the processes made progress: restart the clock.
        if not waiting.count or now != used:
            used, since_s = now, time.monotonic()
        elif time.monotonic() - since_s >= silence_s:
            log.error("vLLM's process stood still for %g s; it is ended", silence_s)
            for process in processes:
                _kill(process)
            return


def _cpu_ticks(processes: Sequence[int]) -> int:
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


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
