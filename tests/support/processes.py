"""Processes that a test started, watched from outside."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def wait_for(condition: Callable[[], object], run: subprocess.Popen[bytes] | None, limit_s: float = 200) -> None:
    """Poll for something that another process does; there is nothing to await."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert run is None or run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        signal.sigtimedwait([], 0.05)


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """(pid, start time) of every process below `pid`."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or (found := identity(int(entry.name))) is None:
            continue
        if _parent(found[0]) == pid:
            yield found
            yield from descendants(found[0])


def identity(pid: int) -> tuple[int, str] | None:
    """(pid, start time) of a process that is there; None: it has ended."""
    fields = _stat(pid)
    return (pid, fields[19]) if fields and fields[0] != "Z" else None


def command(pid: int) -> str:
    """How a process was called, or calls itself; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def shared_files(pid: int) -> set[Path]:
    """What a process has mapped of /dev/shm, and the weights that it keeps there."""
    try:
        mapped = Path(f"/proc/{pid}/maps").read_text().split()
    except OSError:
        mapped = []
    found = {Path(word) for word in mapped if word.startswith("/dev/shm/")}
    return found | set(Path("/dev/shm").glob(f"repl_rl-weights-{pid}-*"))


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else -1


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def call_in_new_process(function: Callable[..., None], *arguments: str) -> None:
    """Call a function of a test module in a process that has nothing of other tests: no threads and no descriptors."""
    code = f"import sys; from {function.__module__} import {function.__name__} as call; call(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
