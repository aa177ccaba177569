"""A folder for one process alone. Its lock ends with that process, however it ends.

The lock is on the file `.repl-rl` in the folder, which says who has it: a network file system locks only what is open
for writing, and no folder can be. Where the folder itself can be locked, it is too, as version 0.2 did.
"""

import fcntl
import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

OWNER = ".repl-rl"
"""The file: JSON with `made_by`, the verb that made the folder, and `pid` and `host` of who had it last."""
_MOST_BYTES = 4096
_held: set[int] = set()
"""Descriptors of locks of this process."""


def _drop_held() -> None:
    """Close the locks in a process that was forked from their owner: else they would outlast the owner."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_held)


@contextmanager
def alone(folder: Path, made_by: str = "") -> Iterator[None]:
    """Have `folder`, which must exist, for this process while the block lasts.

    Args:
        made_by: the verb that makes the folder; "": what the folder says already.

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be opened.
    """
    made_by = made_by or maker(folder)
    with ExitStack() as stack:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(_release, directory)
        _held.add(directory)
        _lock(directory, required=False)
        # A link, or a pipe, in a stranger's folder is not followed and not waited for.
        file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        stack.callback(_release, file)
        _held.add(file)
        _lock(file, required=True)
        if not _is_there(folder / OWNER, file):  # its owner has removed or renamed the folder meanwhile
            raise BlockingIOError
        _write(file, {"made_by": made_by, "pid": os.getpid(), "host": socket.gethostname()})
        yield


def _release(descriptor: int) -> None:
    if descriptor in _held:  # not in a process that was forked within the block
        _held.remove(descriptor)
        os.close(descriptor)


def mark(folder: Path, made_by: str) -> None:
    """Say in a new folder which verb makes it; nobody has it for itself."""
    file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _write(file, {"made_by": made_by})
    finally:
        os.close(file)


def maker(folder: Path) -> str:
    """The verb that made `folder`; "": the folder does not say."""
    made_by = _said(folder).get("made_by", "")
    return made_by if isinstance(made_by, str) else ""


def owner(folder: Path) -> str:
    """The process that has `folder`, in words, by its number and host."""
    said = _said(folder)
    pid, host = said.get("pid"), said.get("host")
    if not (isinstance(pid, int) and isinstance(host, str) and re.fullmatch(r"[\w.-]+", host)):
        return "another process"
    return f"process {pid} on {host}"


def has_owner(folder: Path) -> bool:
    """Whether a process has `folder` for itself.

    Raises:
        OSError: it cannot be opened.
    """
    return _is_locked(folder) or ((folder / OWNER).is_file() and _is_locked(folder / OWNER))


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, required: bool) -> None:
    """Lock it. One that is not `required` stays unlocked where the file system locks nothing of its kind."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever only looks shares the lock for an instant, and is no owner: where we may share it too, try again.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            if required:
                raise
            return
        else:
            return


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write(descriptor: int, said: Mapping[str, str | int]) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    os.ftruncate(descriptor, 0)  # the file must stay the one that is locked, so no other takes its place
    os.pwrite(descriptor, (json.dumps(said) + "\n").encode(), 0)


def _said(folder: Path) -> Mapping[str, object]:
    """What the file says; nothing where there is none, or none of ours."""
    try:
        file = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return {}
        said = json.loads(os.pread(file, _MOST_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(file)
    return said if isinstance(said, dict) else {}
