"""Ends vLLM's process where it stands still: stopped, or hanging. Its host would wait for it for ever.

A long prefill takes CPU time, also where a GPU computes it, and is left alone however long it takes.
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
"""How long the process may stand still while it is waited for, seconds: far longer than a disk that is slow to read."""
_LOOKS = 20
"""How often the process is looked at in the time that it may stand still."""


class Waiting:
    """Counts the calls that wait for vLLM's process."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call more, for the length of the block."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1


async def end_where_silent(processes: Sequence[int], waiting: Waiting, silence_s: float) -> None:
    """Look at vLLM's processes for ever; kill them once they are waited for and take no CPU time for `silence_s`.

    vLLM then notices the death as any other.
    """
    used, since_s = _cpu_ticks(processes), time.monotonic()
    while True:
        await asyncio.sleep(silence_s / _LOOKS)
        now = _cpu_ticks(processes)
        if not waiting.count or now != used:
            used, since_s = now, time.monotonic()
        elif time.monotonic() - since_s >= silence_s:
            log.error("vLLM's process stood still for %g s; it is ended", silence_s)
            for process in processes:
                _kill(process)
            return


def _cpu_ticks(processes: Sequence[int]) -> int:
    """CPU time of processes and their threads, in ticks of the kernel; 0 of one that is gone."""
    total = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
