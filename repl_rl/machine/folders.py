"""Folders that belong to one process, and folders that are written atomically."""

import ctypes
import errno
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.alone import OWNER, alone, is_private, mark
from repl_rl.machine.outputs import UNFINISHED, Output, clear, followed
from repl_rl.machine.refused import writing

log = logging.getLogger(__name__)
_TORN = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]+)\.unfinished", re.DOTALL)
"""Name of an unfinished file of `files.whole_file`."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_START_FIELD = 19
"""Field of /proc/PID/stat behind the program name: start time of the process, in clock ticks after boot (proc(5))."""
_CLOCKS_S = 1.0
"""Largest difference between the clocks of processes and of files, seconds."""
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a kernel or file system without RENAME_EXCHANGE."""
_SOCKET_ADDRESS_BYTES = 107
"""Longest path that is the address of a Unix socket (unix(7))."""


def folder_for_sockets(name_bytes: int) -> Path:
    """Return the folder of temporary files, or /tmp if the addresses of sockets in it would be too long.

    Args:
        name_bytes: length of the longest path of a socket below the folder, bytes.
    """
    usual = Path(tempfile.gettempdir())
    fits = len(os.fsencode(usual)) + len("/") + name_bytes <= _SOCKET_ADDRESS_BYTES
    return usual if fits else Path("/tmp")


@contextmanager
def private_folder(root: Path, prefix: str) -> Iterator[Path]:
    """Create a folder in `root` that only this process uses, and remove it at the end.

    Folders that killed processes left behind are removed first. The lock file proves that this program made a folder:
    it is the first file in it, and the last one that is removed.
    """
    remove_left_folders(root, prefix)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=root) as folder,
        alone(Path(folder)),
    ):
        try:
            yield Path(folder)
        finally:
            # The rest is removed with the folder.
            with suppress(OSError):
                clear(Path(folder))


def remove_left_folders(root: Path, prefix: str = UNFINISHED) -> None:
    """Remove the private folders in `root` that killed processes left behind. Their locks ended with them.

    A folder without the lock file of this program stays, because a user may have made it. A process of another
    container that shares `root` has no pid here, but it holds its lock.
    """
    for left in root.glob(f"{prefix}*"):
        with suppress(OSError):
            if not is_private(left, prefix):
                continue
            pid = int(left.name.removeprefix(prefix).partition("-")[0])
            if not _may_own(pid, left):
                with alone(left):
                    # The lock file goes last: if this process is killed, the next one still knows the folder.
                    clear(left)
                    shutil.rmtree(left, ignore_errors=True)


def remove_left_files(root: Path, output: Output) -> None:
    """Remove the unfinished files (`files.whole_file`) below `root` that killed processes left behind.

    At the top of `root` these are only files that the verb of `output` writes, because others are the user's.
    """
    for left in [*root.rglob(".*.unfinished")]:
        name = _TORN.fullmatch(left.name)
        if name is None or left.is_symlink() or not left.is_file():
            continue
        ours = left.parent != root or any(fnmatchcase(name["name"], pattern) for pattern in output.entries)
        if ours and not _may_own(int(name["pid"]), left):
            left.unlink(missing_ok=True)


@contextmanager
def whole_folder(final: Path, replaces: Output | None = None) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `final` if the block succeeds.

    Otherwise nothing of it is left, and the parents that were created for it are removed.

    Args:
        final: path of the finished folder.
        replaces: kind of the folder. It replaces an older folder of that kind, also behind a link. With None, the first
            of two concurrent writers wins.

    Raises:
        ConfigError: the folder at `final` is of another kind.
    """
    if replaces is not None:
        restore(final, replaces)
        final = followed(replaces.thing, final)
        replaces.refuse_other(final)
    missing = [parent for parent in final.parents if not parent.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(final.parent, UNFINISHED) as torn:
            made = torn / final.name
            made.mkdir()
            if replaces is not None:
                mark(made, replaces.verb)
            yield made
            if replaces is not None:
                # Check again, because `final` may have changed while the block ran.
                replaces.refuse_other(final)
                take_place(made, final, replaces)
                return
            # Another process may have made `final` meanwhile: its folder stays.
            try:
                os.rename(made, final)
            except OSError:
                if not final.is_dir():
                    raise
    except BaseException:
        # Remove the parents that were created here, unless they hold something else by now.
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()
        raise


@contextmanager
def open_output_folder(out: Path, output: Output, overwrite: bool) -> Iterator[Path]:
    """Open a folder to fill, which becomes `out` if the block succeeds. No other process can write `out` meanwhile.

    If the block raises, or the process is killed, `out` keeps its content.

    Args:
        out: output folder of a verb; a link is followed.
        output: kind of folder that the verb writes.
        overwrite: replace an older folder of that kind; anything else is refused.

    Raises:
        ConfigError: `out` may not be replaced, another process is using it, or it cannot be written.
    """
    then = ", then give the command again"
    restore(out, output)
    final = Path(os.path.realpath(followed(output.thing, out)))
    if not final.name:
        raise ConfigError(output.thing, str(out), f"that is no place for it; {output.remedy}")
    with ExitStack() as stack:
        with writing(output.thing, out, then=then):
            stack.enter_context(_lock_output(final, output))
            if final.exists() and not overwrite:
                raise ConfigError(output.thing, str(out), "it exists; name a new --out, or --overwrite to replace it")
            made = stack.enter_context(whole_folder(final, output))
        yield made
        with writing(output.thing, out, then=then):
            # Another program may have made `out` while the block ran.
            if final.exists() and not overwrite:
                raise ConfigError(output.thing, str(out), f"it exists by now; move it away{then}")
            stack.close()


@contextmanager
def _lock_output(final: Path, output: Output) -> Iterator[None]:
    """Lock a folder next to `final`, because `final` itself does not exist yet or is replaced."""
    lock = final.parent / f".{final.name}.lock"
    output.refuse_other(lock)
    lock.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(lock, output.verb))
        except (BlockingIOError, FileNotFoundError) as error:
            # FileNotFoundError: the owner of the lock has just removed it.
            raise output.at_work(final, lock) from error
        except OSError:
            # For example, the disk is full.
            _remove_lock(lock)
            raise
        try:
            yield
        finally:
            _remove_lock(lock)


def _remove_lock(lock: Path) -> None:
    # Another process may be about to lock it.
    with suppress(OSError):
        (lock / OWNER).unlink(missing_ok=True)
        lock.rmdir()


def take_place(made: Path, final: Path, output: Output) -> None:
    """Rename `made` to `final`, in place of an older folder of its kind, which is removed afterwards.

    A process that is killed meanwhile leaves the older or the newer folder, complete, at `final`. If the file system
    cannot exchange names, it may leave the older one next to it; `restore` brings that back.

    Raises:
        ConfigError: the file system cannot exchange names, and another process holds the older folder or something else
            lies at the path of its backup.
        OSError: the folders cannot be renamed; the older one stays.
    """
    if not os.path.lexists(final):
        os.rename(made, final)
        return
    with private_folder(final.parent, UNFINISHED) as torn:
        if exchange(made, final):
            os.rename(made, torn / "older")
            return
        # No exchange: rename the older folder to its backup path, then the new one to `final`.
        kept = _backup_path(final)
        output.refuse_other(kept)
        if os.path.lexists(kept):
            os.rename(kept, torn / "oldest")
        # The lock keeps `restore` of another process away from the backup.
        with output.claimed(final):
            os.rename(final, kept)
            try:
                os.rename(made, final)
            except OSError:
                os.rename(kept, final)
                raise
            os.rename(kept, torn / "older")


def restore(final: Path, output: Output) -> bool:
    """Restore a folder whose replacement was interrupted between two renames. Return True if it was restored.

    A link is followed to its folder.
    """
    final = Path(os.path.realpath(final))
    kept = _backup_path(final)
    if os.path.lexists(final) or not kept.is_dir() or not output.recognises(kept):
        return False
    # If the lock is held, another process is replacing the folder right now.
    with suppress(BlockingIOError), alone(kept):
        os.rename(kept, final)
        log.warning("%s was restored: a command that was to replace it was stopped", final)
        return True
    return False


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths atomically. Return False if the system or the file system cannot.

    Raises:
        OSError: the exchange failed for another reason.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _backup_path(final: Path) -> Path:
    """Return the path of the backup of a folder that is replaced without an exchange."""
    return final.parent / f".{final.name}.older"


def _may_own(pid: int, made: Path) -> bool:
    """Return True if the process that made a file or folder may be alive: no younger process has its pid.

    The lock of a folder alone is not enough, because a process holds none just after it made its folder.
    """
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            # No process has a number that large.
            return False
    # The system is not Linux, or the process or the file has disappeared meanwhile.
    with suppress(FileNotFoundError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        since_boot_s = int(stat.rpartition(")")[2].split()[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        # A process that started after the file was written only reuses the pid.
        return booted_s + since_boot_s <= made.stat().st_mtime + _CLOCKS_S
    return True
