"""Index of run folders: progress, status and disk usage of each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from repl_rl.errors import ConfigError, StoreError
from repl_rl.machine.alone import has_owner
from repl_rl.machine.files import Json
from repl_rl.runs.told import CONFIG, METRICS, SUMMARY, is_run, rows_of, settings_of, summary_of

_BLOCK = 512
"""Bytes per block that the operating system counts for a file."""


class Status(StrEnum):
    """Status of a run folder, or of a folder that is listed with the runs."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """The process ended without a summary."""
    BROKEN = "broken"
    """The folder cannot be read."""
    FOREIGN = "no run"
    """The folder was not made by a training."""


_ENDED = (Status.FINISHED, Status.INTERRUPTED, Status.FAILED)


@dataclass(frozen=True, slots=True)
class Listed:
    """Index entry of one folder."""

    path: Path
    status: Status
    disk_bytes: int = 0
    """Disk usage in bytes; a file with several hard links counts once."""
    changed_s: float = 0.0
    """Time of the last write, seconds since 1970."""
    why: str = ""
    """Reason for `status`: an error, an interruption, an unreadable file or a foreign folder; "" if nothing is known.
    """
    step: int = 0
    """Finished steps, >= 0."""
    steps: int | None = None
    """Planned steps; None means unknown."""
    summary: Mapping[str, Json] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """True for a readable run of a training."""
        return self.status not in (Status.BROKEN, Status.FOREIGN)

    @property
    def stopped(self) -> bool:
        """True if the run stopped before its end and no process is running it."""
        return self.status in (Status.INTERRUPTED, Status.FAILED, Status.KILLED)

    def figure(self, name: str) -> float | None:
        """Return the number called `name` in the run's summary, or None if it has none."""
        value = self.summary.get(name)
        try:
            return float(value) if isinstance(value, int | float) else None
        except OverflowError:
            # JSON allows integers that no float can hold.
            return None


def runs_in(folder: Path) -> list[Listed]:
    """Return the folders in `folder`, last written first, without hidden ones.

    Broken and foreign folders are listed with that status.

    Raises:
        ConfigError: `folder` is not a folder, or cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError("folder of runs", str(folder), "there is none; give the folder that --out of train named")
    places = [place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(".")]
    return sorted(map(listed, places), key=lambda run: (-run.changed_s, run.path.name))


def listed(run: Path) -> Listed:
    """Return the index entry of one folder; a broken or foreign folder has one too."""
    try:
        size, changed_s = disk_bytes(run), _changed_s(run)
    except OSError as error:
        return Listed(run, Status.BROKEN, why=f"{error.filename}: {error.strerror}")
    try:
        return _told(run, size, changed_s) if is_run(run) else Listed(run, Status.FOREIGN, size, changed_s)
    except (StoreError, OSError) as error:
        return Listed(run, Status.BROKEN, size, changed_s, str(error))


def _told(run: Path, size: int, changed_s: float) -> Listed:
    said, own, done = summary_of(run) or {}, settings_of(run), rows_of(run)
    # A locked folder is running, even if an older summary has another status.
    if has_owner(run):
        status = Status.RUNNING
    else:
        status = next((ended for ended in _ENDED if said.get("status") == ended), Status.KILLED)
        # A summary with an unknown status is broken; a run without a summary was killed.
        if said and status is Status.KILLED:
            raise StoreError(f"{str(run / SUMMARY)!r} says that its status is {said.get('status')!r}")
    trainer = own.get("trainer")
    planned = said.get("steps", trainer.get("steps") if isinstance(trainer, Mapping) else None)
    step = done[-1].get("step") if done else 0
    return Listed(
        run,
        status,
        size,
        changed_s,
        str(said.get("error", "")) if status in _ENDED else "",
        step if isinstance(step, int) else len(done),
        planned if isinstance(planned, int) else None,
        said,
        own,
    )


def disk_bytes(folder: Path) -> int:
    """Return the disk usage of `folder` and everything below it, in bytes, without following links.

    Raises:
        OSError: a part of it cannot be read. Files that disappear during the walk count as 0.
    """
    # Keyed by device and inode, so that hard links count once.
    seen: dict[tuple[int, int], int] = {}

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, folders, files in os.walk(folder, onerror=refuse):
        for name in (".", *folders, *files):
            try:
                found = os.lstat(os.path.join(place, name))
            except FileNotFoundError:
                continue
            seen[found.st_dev, found.st_ino] = _BLOCK * found.st_blocks
    return sum(seen.values())


def _changed_s(run: Path) -> float:
    places = (run, *(run / name for name in (CONFIG, METRICS, SUMMARY)))
    return max(place.stat().st_mtime for place in places if place.exists())
