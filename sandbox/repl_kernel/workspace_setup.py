"""Workspace: values, files, modules and lines that a console starts with.

It is made once, in a process that is then forked for each of its consoles. After a fork, each console has its own
memory, and files are copied. Open files, shared memory, threads and processes would be shared or lost, so a workspace
that leaves any of them is refused.
"""

import base64
import importlib
import json
import linecache
import os
import random
import re
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from repl_kernel.execute_line import ReplConsole

SOURCE = "<workspace>"
"""File name of a workspace's lines in tracebacks."""
_SEEDS = re.compile(r"\bseed\s*\(")
_DEVICES = "/dev/"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class WorkspaceRefused(Exception):
    """Error for a workspace that cannot be made, with the place, the value there, and the problem."""

    def __init__(self, location: str, value: str, problem: str) -> None:
        super().__init__(problem)
        self.location, self.value, self.problem = location, value, problem


@dataclass(frozen=True)
class PreparedWorkspace:
    """Finished workspace, ready to be forked."""

    console: ReplConsole
    folder_fd: int
    """Descriptor of the folder with its files."""
    random_state: tuple[object, ...] | None
    """State of `random` if the lines set a seed: consoles continue from it, and from numpy's. None means new seeds."""


def build_workspace(content: bytes) -> PreparedWorkspace:
    """Make the workspace of `content` in this process and its working folder.

    Raises:
        WorkspaceRefused: it cannot be made.
    """
    parts = json.loads(content)
    descriptors, mappings, thread_count = _list_descriptors(), _list_shared_mappings(), threading.active_count()
    for name, data in parts["files"].items():
        _write_file(name, base64.b64decode(data))
    with _disable_bytecode(), _interrupt_on_cpu_limit():
        for name in parts["preload"]:
            _import_module(name)
        console = ReplConsole()
        console.locals.update(parts["values"])
        source = "\n".join(parts["lines"]) + "\n"
        _run_lines(source, console.locals)
    _check_leftovers(descriptors, mappings, thread_count)
    # Keep the state, because `random` seeds itself again in a forked child.
    state = random.getstate() if _SEEDS.search(source) else None
    return PreparedWorkspace(console, os.open(".", _FOLDER), state)


@contextmanager
def _disable_bytecode() -> Iterator[None]:
    """Prevent `__pycache__` among the files."""
    previous, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = previous


@contextmanager
def _interrupt_on_cpu_limit() -> Iterator[None]:
    """Make the limit of CPU time interrupt a line, as the equal limit of wall clock does, so that an error can name
    it."""
    previous_handler = signal.signal(signal.SIGXCPU, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGXCPU, previous_handler)


def _write_file(name: str, data: bytes) -> None:
    try:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "xb") as file:
            file.write(data)
    except OSError as error:
        raise WorkspaceRefused(
            f"file {name}", f"{len(data)} bytes", f"it cannot be written: {error.strerror}"
        ) from None


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException as error:
        raise WorkspaceRefused("preload", name, f"it cannot be imported: {_format_last_line(error)}") from None


def _run_lines(source: str, namespace: dict[str, object]) -> None:
    """Run the lines as one program."""
    lines = source.splitlines(keepends=True)
    # Let tracebacks show the lines.
    linecache.cache[SOURCE] = (len(source), None, lines, SOURCE)
    try:
        exec(compile(source, SOURCE, "exec", dont_inherit=True), namespace)
    except BaseException as error:
        # The limits of CPU time and of wall clock can be reached together; the first one is reported.
        for limit in (signal.SIGINT, signal.SIGXCPU):
            signal.signal(limit, signal.SIG_IGN)
        number = _find_failed_line(error)
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        problem = (
            "it took too long" if isinstance(error, KeyboardInterrupt) else f"it raises {_format_last_line(error)}"
        )
        raise WorkspaceRefused(f"line {number}", line, problem) from None


def _find_failed_line(error: BaseException) -> int:
    """Return the number, from 1, of the workspace's own line in which it failed. 0 means none of them."""
    entries = traceback.walk_tb(error.__traceback__)
    line_number = next((number for frame, number in entries if frame.f_code.co_filename == SOURCE), 0)
    return line_number or (error.lineno or 0 if isinstance(error, SyntaxError) else 0)


def _format_last_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _list_descriptors() -> Mapping[int, str]:
    """Return the descriptors of this process, and the files that they refer to."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            # The descriptor that listed the others is closed.
            continue
    return descriptors


def _list_shared_mappings() -> set[str]:
    """Return the writable mappings that a fork would share."""
    with open("/proc/self/maps") as maps:
        return {line.split()[0] for line in maps if line.split()[1].startswith("rw") and line.split()[1].endswith("s")}


def _check_leftovers(descriptors: Mapping[int, str], mappings: set[str], thread_count: int) -> None:
    """Reject a workspace that leaves anything that forked consoles would share with siblings, or would miss."""
    location = "what its lines leave behind"
    for number, target in _list_descriptors().items():
        if descriptors.get(number) != target and not target.startswith(_DEVICES):
            raise WorkspaceRefused(location, target, "it is still open, and all consoles would share it: close it")
    if _list_shared_mappings() - mappings:
        raise WorkspaceRefused(location, "shared memory", "all consoles would share it: let it go")
    if threading.active_count() > thread_count:
        raise WorkspaceRefused(
            location, threading.enumerate()[-1].name, "this thread still runs, and no console would have it: join it"
        )
    try:
        # Children that have ended are only reaped.
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
    raise WorkspaceRefused(location, "a process", "it still runs, and no console would see it: end it")


def copy_files(scratch: int) -> None:
    """Copy the files of the folder `scratch` into the working folder."""
    source, target = os.open(".", _FOLDER, dir_fd=scratch), os.open(".", _FOLDER)
    try:
        _copy_folder(source, target)
    finally:
        os.close(source)
        os.close(target)


def _copy_folder(source: int, target: int) -> None:
    with os.scandir(source) as entries:
        sorted_entries: Sequence[os.DirEntry[str]] = sorted(entries, key=lambda entry: entry.name)
    for entry in sorted_entries:
        name, status = entry.name, entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(status.st_mode):
            _copy_file(name, status, source, target)
        elif stat.S_ISDIR(status.st_mode):
            # The final mode may forbid to write into the folder, so set it last.
            os.mkdir(name, 0o700, dir_fd=target)
            source_folder, target_folder = os.open(name, _FOLDER, dir_fd=source), os.open(name, _FOLDER, dir_fd=target)
            _copy_folder(source_folder, target_folder)
            os.fchmod(target_folder, stat.S_IMODE(status.st_mode))
            os.close(source_folder)
            os.close(target_folder)


def _copy_file(name: str, status: os.stat_result, source: int, target: int) -> None:
    source_file = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=source)
    target_file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
    offset = 0
    while count := os.sendfile(target_file, source_file, offset, 1 << 30):
        offset += count
    os.fchmod(target_file, stat.S_IMODE(status.st_mode))
    os.utime(target_file, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.close(source_file)
    os.close(target_file)
