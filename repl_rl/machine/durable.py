"""Crash-safe folders: each is either complete or absent, and digests show that it is complete."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from repl_rl.machine.folders import exchange, private_folder
from repl_rl.machine.outputs import UNFINISHED

DIGESTS = "sha256.json"
"""File in each such folder that maps the name of every other file to its SHA-256, in hexadecimal digits."""


def write_durably(final: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a folder, and rename it to `final`, in place of an older one.

    The folder has another name until all of it is on the disk. A process or machine that stops early leaves a complete
    folder or none. An unfinished folder is removed when the next one is written or the run is resumed.

    Raises:
        OSError: the folder could not be written; nothing of it is left.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with private_folder(final.parent, UNFINISHED) as torn:
        made = torn / final.name
        made.mkdir()
        fill(made)
        digests = {file.name: _digest(file) for file in sorted(made.iterdir())}
        (made / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        # Flush the content first: a crash after the rename must not find empty files under the final name.
        for path in (*made.iterdir(), made):
            sync(path)
        # Exchange the names atomically if the system can; otherwise move the older folder away first.
        if not (final.exists() and exchange(made, final)):
            if final.exists():
                os.rename(final, torn / "older")
            os.rename(made, final)
        sync(final.parent)


def damage(folder: Path) -> str | None:
    """Return a description of the damage to a folder of `write_durably`, or None if it is intact."""
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
    """Return the last of `folders` that is intact, or None. The callback gets one line per damaged folder."""
    for folder in reversed(folders):
        wrong = damage(folder)
        if wrong is None:
            return folder
        tell(f"state {folder} is damaged: {wrong}; the one before it is taken")
    return None


def keep_newest(folders: list[Path], count: int) -> None:
    """Remove all but the last `count` (>= 1) of `folders`."""
    for old in folders[:-count]:
        # Without its digests, a folder that is only partly removed never counts as intact.
        (old / DIGESTS).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk before later writes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
