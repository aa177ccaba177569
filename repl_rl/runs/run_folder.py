"""Run folder `runs/<name>/`: settings, metrics, trajectories and checkpoints of one training run.

`check_same_settings` compares the settings of a resumed run with the saved ones, which decide all later steps.
"""

import json
import logging
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from repl_rl.credit.credited_trajectory import LineCredit
from repl_rl.errors import ConfigError, ReplRLError, StoreError
from repl_rl.runs.report import write_report
from repl_rl.runs.run_metadata import CONFIG, METRICS, SUMMARY, read_settings, read_summary, read_whole_lines
from repl_rl.runs.store import write_step, write_tokens
from repl_rl.settings.argument_parser import flatten, load_toml
from repl_rl.settings.migrate_run_settings import ADDED, format_component, get_judge_order, rename_recorded
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import (
    Json,
    OutputFolder,
    list_contents,
    remove_contents,
    remove_left_files,
    remove_left_folders,
    resolve_link,
    write_text_atomically,
)
from repl_rl.utils.describe_os_errors import catch_os_errors
from repl_rl.utils.file_lock import read_maker, write_marker

BEST = "best"
"""Folder of the policy with the best evaluation, next to the checkpoints."""
_MAX_NAME_BYTES = 255
"""Length of a file name that all usual file systems allow."""
_FILES = (CONFIG, METRICS, SUMMARY, "report.html", "curves.png", "fleet.json")
"""Files at the top of a run folder."""
_UNFINISHED = tuple(f".{name}.[0-9]*.unfinished" for name in _FILES)
"""Patterns of the temporary names under which `_FILES` are written. Files with other names belong to the user."""
_log = logging.getLogger(__name__)


def _is_legacy_run(folder: Path) -> bool:
    """Return True for a run folder of version 0.2, by its `trainer` settings and its `checkpoints` folder."""
    try:
        return "trainer" in read_settings(folder) and (folder / "checkpoints").is_dir()
    except StoreError:
        return False


RUN = OutputFolder(
    "train",
    "run folder",
    (
        *(*_FILES, "trajectories", "checkpoints", "states", "fleet", "tensorboard"),
        *_UNFINISHED,
    ),
    _is_legacy_run,
    "choose another --name",
)
"""Output type of a run folder: its file names, and the test that recognizes one of version 0.2."""


class RunFolder:
    """Files of one run; `create` makes them on disk."""

    def __init__(self, path: Path, overwrite: bool, resume: bool = False, main: bool = True) -> None:
        """Check early that the run folder can be written; write and remove nothing yet.

        If `path` is a symbolic link, the target of the link is checked.

        Args:
            path: the run folder.
            overwrite: replace an existing run.
            resume: resume an existing run.
            main: False on the other ranks of a training, which only read.

        Raises:
            ConfigError: the folder exists and is to be neither replaced nor resumed; both are requested; it is not a
                run folder; another process uses it; or its parent cannot be written.
        """
        if overwrite and resume:
            raise ConfigError("resume", resume, "--resume and --overwrite exclude each other; give one of them")
        self.path = path
        self.metric_rows: list[Mapping[str, float]] = []
        self._overwrite = overwrite
        if main:
            self._validate_options(overwrite, resume)

    def _validate_options(self, overwrite: bool, resume: bool) -> None:
        """Raise ConfigError if the folder cannot be created, replaced or resumed."""
        if len(os.fsencode(self.path.name)) > _MAX_NAME_BYTES:
            remedy = f"a name has at most {_MAX_NAME_BYTES} bytes; shorten --name"
            raise ConfigError("run folder", f"{self.path.name[:20]}...", remedy)
        # An existing folder must be replaced or resumed, and no other process may use it.
        path = resolve_link("run folder", self.path)
        if path.exists() and not (overwrite or resume):
            raise self._make_exists_error()
        RUN.validate_not_locked(path)
        if overwrite:
            RUN.validate_replaceable(path)
        if resume and path.exists():
            self._validate_is_run(path)
        # The folder may not exist yet, so its nearest existing parent decides.
        parent = next(p for p in Path(os.path.realpath(path)).parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            remedy = f"{parent} is not a writable folder; choose another --out"
            raise ConfigError("run folder", str(self.path), remedy)

    def _make_exists_error(self) -> ConfigError:
        remedy = "choose another --name, --resume to continue that run, or --overwrite to replace it"
        return ConfigError("run folder", str(self.path), remedy)

    def _validate_is_run(self, path: Path) -> None:
        """Raise ConfigError if a resume would start from a folder that is not a run."""
        if not path.is_dir():
            raise ConfigError("run folder", str(self.path), "it is no folder; choose another --name")
        if _has_content(path) and not (path / CONFIG).is_file():
            remedy = f"it has no {CONFIG}, so it is no run that can be resumed; choose another --name"
            raise ConfigError("run folder", str(self.path), remedy)

    def create(self, config_toml: str) -> None:
        """Create the folder with its `config.toml`; remove an older run of that name.

        Raises:
            ConfigError: it cannot be created, or it now holds something that may not be replaced.
        """
        with self.catch_write_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            # Check again: the folder may have changed since `__init__`.
            if not _has_content(self.path):
                remove_contents(self.path)
            else:
                if not self._overwrite:
                    raise self._make_exists_error()
                RUN.validate_replaceable(self.path)
                remove_contents(self.path)
            # Write the owner mark before all else, so that a run that is killed here can be replaced.
            if read_maker(self.path) != RUN.verb:
                write_marker(self.path, RUN.verb)
            write_text_atomically(self.path / CONFIG, config_toml)
            self.checkpoints_folder.mkdir()

    @property
    def exists(self) -> bool:
        """True if the folder already holds a run."""
        return self.path.is_dir() and _has_content(self.path)

    def is_finished(self, steps: int) -> bool:
        """Return True if the run finished without an error after `steps` steps.

        Raises:
            StoreError: its summary cannot be read.
        """
        summary = read_summary(self.path) or {}
        return summary.get("status") == "finished" and summary.get("steps") == steps

    def open_at_step(self, config_toml: str, step: int, policy_step: int) -> None:
        """Open a run to resume after `step`; remove everything of later steps and all unfinished files.

        Damaged lines of metrics, such as after a power failure, are left out with a warning.

        Raises:
            ConfigError: it cannot be written.
            StoreError: its metrics cannot be read.
        """
        rows = [_parse_metric_row(line) for line in read_whole_lines(self.path / METRICS)]
        self.metric_rows = [row for row in rows if row is not None and row["step"] <= step]
        if damaged := rows.count(None):
            _log.warning("%s: damaged lines that are left out: %d", self.path / METRICS, damaged)
        with self.catch_write_errors():
            self._truncate(config_toml, step, policy_step)

    def _truncate(self, config_toml: str, step: int, policy_step: int) -> None:
        """Remove unfinished files and everything of later steps, and write the settings."""
        # Only a resumed run that has steps left gets here, so a finished one keeps its leftovers.
        for parent in (self.path, self.checkpoints_folder, self.states_folder):
            remove_left_folders(parent)
        remove_left_files(self.path, RUN)
        write_text_atomically(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in self.metric_rows))
        self.checkpoints_folder.mkdir(exist_ok=True)  # a process may have been killed before it made the folder
        # Later steps are trained again: remove their trajectories and checkpoints.
        for file in (self.path / "trajectories").glob("[0-9]*.jsonl.gz"):
            if _parse_number(file.name.removesuffix(".jsonl.gz")) > step:
                file.unlink()
        for folder in self.checkpoints_folder.glob("checkpoint-[0-9]*"):
            if _parse_number(folder.name.removeprefix("checkpoint-")) > policy_step:
                shutil.rmtree(folder)
        write_text_atomically(self.path / CONFIG, config_toml)

    @property
    def checkpoints_folder(self) -> Path:
        """Folder of exported models."""
        return self.path / "checkpoints"

    @property
    def states_folder(self) -> Path:
        """Folder of the training states that a run resumes from."""
        return self.path / "states"

    def write_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        trajectories: Sequence[Trajectory],
        credit: Sequence[Sequence[LineCredit]] = (),
    ) -> None:
        """Append a row to `metrics.jsonl`, and store the step's trajectories with the credit of their lines.

        Raises:
            ConfigError: they cannot be written. Earlier steps stay readable, and the run can be resumed from them.
        """
        row = {"step": step, **metrics}
        with self.catch_write_errors():
            # Trajectories first: a step counts as stored only once its row of metrics is on disk.
            write_step(self.path / "trajectories", step, trajectories, credit)
            with (self.path / METRICS).open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.metric_rows.append(row)

    def write_tokens(self, texts: Sequence[str]) -> None:
        """Store the text of each token id, for readers without a tokenizer.

        Raises:
            ConfigError: it cannot be written.
        """
        with self.catch_write_errors():
            write_tokens(self.path / "trajectories", texts)

    def write_summary(self, summary: Mapping[str, Json]) -> None:
        """Write `summary.json` atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        with self.catch_write_errors():
            write_text_atomically(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def catch_write_errors(self) -> AbstractContextManager[None]:
        """Turn an operating system's write error in the block into a one-line ConfigError with a remedy.

        Raises (in the block):
            ConfigError: the operating system refused to write.
        """
        return catch_os_errors("run folder", self.path, then=", then --resume")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for this process while the block lasts; create its folder if it does not exist.

        Raises:
            ConfigError: another process holds the lock, or the folder cannot be created.
        """
        # Only taking the lock is inside `catch_write_errors`: errors of the caller's block pass unchanged.
        with ExitStack() as stack:
            with self.catch_write_errors():
                stack.enter_context(RUN.claim(self.path))
            yield

    def write_report(self) -> None:
        """Write `report.html`. Log an error as a warning only, because it must not hide why a run stopped."""
        try:
            write_report(self.path)
        except (ReplRLError, OSError) as error:
            _log.warning("report.html could not be written: %s", error)


def _has_content(folder: Path) -> bool:
    """Return True unless `folder` holds at most the unfinished files of a `train` that was killed at its start."""
    is_ours = read_maker(folder) == RUN.verb
    return any(
        not (is_ours and any(fnmatch(name, pattern) for pattern in _UNFINISHED)) for name in list_contents(folder)
    )


def _parse_metric_row(line: str) -> Mapping[str, float] | None:
    """Return a row of metrics, or None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _parse_number(text: str) -> int:
    """Return the number in a file name, or -1 if it is none, because a user gave the name."""
    return int(text) if text.isascii() and text.isdigit() else -1


FREE = frozenset(
    {"name", "out", "overwrite", "resume", "checkpoint", "workers", "trainer.save_steps", "trainer.report_to"}
)
"""Settings that may differ, because they have no influence on the trained policy."""
STEPS = "trainer.steps"
"""Setting that may differ, but not be below the step of the newest saved state."""


def check_same_settings(run: Path, config_toml: str) -> None:
    """Check that the run in the folder `run` can resume with these settings.

    Raises:
        ConfigError: settings differ; the message names each.
    """
    differences = _describe_differences(run / "config.toml", config_toml)
    if differences:
        remedy = "give the run's own (--config RUN/config.toml has them), or another --name"
        raise ConfigError("settings", "; ".join(differences), remedy)


def _describe_differences(file: Path, config_toml: str) -> list[str]:
    """Describe each setting that differs between the file `file` and ours, except those that may."""
    current = rename_recorded(dict(flatten(tomllib.loads(config_toml))))
    # A setting that the older version did not record counts with the value that describes its behaviour.
    saved = {**ADDED, **rename_recorded(dict(flatten(load_toml(file))))}
    saved = {name: value for name, value in saved.items() if name in current or name not in ADDED}
    differences = [
        f"{name} is {_format_setting(current, name)}, the run's {_format_setting(saved, name)}"
        for name in sorted({*current, *saved} - FREE - {STEPS})
        if current.get(name) != saved.get(name)
    ]
    # Equal judges in another order decide differently if a task is solved.
    orders = get_judge_order(current), get_judge_order(saved)
    if orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]):
        differences.append(f"the first of judges is {orders[0][0]!r}, the run's {orders[1][0]!r}")
    # A run may end early, or continue, but not before the step that it resumes from.
    saved_step = max((_parse_number(path.name) for path in file.parent.glob("states/[0-9]*")), default=0)
    steps = current.get(STEPS, saved_step)
    if not isinstance(steps, int) or steps < saved_step:
        differences.append(f"{STEPS} is {_format_setting(current, STEPS)}, and step {saved_step} is saved")
    return differences


def _format_setting(settings: Mapping[str, object], name: str) -> str:
    if name not in settings:
        return "left out"
    return format_component(name, settings[name]) or repr(settings[name])
