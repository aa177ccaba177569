"""Files and folders that are written atomically: after a failure, the target has its old content or the new one.

The parts, in order:

- single files, such as `replace_file_atomically`;
- output folders that `--overwrite` may replace (`OutputFolder`): those that this program made, and no others;
- folders that are private to one process, and folders that are filled elsewhere and then renamed into place;
- durable folders (`write_folder_durably`), which are also flushed to the disk. Their digests detect damage.
"""

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.utils.describe_os_errors import catch_os_errors
from repl_rl.utils.file_lock import OWNER, describe_owner, is_locked, is_private, lock_folder, read_maker, write_marker

log = logging.getLogger(__name__)
Json = str | int | float | bool | None | Mapping[str, "Json"] | Sequence["Json"]
"""Values that a JSON file can hold."""
UNFINISHED = ".unfinished-"
"""Prefix of the name of a folder that is being filled; the process id follows."""
DIGESTS = "sha256.json"
"""File in each durable folder that maps the name of every other file to its SHA-256, in hexadecimal digits."""
_UNFINISHED_FILE = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]+)\.unfinished", re.DOTALL)
"""Name of an unfinished file of `replace_file_atomically`."""
_UNWRITABLE_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device"}
"""Kinds of files that get no content."""
_STANDARD_OUTPUTS = (1, 2)
"""File descriptors that commands print to."""
_NAMES_SHOWN = 3
"""Largest number of names that an error message lists."""
_BUILT_IN = "builtin"
"""Prefix of a resource in the package, which is no path."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2): paths are relative to the working folder; the two names are exchanged."""
_EXCHANGE_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a kernel or file system without RENAME_EXCHANGE."""
_START_FIELD = 19
"""Field of /proc/PID/stat behind the program name: start time of the process, in clock ticks after boot (proc(5))."""
_CLOCK_TOLERANCE_S = 1.0
"""Largest difference between the clocks of processes and of files, seconds."""
_SOCKET_ADDRESS_BYTES = 107
"""Longest path that is the address of a Unix socket (unix(7))."""


@contextmanager
def replace_file_atomically(final: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `final` if the block succeeds. Otherwise it is removed.

    A link or a pipe at `final` is replaced, because a stranger may have put it into the folder. Use `write_named` for a
    path that the user gave.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    # The name belongs to this process alone, so that of two concurrent writers each leaves a complete file.
    unfinished = final.with_name(f".{final.name}.{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        yield unfinished
        os.replace(unfinished, final)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def write_named(final: Path, thing: str = "file") -> Iterator[Path]:
    """Yield a path to write to. If the block succeeds, its content goes to the file that the user named.

    A link is followed: its target is replaced, or made if it is missing. A pipe or a character device gets the content
    and stays what it is.

    Args:
        final: path that the user gave. Links in it are trusted.
        thing: setting that names the file, for messages.

    Raises:
        ConfigError: nothing can be written to `final`.
    """
    if not is_stream(final, thing):
        with replace_file_atomically(Path(os.path.realpath(final))) as unfinished:
            yield unfinished
        return
    # The content is complete before the first byte goes out, so that a failure sends nothing.
    with tempfile.TemporaryDirectory(prefix="repl-rl-") as folder:
        unfinished = Path(folder, "content")
        yield unfinished
        with unfinished.open("rb") as source, final.open("wb") as sink:
            shutil.copyfileobj(source, sink)


def is_stream(path: Path, thing: str = "file") -> bool:
    """Return True for a pipe or a character device, and False for a regular file or a missing one.

    Raises:
        ConfigError: nothing can be written there: a folder, a socket, a block device, a loop of links, or the file
            that this command prints to. The message begins with `thing`.
    """
    try:
        info = os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(thing, str(path), "it is a link that leads to itself; name a file") from error
        # The operation that writes there reports any other error.
        return False
    kind = stat.S_IFMT(info.st_mode)
    if kind in _UNWRITABLE_KINDS:
        raise ConfigError(thing, str(path), f"it is {_UNWRITABLE_KINDS[kind]}; name a file")
    if kind != stat.S_IFREG:
        return True
    for descriptor in _STANDARD_OUTPUTS:
        # The stream may be closed.
        with suppress(OSError):
            if os.path.samestat(info, os.fstat(descriptor)):
                raise ConfigError(thing, str(path), "this command prints to that file; name another")
    return False


def is_inside(folder: Path, file: Path) -> bool:
    """Return True if `file` lies in `folder` after links are resolved."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def write_text_atomically(final: Path, text: str) -> None:
    """Write `text` as UTF-8 atomically, in place of an older file."""
    with replace_file_atomically(final) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Kind of folder that a subcommand (verb) of `repl-rl` writes, and the marks by which it is recognised."""

    verb: str
    """Verb on the command line. It is written into the folder before anything else."""
    name: str
    """Name of the folder in error messages."""
    name_patterns: tuple[str, ...]
    """Patterns of all names that the verb writes at the top level. Everything below them belongs to the verb, too.

    Unfinished folders with the lock file of this program need no pattern."""
    is_unmarked_output: Callable[[Path], bool]
    """Predicate for folders of version 0.2, which did not record their verb."""
    remedy: str = "choose another --out"

    def validate_replaceable(self, folder: Path) -> None:
        """Refuse to replace a folder that the verb did not make, or that holds something of the user's.

        An empty folder and a missing path pass.

        Raises:
            ConfigError: the folder may not be replaced; the message names its content.
        """
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():
            raise ConfigError(self.name, str(folder), f"it is no folder, so nothing is replaced; {self.remedy}")
        contents = list_contents(folder)
        if not contents:
            return
        if not self.is_output(folder):
            problem = (
                f"`repl-rl {self.verb}` did not make it, so it is not replaced (it holds {_format_names(contents)})"
            )
            raise ConfigError(self.name, str(folder), f"{problem}; {self.remedy}, or remove it yourself")
        # A folder of the verb may still hold files that the user added.
        foreign = [
            name
            for name in contents
            if not any(fnmatchcase(name, pattern) for pattern in self.name_patterns)
            and not is_private(folder / name, UNFINISHED)
        ]
        if foreign:
            problem = (
                f"it holds {_format_names(foreign)}, which `repl-rl {self.verb}` did not write, so it is not replaced"
            )
            raise ConfigError(self.name, str(folder), f"{problem}; move that elsewhere, or {self.remedy}")

    def is_output(self, folder: Path) -> bool:
        """Return True if the verb made the folder, even if it holds other files by now."""
        made_by = read_maker(folder)
        return made_by == self.verb if made_by else self.is_unmarked_output(folder)

    @contextmanager
    def claim(self, folder: Path) -> Iterator[None]:
        """Lock `folder` for this process during the block.

        A missing folder is created, and removed again if it is still empty at the end.

        Raises:
            ConfigError: another process holds it; the message names that process.
            OSError: the folder cannot be created or written.
        """
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(folder, self.verb))
            except BlockingIOError as error:
                raise self.make_in_use_error(folder, folder) from error
            try:
                yield
            finally:
                if new and folder.is_dir() and not list_contents(folder):
                    _remove_lock(folder)

    def validate_not_locked(self, folder: Path) -> None:
        """Refuse a folder that another process holds, before anything slow starts.

        Raises:
            ConfigError: another process holds it; the message names that process.
        """
        if folder.is_dir() and is_locked(folder):
            raise self.make_in_use_error(folder, folder)

    def make_in_use_error(self, folder: Path, locked: Path) -> ConfigError:
        """Return the error for a `folder` that another process holds; `locked` is the folder with its lock."""
        problem = f"another process is using it: {describe_owner(locked)}"
        return ConfigError(self.name, str(folder), f"{problem}; wait for its end, or {self.remedy}")


def list_contents(folder: Path) -> list[str]:
    """Return the names in `folder` in order, without the lock file."""
    return sorted(name for name in os.listdir(folder) if name != OWNER)


def remove_contents(folder: Path) -> None:
    """Remove the content of `folder` except the lock file. Links are removed, not followed."""
    for name in list_contents(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def resolve_link(thing: str, path: Path) -> Path:
    """Return the target of a link, or the path itself if it is not a link.

    Raises:
        ConfigError: the link leads nowhere.
    """
    if not path.is_symlink():
        return path
    if not path.exists():
        remedy = f"it is a link to {os.readlink(path)!r}, which is not there; remove the link, or make what it leads to"
        raise ConfigError(thing, str(path), remedy)
    return path.resolve()


def validate_replaceable_file(thing: str, path: Path, ours: Callable[[Path], bool]) -> None:
    """Refuse to replace a file of another kind than the one that is about to be written.

    Empty files pass. Pipes and character devices pass, because `write_named` writes to them.

    Args:
        thing: setting that names the file.
        path: the file.
        ours: predicate for files of the kind that is written.

    Raises:
        ConfigError: the file is of another kind, or nothing can be written to the path.
    """
    if not is_stream(path, thing) and path.is_file() and path.stat().st_size and not ours(path):
        remedy = "another file is there, which is not replaced; name another, or remove it yourself"
        raise ConfigError(thing, str(path), remedy)


def validate_no_inputs_inside(thing: str, out: Path, inputs: Iterable[tuple[str, str]]) -> None:
    """Refuse to replace `out` if it contains an input of the command.

    Args:
        thing: name of the output, for the message.
        out: path that would be replaced.
        inputs: settings and their values. A value is a path, a path behind a prefix and a colon, or something else.

    Raises:
        ConfigError: an input is `out`, or lies in it.
    """
    final = Path(os.path.realpath(out))
    for setting, value in inputs:
        prefix, _, path = value.partition(":")
        for text in (value, path if prefix != _BUILT_IN else ""):
            if text and os.path.exists(text) and Path(os.path.realpath(text)).is_relative_to(final):
                remedy = f"it would replace what --{setting} {value} reads; choose another place"
                raise ConfigError(thing, str(out), remedy)


def check_name(name: str) -> None:
    """Refuse a name that is not one component of a path.

    Raises:
        ConfigError: the name is something else.
    """
    if name in ("", ".", "..") or "/" in name or any(unicodedata.category(letter) == "Cc" for letter in name):
        remedy = "give one name for a folder below --out: not empty, not . or .., no slash or control character"
        raise ConfigError("name", name, remedy)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("name", name, "it is not written in UTF-8; give another") from error


def _format_names(names: list[str]) -> str:
    suffix = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + suffix


def _remove_lock(folder: Path) -> None:
    """Remove the lock file of `folder`, and then the folder itself if nothing else is in it."""
    # Another process may be about to lock it.
    with suppress(OSError):
        (folder / OWNER).unlink(missing_ok=True)
        folder.rmdir()


def folder_for_sockets(name_bytes: int) -> Path:
    """Return the folder of temporary files, or /tmp if the addresses of sockets in it would be too long.

    Args:
        name_bytes: length of the longest path of a socket below the folder, bytes.
    """
    usual = Path(tempfile.gettempdir())
    fits = len(os.fsencode(usual)) + len("/") + name_bytes <= _SOCKET_ADDRESS_BYTES
    return usual if fits else Path("/tmp")


@contextmanager
def open_private_folder(root: Path, prefix: str) -> Iterator[Path]:
    """Create a folder in `root` that only this process uses, and remove it at the end.

    Folders that killed processes left behind are removed first. The lock file proves that this program made a folder:
    it is the first file in it, and the last one that is removed.
    """
    remove_left_folders(root, prefix)
    with (
        tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=root) as folder,
        lock_folder(Path(folder)),
    ):
        try:
            yield Path(folder)
        finally:
            # The rest is removed with the folder.
            with suppress(OSError):
                remove_contents(Path(folder))


def remove_left_folders(root: Path, prefix: str = UNFINISHED) -> None:
    """Remove the private folders in `root` that killed processes left behind. Their locks ended with them.

    A folder without the lock file of this program stays, because a user may have made it. A process of another
    container that shares `root` has no pid here, but it holds its lock.
    """
    for folder in root.glob(f"{prefix}*"):
        with suppress(OSError):
            if not is_private(folder, prefix):
                continue
            pid = int(folder.name.removeprefix(prefix).partition("-")[0])
            if not _can_be_owned_by(pid, folder):
                with lock_folder(folder):
                    # The lock file goes last: if this process is killed, the next one still knows the folder.
                    remove_contents(folder)
                    shutil.rmtree(folder, ignore_errors=True)


def remove_left_files(root: Path, output: OutputFolder) -> None:
    """Remove the unfinished files of `replace_file_atomically` below `root` that killed processes left behind.

    At the top of `root` these are only files that the verb of `output` writes, because others are the user's.
    """
    for file in [*root.rglob(".*.unfinished")]:
        name = _UNFINISHED_FILE.fullmatch(file.name)
        if name is None or file.is_symlink() or not file.is_file():
            continue
        is_ours = file.parent != root or any(fnmatchcase(name["name"], pattern) for pattern in output.name_patterns)
        if is_ours and not _can_be_owned_by(int(name["pid"]), file):
            file.unlink(missing_ok=True)


@contextmanager
def replace_folder_atomically(final: Path, replaces: OutputFolder | None = None) -> Iterator[Path]:
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
        restore_backup(final, replaces)
        final = resolve_link(replaces.name, final)
        replaces.validate_replaceable(final)
    missing_parents = [parent for parent in final.parents if not parent.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with open_private_folder(final.parent, UNFINISHED) as private_folder:
            folder = private_folder / final.name
            folder.mkdir()
            if replaces is not None:
                write_marker(folder, replaces.verb)
            yield folder
            if replaces is not None:
                # Check again, because `final` may have changed while the block ran.
                replaces.validate_replaceable(final)
                swap_into_place(folder, final, replaces)
                return
            # Another process may have made `final` meanwhile: its folder stays.
            try:
                os.rename(folder, final)
            except OSError:
                if not final.is_dir():
                    raise
    except BaseException:
        # Remove the parents that were created here, unless they hold something else by now.
        with suppress(OSError):
            for parent in missing_parents:
                parent.rmdir()
        raise


@contextmanager
def open_output_folder(out: Path, output: OutputFolder, overwrite: bool) -> Iterator[Path]:
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
    restore_backup(out, output)
    final = Path(os.path.realpath(resolve_link(output.name, out)))
    if not final.name:
        raise ConfigError(output.name, str(out), f"that is no place for it; {output.remedy}")
    with ExitStack() as stack:
        with catch_os_errors(output.name, out, then=then):
            stack.enter_context(_lock_output(final, output))
            if final.exists() and not overwrite:
                raise ConfigError(output.name, str(out), "it exists; name a new --out, or --overwrite to replace it")
            folder = stack.enter_context(replace_folder_atomically(final, output))
        yield folder
        with catch_os_errors(output.name, out, then=then):
            # Another program may have made `out` while the block ran.
            if final.exists() and not overwrite:
                raise ConfigError(output.name, str(out), f"it exists by now; move it away{then}")
            stack.close()


@contextmanager
def _lock_output(final: Path, output: OutputFolder) -> Iterator[None]:
    """Lock a folder next to `final`, because `final` itself does not exist yet or is replaced."""
    lock = final.parent / f".{final.name}.lock"
    output.validate_replaceable(lock)
    lock.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(lock, output.verb))
        except (BlockingIOError, FileNotFoundError) as error:
            # FileNotFoundError: the owner of the lock has just removed it.
            raise output.make_in_use_error(final, lock) from error
        except OSError:
            # For example, the disk is full.
            _remove_lock(lock)
            raise
        try:
            yield
        finally:
            _remove_lock(lock)


def swap_into_place(folder: Path, final: Path, output: OutputFolder) -> None:
    """Rename `folder` to `final`, in place of an older folder of its kind, which is removed afterwards.

    A process that is killed meanwhile leaves the older or the newer folder, complete, at `final`. If the file system
    cannot exchange names, it may leave the older one next to it; `restore_backup` brings that back.

    Raises:
        ConfigError: the file system cannot exchange names, and another process holds the older folder or something else
            lies at the path of its backup.
        OSError: the folders cannot be renamed; the older one stays.
    """
    if not os.path.lexists(final):
        os.rename(folder, final)
        return
    with open_private_folder(final.parent, UNFINISHED) as private_folder:
        if exchange_names(folder, final):
            os.rename(folder, private_folder / "older")
            return
        # No exchange: rename the older folder to its backup path, then the new one to `final`.
        backup = _get_backup_path(final)
        output.validate_replaceable(backup)
        if os.path.lexists(backup):
            os.rename(backup, private_folder / "oldest")
        # The lock keeps `restore_backup` of another process away from the backup.
        with output.claim(final):
            os.rename(final, backup)
            try:
                os.rename(folder, final)
            except OSError:
                os.rename(backup, final)
                raise
            os.rename(backup, private_folder / "older")


def restore_backup(final: Path, output: OutputFolder) -> bool:
    """Restore a folder whose replacement was interrupted between two renames. Return True if it was restored.

    A link is followed to its folder.
    """
    final = Path(os.path.realpath(final))
    backup = _get_backup_path(final)
    if os.path.lexists(final) or not backup.is_dir() or not output.is_output(backup):
        return False
    # If the lock is held, another process is replacing the folder right now.
    with suppress(BlockingIOError), lock_folder(backup):
        os.rename(backup, final)
        log.warning("%s was restored: a command that was to replace it was stopped", final)
        return True
    return False


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange the names of two paths atomically. Return False if the system or the file system cannot.

    Raises:
        OSError: the exchange failed for another reason.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def _get_backup_path(final: Path) -> Path:
    """Return the path of the backup of a folder that is replaced without an exchange."""
    return final.parent / f".{final.name}.older"


def _can_be_owned_by(pid: int, path: Path) -> bool:
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
        return booted_s + since_boot_s <= path.stat().st_mtime + _CLOCK_TOLERANCE_S
    return True


def write_folder_durably(final: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a folder, and rename it to `final`, in place of an older one.

    The folder has another name until all of it is on the disk. A process or machine that stops early leaves a complete
    folder or none. An unfinished folder is removed when the next one is written or the run is resumed.

    Raises:
        OSError: the folder could not be written; nothing of it is left.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with open_private_folder(final.parent, UNFINISHED) as unfinished:
        filled = unfinished / final.name
        filled.mkdir()
        fill(filled)
        digests = {file.name: _compute_digest(file) for file in sorted(filled.iterdir())}
        (filled / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        # Flush the content first: a crash after the rename must not find empty files under the final name.
        for path in (*filled.iterdir(), filled):
            fsync_path(path)
        # Exchange the names atomically if the system can; otherwise move the older folder away first.
        if not (final.exists() and exchange_names(filled, final)):
            if final.exists():
                os.rename(final, unfinished / "older")
            os.rename(filled, final)
        fsync_path(final.parent)


def find_damage(folder: Path) -> str | None:
    """Return a description of the damage to a folder of `write_folder_durably`, or None if it is intact."""
    try:
        digests: dict[str, str] = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        for name, expected in digests.items():
            if _compute_digest(folder / name) != expected:
                return f"{name} differs from what was written"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
    except (ValueError, AttributeError):
        return f"{DIGESTS} cannot be read"
    return None


def find_newest_intact(folders: Sequence[Path], warn: Callable[[str], None]) -> Path | None:
    """Return the last of `folders` that is intact, or None. The callback gets one line per damaged folder."""
    for folder in reversed(folders):
        damage = find_damage(folder)
        if damage is None:
            return folder
        warn(f"state {folder} is damaged: {damage}; the previous one is used")
    return None


def remove_all_but_newest(folders: list[Path], count: int) -> None:
    """Remove all but the last `count` (>= 1) of `folders`."""
    for old in folders[:-count]:
        # Without its digests, a folder that is only partly removed never counts as intact.
        (old / DIGESTS).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk before later writes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compute_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
