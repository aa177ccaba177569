"""Processes that a process has started, and the one that has started it."""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LOOK_S = 0.5


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, left = list[int](), [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def end_now(pids: Iterable[int]) -> None:
    """End processes with SIGKILL; of this one's own children nothing is left, not even their number."""
    doomed = tuple(pids)
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in doomed:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def end_with_parent() -> None:
    """From now on this process ends, at once and without a word, when the one that has started it does."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
