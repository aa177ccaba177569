"""Outputs that `--overwrite` may replace: those that this program wrote, and nothing else."""

import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.alone import OWNER, alone, has_owner, is_private, maker, owner
from repl_rl.machine.files import is_stream

UNFINISHED = ".unfinished-"
"""Prefix of the name of a folder that is being filled; the process id follows."""
_NAMES_SHOWN = 3
_BUILT_IN = "builtin"
"""Prefix of a resource in the package, which is no path."""


@dataclass(frozen=True, slots=True)
class Output:
    """A kind of folder that a verb writes, and the marks by which it is recognised."""

    verb: str
    """Verb on the command line. It is written into the folder before anything else."""
    thing: str
    """Name of the folder in error messages."""
    entries: tuple[str, ...]
    """Patterns of all names that the verb writes at the top level. Everything below them belongs to the verb, too.

    Unfinished folders with the lock file of this program need no pattern."""
    unmarked: Callable[[Path], bool]
    """Predicate for folders of version 0.2, which did not record their verb."""
    remedy: str = "choose another --out"

    def refuse_other(self, folder: Path) -> None:
        """Refuse to replace a folder that the verb did not make, or that holds something of the user's.

        An empty folder and a missing path pass.

        Raises:
            ConfigError: the folder may not be replaced; the message names its content.
        """
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():
            raise ConfigError(self.thing, str(folder), f"it is no folder, so nothing is replaced; {self.remedy}")
        held = contents(folder)
        if not held:
            return
        if not self.recognises(folder):
            told = f"`repl-rl {self.verb}` did not make it, so it is not replaced (it holds {_some(held)})"
            raise ConfigError(self.thing, str(folder), f"{told}; {self.remedy}, or remove it yourself")
        # A folder of the verb may still hold files that the user added.
        foreign = [
            name
            for name in held
            if not any(fnmatchcase(name, pattern) for pattern in self.entries)
            and not is_private(folder / name, UNFINISHED)
        ]
        if foreign:
            told = f"it holds {_some(foreign)}, which `repl-rl {self.verb}` did not write, so it is not replaced"
            raise ConfigError(self.thing, str(folder), f"{told}; move that elsewhere, or {self.remedy}")

    def recognises(self, folder: Path) -> bool:
        """Return True if the verb made the folder, even if it holds other files by now."""
        made_by = maker(folder)
        return made_by == self.verb if made_by else self.unmarked(folder)

    @contextmanager
    def claimed(self, folder: Path) -> Iterator[None]:
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
                stack.enter_context(alone(folder, self.verb))
            except BlockingIOError as error:
                raise self.at_work(folder, folder) from error
            try:
                yield
            finally:
                if new and folder.is_dir() and not contents(folder):
                    # Another process may be about to lock it.
                    with suppress(OSError):
                        (folder / OWNER).unlink(missing_ok=True)
                        folder.rmdir()

    def refuse_owned(self, folder: Path) -> None:
        """Refuse a folder that another process holds, before anything slow starts.

        Raises:
            ConfigError: another process holds it; the message names that process.
        """
        if folder.is_dir() and has_owner(folder):
            raise self.at_work(folder, folder)

    def at_work(self, folder: Path, locked: Path) -> ConfigError:
        """Return the error for a `folder` that another process holds; `locked` is the folder with its lock."""
        told = f"another process is at work on it: {owner(locked)}"
        return ConfigError(self.thing, str(folder), f"{told}; wait for its end, or {self.remedy}")


def contents(folder: Path) -> list[str]:
    """Return the names in `folder` in order, without the lock file."""
    return sorted(name for name in os.listdir(folder) if name != OWNER)


def clear(folder: Path) -> None:
    """Remove the content of `folder` except the lock file. Links are removed, not followed."""
    for name in contents(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def followed(thing: str, path: Path) -> Path:
    """Return the target of a link, or the path itself if it is not a link.

    Raises:
        ConfigError: the link leads nowhere.
    """
    if not path.is_symlink():
        return path
    if not path.exists():
        told = f"it is a link to {os.readlink(path)!r}, which is not there; remove the link, or make what it leads to"
        raise ConfigError(thing, str(path), told)
    return path.resolve()


def refuse_other_file(thing: str, path: Path, ours: Callable[[Path], bool]) -> None:
    """Refuse to replace a file of another kind than the one that is about to be written.

    Empty files pass. Pipes and character devices pass, because `files.write_named` writes to them.

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


def refuse_inputs(thing: str, out: Path, inputs: Iterable[tuple[str, str]]) -> None:
    """Refuse to replace `out` if it contains an input of the command.

    Args:
        thing: name of the output, for the message.
        out: path that would be replaced.
        inputs: settings and their values. A value is a path, a path behind a prefix and a colon, or something else.

    Raises:
        ConfigError: an input is `out`, or lies in it.
    """
    final = Path(os.path.realpath(out))
    for setting, said in inputs:
        prefix, _, rest = said.partition(":")
        for text in (said, rest if prefix != _BUILT_IN else ""):
            if text and os.path.exists(text) and Path(os.path.realpath(text)).is_relative_to(final):
                remedy = f"it would replace what --{setting} {said} reads; choose another place"
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


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
