"""Folders of one process, and folders that are there whole or not at all."""

import ctypes
import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.alone import OWNER, alone, mark
from repl_rl.machine.outputs import Output, followed
from repl_rl.machine.refused import writing

log = logging.getLogger(__name__)
UNFINISHED = ".unfinished-"
"""Begins the name of a folder that is being filled. The number of the process follows."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_START_FIELD = 19
"""Of /proc/PID/stat behind the name of the program: when the process began, in clock ticks after boot (proc(5))."""
_CLOCKS_S = 1.0
"""Largest difference between the clocks of processes and of files, seconds."""
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a kernel or file system without RENAME_EXCHANGE."""


@contextmanager
def private_folder(root: Path, prefix: str) -> Iterator[Path]:
    """A folder in `root` that this process has for itself; it is removed at the end.

    Those that killed processes left are removed first.
    """
    remove_left_folders(root, prefix)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=root) as folder,
        alone(Path(folder)),
    ):
        yield Path(folder)


def remove_left_folders(root: Path, prefix: str = UNFINISHED) -> None:
    """Remove the private folders in `root` of processes that were killed: these are gone, and so are their locks.

    A process of another container that shares `root` has no number here, but it has its lock.
    """
    for left in root.glob(f"{prefix}*"):
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not _may_own(int(pid), left):
            with suppress(OSError), alone(left):
                shutil.rmtree(left, ignore_errors=True)


def remove_left_files(root: Path) -> None:
    """Remove the files below `root` that processes had begun to write (`files.whole_file`) when they were killed."""
    for left in [*root.rglob(".*.unfinished")]:
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not _may_own(int(pid), left):
            left.unlink(missing_ok=True)


@contextmanager
def whole_folder(final: Path, replaces: Output | None = None) -> Iterator[Path]:
    """A folder to fill. It becomes `final` when the block ends well; else nothing of it is left, parents included.

    Args:
        final: where it goes.
        replaces: the kind of folder that is made. It takes the place of one of its kind that is there, also where a
            link leads. None: the first one's stays where two processes make `final` at a time.

    Raises:
        ConfigError: what is there is not of that kind.
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
                replaces.refuse_other(final)  # again: it may have changed since
                take_place(made, final, replaces)
                return
            try:
                os.rename(made, final)
            except OSError:
                if not final.is_dir():
                    raise
    except BaseException:
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()
        raise


@contextmanager
def open_output_folder(out: Path, output: Output, overwrite: bool) -> Iterator[Path]:
    """Open a folder to fill, which becomes `out` when the block ends well. No other process can write `out` meanwhile.

    If the block raises, or the process is killed, `out` stays as it was.

    Args:
        out: the output folder of a verb; a link is followed.
        output: the kind of folder that the verb writes.
        overwrite: replace an older folder of that kind; anything else is refused.

    Raises:
        ConfigError: `out` may not be replaced, or another process is at work on it, or it cannot be written.
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
            if final.exists() and not overwrite:
                raise ConfigError(output.thing, str(out), f"it exists by now; move it away{then}")
            stack.close()


@contextmanager
def _lock_output(final: Path, output: Output) -> Iterator[None]:
    """Lock a folder next to `final`, because `final` itself is not there yet or is replaced."""
    lock = final.parent / f".{final.name}.lock"
    output.refuse_other(lock)
    lock.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(lock, output.verb))
        except (BlockingIOError, FileNotFoundError) as error:  # not found: its owner has removed it just now
            raise output.at_work(final, lock) from error
        except OSError:  # the disk has no room for it
            _remove_lock(lock)
            raise
        try:
            yield
        finally:
            _remove_lock(lock)


def _remove_lock(lock: Path) -> None:
    with suppress(OSError):  # another process may be about to lock it
        (lock / OWNER).unlink(missing_ok=True)
        lock.rmdir()


def take_place(made: Path, final: Path, output: Output) -> None:
    """Rename `made` to `final`, in place of an older folder of its kind, which is removed afterwards.

    A process that is killed meanwhile leaves the older or the newer one, whole, at `final`. Where the file system
    exchanges no names, it may leave the older one next to it: `restore` brings that back.

    Raises:
        ConfigError: the file system exchanges no names, and another process has the older one, or something else lies
            where that is kept meanwhile.
        OSError: they cannot be renamed; the older one stays.
    """
    if not os.path.lexists(final):
        os.rename(made, final)
        return
    with private_folder(final.parent, UNFINISHED) as torn:
        if exchange(made, final):
            os.rename(made, torn / "older")
            return
        kept = _backup_path(final)
        output.refuse_other(kept)
        if os.path.lexists(kept):
            os.rename(kept, torn / "oldest")
        with output.claimed(final):  # so that `restore` of another process leaves it
            os.rename(final, kept)
            try:
                os.rename(made, final)
            except OSError:
                os.rename(kept, final)
                raise
            os.rename(kept, torn / "older")


def restore(final: Path, output: Output) -> bool:
    """Bring back a folder whose replacement was stopped between two renames; True: it was brought back.

    A link stands for the folder that it leads to.
    """
    final = Path(os.path.realpath(final))
    kept = _backup_path(final)
    if os.path.lexists(final) or not kept.is_dir() or not output.recognises(kept):
        return False
    with suppress(BlockingIOError), alone(kept):  # else it is being replaced right now
        os.rename(kept, final)
        log.warning("%s was restored: a command that was to replace it was stopped", final)
        return True
    return False


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two paths at once; False: the system or the file system cannot.

    Raises:
        OSError: it was refused.
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
    """Return True where the process that made a file or folder may be alive: no younger process has its number.

    The lock of a folder alone is not enough. A process has none yet just after it made its folder.
    """
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    with suppress(FileNotFoundError):  # no Linux, or one of both has gone meanwhile
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        since_boot_s = int(stat.rpartition(")")[2].split()[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
        booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted_s + since_boot_s <= made.stat().st_mtime + _CLOCKS_S
    return True
