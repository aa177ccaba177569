"""Descendants of a process, and the end of a process with its parent."""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LOOK_S = 0.5


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                # The process has just ended.
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, left = list[int](), [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def end_now(pids: Iterable[int]) -> None:
    """End processes with SIGKILL, and reap those that are children of this process."""
    doomed = tuple(pids)
    for pid in doomed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in doomed:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def end_with_parent() -> None:
    """Make this process exit at once and silently when its parent process ends."""
    parent = os.getppid()

    def watch() -> None:
        # An orphan gets another parent.
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
