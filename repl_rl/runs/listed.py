"""Run folders in a few figures each, for lists: how far they got, how they ended, what they take of the disk."""

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
"""Bytes of what the system counts as a block of a file."""


class Status(StrEnum):
    """What became of a run, or of what is taken for one."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """It ended without a word."""
    BROKEN = "broken"
    """It cannot be read."""
    FOREIGN = "no run"
    """No training made it."""


_ENDED = (Status.FINISHED, Status.INTERRUPTED, Status.FAILED)


@dataclass(frozen=True, slots=True)
class Listed:
    """One folder."""

    path: Path
    status: Status
    disk_bytes: int = 0
    """What it takes of the disk; a file of several names counts once."""
    changed_s: float = 0.0
    """When it was last written to, seconds since 1970."""
    why: str = ""
    """Why it failed or was interrupted, cannot be read, or is no run; "": there is nothing to tell."""
    step: int = 0
    """Steps done, >= 0."""
    steps: int | None = None
    """Steps that it is to have; None: nobody says."""
    summary: Mapping[str, Json] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """True for what a training made and can be read."""
        return self.status not in (Status.BROKEN, Status.FOREIGN)

    @property
    def stopped(self) -> bool:
        """True where it stopped before its end, and nobody is at work on it."""
        return self.status in (Status.INTERRUPTED, Status.FAILED, Status.KILLED)

    def figure(self, name: str) -> float | None:
        """A number of its summary; None: it has none of that name."""
        value = self.summary.get(name)
        return float(value) if isinstance(value, int | float) else None


def runs_in(folder: Path) -> list[Listed]:
    """The folders in `folder`, the one that was written to last first; hidden ones are left out. One that is broken, or
    is no run, is among them and says so.

    Raises:
        ConfigError: `folder` is none, or cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError("folder of runs", str(folder), "there is none; give the folder that --out of train named")
    places = [place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(".")]
    return sorted(map(listed, places), key=lambda run: (-run.changed_s, run.path.name))


def listed(run: Path) -> Listed:
    """What can be told of one folder, whatever it holds."""
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
    if has_owner(run):
        status = Status.RUNNING
    else:
        status = next((ended for ended in _ENDED if said.get("status") == ended), Status.KILLED)
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
    """What `folder` and all below it take of the disk, bytes; links are not followed.

    Raises:
        OSError: a part of it cannot be read. What goes while it is looked at counts nothing.
    """
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
