"""Files that are written atomically."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from repl_rl.errors import ConfigError

Json = str | int | float | bool | None | Mapping[str, "Json"] | Sequence["Json"]
"""Values that a JSON file can hold."""
_OTHER_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a block device"}
"""Kinds of files that get no content."""
_PRINTED = (1, 2)
"""File descriptors that commands print to."""


@contextmanager
def whole_file(final: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `final` if the block succeeds. Otherwise it is removed.

    A link or a pipe at `final` is replaced, because a stranger may have put it into the folder. Use `write_named` for a
    path that the user gave.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    # The name belongs to this process alone, so that of two concurrent writers each leaves a complete file.
    torn = final.with_name(f".{final.name}.{os.getpid()}.unfinished")
    torn.unlink(missing_ok=True)
    try:
        yield torn
        os.replace(torn, final)
    except BaseException:
        torn.unlink(missing_ok=True)
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
        with whole_file(Path(os.path.realpath(final))) as torn:
            yield torn
        return
    # The content is complete before the first byte goes out, so that a failure sends nothing.
    with tempfile.TemporaryDirectory(prefix="repl-rl-") as folder:
        torn = Path(folder, "content")
        yield torn
        with torn.open("rb") as source, final.open("wb") as sink:
            shutil.copyfileobj(source, sink)


def is_stream(path: Path, thing: str = "file") -> bool:
    """Return True for a pipe or a character device, and False for a regular file or a missing one.

    Raises:
        ConfigError: nothing can be written there: a folder, a socket, a block device, a loop of links, or the file
            that this command prints to. The message begins with `thing`.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(thing, str(path), "it is a link that leads to itself; name a file") from error
        # The operation that writes there reports any other error.
        return False
    kind = stat.S_IFMT(found.st_mode)
    if kind in _OTHER_KINDS:
        raise ConfigError(thing, str(path), f"it is {_OTHER_KINDS[kind]}; name a file")
    if kind != stat.S_IFREG:
        return True
    for descriptor in _PRINTED:
        # The stream may be closed.
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                raise ConfigError(thing, str(path), "this command prints to that file; name another")
    return False


def lies_in(folder: Path, file: Path) -> bool:
    """Return True if `file` lies in `folder` after links are resolved."""
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def write_whole(final: Path, text: str) -> None:
    """Write `text` as UTF-8 atomically, in place of an older file."""
    with whole_file(final) as torn:
        torn.write_text(text, encoding="utf-8")
