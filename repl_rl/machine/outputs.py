"""Outputs that `--overwrite` may replace: those that this program wrote, and nothing of anyone else's."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from repl_rl.errors import ConfigError
from repl_rl.machine.alone import OWNER, alone, has_owner, maker, owner

_NAMES_SHOWN = 3
_BUILT_IN = "builtin"
"""The prefix of what is in the package, and so no path."""


@dataclass(frozen=True, slots=True)
class Output:
    """A kind of folder that a verb writes, and the signs of one."""

    verb: str
    """The verb, as a user gives it; it is written into the folder before all else."""
    thing: str
    """The folder's name in error lines."""
    entries: tuple[str, ...]
    """Patterns of all names that the verb writes at the top of the folder. What lies below them is the verb's, too."""
    unmarked: Callable[[Path], bool]
    """True for a folder that version 0.2 wrote, which did not write its verb into it."""
    remedy: str = "choose another --out"

    def refuse_other(self, folder: Path) -> None:
        """Refuse a folder that may not be replaced: none of the verb's, or one with something of a user's in it.

        An empty folder, and a path where there is nothing, are fine.

        Raises:
            ConfigError: it may not be replaced; the message names what is in it.
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
        foreign = [name for name in held if not any(fnmatchcase(name, pattern) for pattern in self.entries)]
        if foreign:
            told = f"it holds {_some(foreign)}, which `repl-rl {self.verb}` did not write, so it is not replaced"
            raise ConfigError(self.thing, str(folder), f"{told}; move that elsewhere, or {self.remedy}")

    def recognises(self, folder: Path) -> bool:
        """True for a folder that the verb made, whatever else is in it by now."""
        made_by = maker(folder)
        return made_by == self.verb if made_by else self.unmarked(folder)

    @contextmanager
    def claimed(self, folder: Path) -> Iterator[None]:
        """Have `folder` for this process while the block lasts.

        One that is not there is made, and goes again where nothing was put into it.

        Raises:
            ConfigError: another process has it; the message names it.
            OSError: it cannot be made or written.
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
                    with suppress(OSError):  # another process may be about to lock it
                        (folder / OWNER).unlink(missing_ok=True)
                        folder.rmdir()

    def refuse_owned(self, folder: Path) -> None:
        """Refuse a folder that another process has, before anything slow starts.

        Raises:
            ConfigError: another process has it; the message names it.
        """
        if folder.is_dir() and has_owner(folder):
            raise self.at_work(folder, folder)

    def at_work(self, folder: Path, locked: Path) -> ConfigError:
        """Return the error for a `folder` that another process has; `locked` is the folder that it has locked."""
        told = f"another process is at work on it: {owner(locked)}"
        return ConfigError(self.thing, str(folder), f"{told}; wait for its end, or {self.remedy}")


def contents(folder: Path) -> list[str]:
    """Names of what is in `folder`, in order, without the file that says whose it is."""
    return sorted(name for name in os.listdir(folder) if name != OWNER)


def clear(folder: Path) -> None:
    """Remove what is in `folder`, but not the file that is locked. Links are removed, not followed."""
    for name in contents(folder):
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def followed(thing: str, path: Path) -> Path:
    """Where a link leads, or the path itself: a link to a folder or file stands for that.

    Raises:
        ConfigError: it leads nowhere.
    """
    if not path.is_symlink():
        return path
    if not path.exists():
        told = f"it is a link to {os.readlink(path)!r}, which is not there; remove the link, or make what it leads to"
        raise ConfigError(thing, str(path), told)
    return path.resolve()


def refuse_other_file(thing: str, path: Path, ours: Callable[[Path], bool]) -> None:
    """Refuse to replace a file of another kind than the one that is about to be written.

    Empty files, devices and pipes pass.

    Args:
        thing: the setting that names it.
        path: the file.
        ours: True for a file of the kind that is written.

    Raises:
        ConfigError: it is of another kind, or a folder.
    """
    if path.is_dir():
        raise ConfigError(thing, str(path), "it is a folder; name a file")
    if path.is_file() and path.stat().st_size and not ours(path):
        remedy = "another file is there, which is not replaced; name another, or remove it yourself"
        raise ConfigError(thing, str(path), remedy)


def refuse_inputs(thing: str, out: Path, inputs: Iterable[tuple[str, str]]) -> None:
    """Refuse to replace `out` where something that the command reads lies in it.

    Args:
        thing: name of the output, for the message.
        out: what would be replaced.
        inputs: settings and what each names: a path, one after a prefix and a colon, or something else.

    Raises:
        ConfigError: one of them is `out`, or in it.
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
        ConfigError: it is none.
    """
    if name in ("", ".", "..") or set(name) & {"/", "\0"}:
        remedy = "give one name for a folder below --out: not empty, not . or .., and without a slash"
        raise ConfigError("name", name, remedy)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("name", name, "it is not written in UTF-8; give another") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
