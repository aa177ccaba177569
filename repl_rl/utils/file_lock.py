"""File lock that reserves a folder for one process. The lock ends with that process, even a killed one.

The lock is on the file `.repl-rl` in the folder, which names its owner. Network file systems lock only files that are
open for writing, and a folder never is. If the file system can lock the folder itself, it is locked as well, as in
version 0.2.
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
"""Name of the lock file: JSON with `made_by`, the verb that made the folder, and `pid` and `host` of its last owner."""
_PRIVATE_NAME = re.compile(r"[0-9]+-[a-z0-9_]{8}")
"""Name of a private folder after its prefix: the process id, and what `tempfile` adds."""
_MAX_BYTES = 4096
_held: set[int] = set()
"""File descriptors of the locks that this process holds."""


def _close_inherited_locks() -> None:
    """Close the locks in a forked child, because they would otherwise outlast their owner."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


@contextmanager
def lock_folder(folder: Path, made_by: str = "") -> Iterator[None]:
    """Lock `folder`, which must exist, for this process during the block.

    Args:
        made_by: verb that makes the folder; "" keeps the verb that the lock file names.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the folder or its lock file cannot be opened.
    """
    made_by = made_by or read_maker(folder)
    with ExitStack() as stack:
        # Lock the folder itself, if the file system can.
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(_release_lock, directory)
        _held.add(directory)
        _acquire_lock(directory, required=False)
        # Lock the file in it. A link is not followed and a pipe is not waited for, since others may have put it there.
        file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        stack.callback(_release_lock, file)
        _held.add(file)
        _acquire_lock(file, required=True)
        # The owner may have removed or renamed the folder between the open and the lock.
        if not _is_same_file(folder / OWNER, file):
            raise BlockingIOError
        _write_lock_info(file, {"made_by": made_by, "pid": os.getpid(), "host": socket.gethostname()})
        yield


def _release_lock(descriptor: int) -> None:
    # A process that was forked within the block has closed its copy already.
    if descriptor in _held:
        _held.remove(descriptor)
        os.close(descriptor)


def write_marker(folder: Path, made_by: str) -> None:
    """Record in a new folder which verb makes it, without locking the folder."""
    file = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        _write_lock_info(file, {"made_by": made_by})
    finally:
        os.close(file)


def read_maker(folder: Path) -> str:
    """Return the verb that made `folder`, or "" if the folder does not name it."""
    made_by = _read_lock_info(folder).get("made_by", "")
    return made_by if isinstance(made_by, str) else ""


def is_private(folder: Path, prefix: str) -> bool:
    """Return True if a process of this program made `folder` for itself alone, under a name that begins with `prefix`.

    The name is no proof, because a user may have chosen it. The folder must also hold nothing but a lock file, or its
    lock file must name no command.
    """
    if not _PRIVATE_NAME.fullmatch(folder.name.removeprefix(prefix)) or not folder.name.startswith(prefix):
        return False
    if folder.is_symlink() or not folder.is_dir():
        return False
    # A process may have been killed before it wrote the lock file.
    return _read_lock_info(folder).get("made_by") == "" or all(entry.name == OWNER for entry in folder.iterdir())


def describe_owner(folder: Path) -> str:
    """Return a phrase that names the process that holds `folder`, by pid and host if they are known."""
    info = _read_lock_info(folder)
    pid, host = info.get("pid"), info.get("host")
    if not (isinstance(pid, int) and isinstance(host, str) and re.fullmatch(r"[\w.-]+", host)):
        return "another process"
    return f"process {pid} on {host}"


def is_locked(folder: Path) -> bool:
    """Return True if a process holds the lock of `folder`.

    Raises:
        OSError: the folder or its lock file cannot be opened.
    """
    return _is_file_locked(folder) or ((folder / OWNER).is_file() and _is_file_locked(folder / OWNER))


def _is_file_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _acquire_lock(descriptor: int, required: bool) -> None:
    """Lock an open file or folder for this process alone.

    If the lock is not `required`, it is skipped on file systems that cannot lock this kind of file.
    """
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `_is_file_locked` holds a shared lock for an instant. If this process can share it, no other process owns
            # the folder: try again.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            if required:
                raise
            return
        else:
            return


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_lock_info(descriptor: int, info: Mapping[str, str | int]) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    # Write in place, because a new file would not carry the lock. Another process may read at any time: spaces cover
    # the rest of the old text, so that it never finds an empty file or half of one.
    old_bytes = min(os.fstat(descriptor).st_size, _MAX_BYTES)
    text = json.dumps(info).encode().ljust(old_bytes - 1) + b"\n"
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


def _read_lock_info(folder: Path) -> Mapping[str, object]:
    """Return the content of the lock file, or an empty mapping if it is missing or not readable as ours."""
    try:
        file = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return {}
        info = json.loads(os.pread(file, _MAX_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(file)
    return info if isinstance(info, dict) else {}
