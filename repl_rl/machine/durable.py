"""Folders that survive a crash: there whole or not at all, and known to be whole by their digests."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from repl_rl.machine.folders import UNFINISHED, exchange, private_folder

DIGESTS = "sha256.json"
"""In each such folder: the name of every other file in it -> its SHA-256, in hexadecimal digits."""


def write_durably(final: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a folder, which then becomes `final`, in place of an older one.

    It has another name until all of it is on the disk. So whoever stops this process, or the machine, leaves a whole
    folder or none; an unfinished one is removed when the next is written or the run is resumed.

    Raises:
        OSError: it could not be written; nothing of it is left.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(final.parent, UNFINISHED) as torn:
        made = torn / final.name
        made.mkdir()
        fill(made)
        digests = {file.name: _digest(file) for file in sorted(made.iterdir())}
        (made / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        for path in (*made.iterdir(), made):
            sync(path)
        if not (final.exists() and exchange(made, final)):
            if final.exists():
                os.rename(final, torn / "older")
            os.rename(made, final)
        sync(final.parent)


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that `write_durably` made; None: it is whole."""
    try:
        digests: dict[str, str] = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        for name, said in digests.items():
            if _digest(folder / name) != said:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror}"
    except (ValueError, AttributeError):
        return f"{DIGESTS} cannot be read"
    return None


def newest_whole(folders: Sequence[Path], tell: Callable[[str], None]) -> Path | None:
    """The last of `folders` that is whole; None: none is. `tell` is given a line about each that is damaged."""
    for folder in reversed(folders):
        wrong = damage(folder)
        if wrong is None:
            return folder
        tell(f"state {folder} is damaged: {wrong}; the one before it is taken")
    return None


def keep_newest(folders: list[Path], count: int) -> None:
    """Remove all but the last `count` (>= 1) of `folders`; one that is being removed is never taken for whole."""
    for old in folders[:-count]:
        (old / DIGESTS).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before anything that is written from now on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
