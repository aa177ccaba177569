"""Related processes: ranks of a distributed run, descendants of a process, and its parent.

`torchrun` and `accelerate launch` start the ranks together, and describe them in environment variables.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Environment variables of the launchers. A child process that is not one of their ranks must not inherit them."""
_PARENT_CHECK_S = 0.5
"""Interval between two checks for the parent process, seconds."""


def get_rank() -> int:
    """Return the rank of this process; 0 is the first, or the only one."""
    return int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Return the number of processes on this machine that were started together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def choose_gpu(visible: int) -> int:
    """Return the index of this process's GPU among `visible` (>= 1) ones. Its trainer and its engine use that GPU.

    As in accelerate, the processes of one machine take GPUs in order. A process that sees only one GPU takes that one.
    """
    return int(os.environ.get("LOCAL_RANK", "0")) % visible


def list_descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of a process."""
    # Read the parent of every process from /proc.
    children_of: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                # The process has just ended.
                continue
            children_of.setdefault(parent, []).append(int(entry.name))
    # Follow the children from `pid` downwards.
    descendants, pending = list[int](), [pid]
    while pending:
        children = children_of.get(pending.pop(), [])
        descendants += children
        pending += children
    return descendants


def kill_processes(pids: Iterable[int]) -> None:
    """End processes with SIGKILL, and reap those that are children of this process."""
    targets = tuple(pids)
    for pid in targets:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in targets:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def exit_with_parent() -> None:
    """Make this process exit at once and silently when its parent process ends."""
    parent = os.getppid()

    def watch_parent() -> None:
        # An orphan gets another parent.
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True, name="parent").start()
