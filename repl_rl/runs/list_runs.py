"""Index of run folders: progress, status and disk usage of each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from repl_rl.errors import ConfigError, StoreError
from repl_rl.runs.run_metadata import (
    CONFIG,
    METRICS,
    SUMMARY,
    is_run_folder,
    read_metric_rows,
    read_settings,
    read_summary,
)
from repl_rl.utils.atomic_files import Json
from repl_rl.utils.file_lock import is_locked

_BLOCK = 512
"""Bytes per block that the operating system counts for a file."""


class RunStatus(StrEnum):
    """Status of a run folder, or of a folder that is listed with the runs."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"
    """The process ended without a summary."""
    UNREADABLE = "broken"
    """The folder cannot be read."""
    NOT_A_RUN = "no run"
    """The folder was not made by a training."""


_END_STATUSES = (RunStatus.FINISHED, RunStatus.INTERRUPTED, RunStatus.FAILED)


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Index entry of one folder."""

    path: Path
    status: RunStatus
    disk_bytes: int = 0
    """Disk usage in bytes; a file with several hard links counts once."""
    modified_s: float = 0.0
    """Time of the last write, seconds since 1970."""
    reason: str = ""
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
        return self.status not in (RunStatus.UNREADABLE, RunStatus.NOT_A_RUN)

    @property
    def is_resumable(self) -> bool:
        """True if the run stopped before its end and no process is running it."""
        return self.status in (RunStatus.INTERRUPTED, RunStatus.FAILED, RunStatus.KILLED)

    def get_number(self, name: str) -> float | None:
        """Return the number called `name` in the run's summary, or None if it has none."""
        value = self.summary.get(name)
        try:
            return float(value) if isinstance(value, int | float) else None
        except OverflowError:
            # JSON allows integers that no float can hold.
            return None


def list_runs(folder: Path) -> list[RunInfo]:
    """Return the folders in `folder`, last written first, without hidden ones.

    Broken and foreign folders are listed with that status.

    Raises:
        ConfigError: `folder` is not a folder, or cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError("folder of runs", str(folder), "it does not exist; give the --out folder of train")
    folders = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(map(read_run_info, folders), key=lambda run: (-run.modified_s, run.path.name))


def read_run_info(run: Path) -> RunInfo:
    """Return the index entry of one folder; a broken or foreign folder has one too."""
    try:
        size, changed_s = compute_disk_bytes(run), _get_modified_s(run)
    except OSError as error:
        return RunInfo(run, RunStatus.UNREADABLE, reason=f"{error.filename}: {error.strerror}")
    try:
        if not is_run_folder(run):
            return RunInfo(run, RunStatus.NOT_A_RUN, size, changed_s)
        return _read_run(run, size, changed_s)
    except (StoreError, OSError) as error:
        return RunInfo(run, RunStatus.UNREADABLE, size, changed_s, str(error))


def _read_run(run: Path, size: int, changed_s: float) -> RunInfo:
    """Return the index entry of a run of a training.

    Raises:
        StoreError: one of its files cannot be read, or its summary has an unknown status.
    """
    summary, settings, rows = read_summary(run) or {}, read_settings(run), read_metric_rows(run)
    # A locked folder is running, even if an older summary has another status.
    if is_locked(run):
        status = RunStatus.RUNNING
    else:
        status = next(
            (end_status for end_status in _END_STATUSES if summary.get("status") == end_status), RunStatus.KILLED
        )
        # A summary with an unknown status is broken; a run without a summary was killed.
        if summary and status is RunStatus.KILLED:
            raise StoreError(f"{str(run / SUMMARY)!r} has the unknown status {summary.get('status')!r}")
    # A running or killed run may have no summary, so the planned steps come from its settings.
    trainer = settings.get("trainer")
    planned = summary.get("steps", trainer.get("steps") if isinstance(trainer, Mapping) else None)
    step = rows[-1].get("step") if rows else 0
    return RunInfo(
        run,
        status,
        size,
        changed_s,
        str(summary.get("error", "")) if status in _END_STATUSES else "",
        step if isinstance(step, int) else len(rows),
        planned if isinstance(planned, int) else None,
        summary,
        settings,
    )


def compute_disk_bytes(folder: Path) -> int:
    """Return the disk usage of `folder` and everything below it, in bytes, without following links.

    Raises:
        OSError: a part of it cannot be read. Files that disappear during the walk count as 0.
    """
    # Keyed by device and inode, so that hard links count once.
    sizes: dict[tuple[int, int], int] = {}

    def raise_error(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, files in os.walk(folder, onerror=raise_error):
        for name in (".", *folders, *files):
            try:
                info = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:
                continue
            sizes[info.st_dev, info.st_ino] = _BLOCK * info.st_blocks
    return sum(sizes.values())


def _get_modified_s(run: Path) -> float:
    """Return the time of the last write to the folder or its files, seconds since 1970."""
    paths = (run, *(run / name for name in (CONFIG, METRICS, SUMMARY)))
    return max(path.stat().st_mtime for path in paths if path.exists())
