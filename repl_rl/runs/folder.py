"""Run folder `runs/<name>/`: settings, metrics, trajectories and checkpoints of one training run."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from repl_rl.credit.credited import LineCredit
from repl_rl.errors import ConfigError, ReplRLError, StoreError
from repl_rl.machine.alone import maker, mark
from repl_rl.machine.files import Json, write_whole
from repl_rl.machine.folders import remove_left_files, remove_left_folders
from repl_rl.machine.outputs import Output, clear, contents, followed
from repl_rl.machine.refused import writing
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.report import write_report
from repl_rl.runs.store import write_step, write_tokens
from repl_rl.runs.told import CONFIG, METRICS, SUMMARY, settings_of, summary_of, whole_lines

_MOST_BYTES = 255
"""Length of a file name that all usual file systems allow."""
_FILES = (CONFIG, METRICS, SUMMARY, "report.html", "curves.png", "fleet.json")
"""Files at the top of a run folder."""
_UNFINISHED = tuple(f".{name}.[0-9]*.unfinished" for name in _FILES)
"""Patterns of the same files while they are being written; another name is the user's."""
_log = logging.getLogger(__name__)


def _trained(folder: Path) -> bool:
    """Return True for a run folder of version 0.2, by its `trainer` settings and its `checkpoints` folder."""
    try:
        return "trainer" in settings_of(folder) and (folder / "checkpoints").is_dir()
    except StoreError:
        return False


def _is_begun(folder: Path) -> bool:
    """Return True unless `folder` holds at most the unfinished files of a `train` that was killed at its start."""
    ours = maker(folder) == RUN.verb
    return any(not (ours and any(fnmatch(name, each) for each in _UNFINISHED)) for name in contents(folder))


RUN = Output(
    "train",
    "run folder",
    (
        *(*_FILES, "trajectories", "checkpoints", "states", "fleet", "tensorboard"),
        *_UNFINISHED,
    ),
    _trained,
    "choose another --name",
)
"""Output type of a run folder: its file names, and the test that recognizes one of version 0.2."""


def _row(line: str) -> Mapping[str, float] | None:
    """Return a row of metrics, or None if the line is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _number(text: str) -> int:
    """Return the number in a file name, or -1 if it is none, because a user gave the name."""
    return int(text) if text.isascii() and text.isdigit() else -1


class RunFolder:
    """Files of one run; `create` makes them on disk."""

    def __init__(self, path: Path, overwrite: bool, resume: bool = False, main: bool = True) -> None:
        """Check early that the run folder can be written; write and remove nothing yet.

        A link to a folder is replaced by its target.

        Args:
            path: the run folder.
            overwrite: replace an existing run.
            resume: resume an existing run.
            main: False on the other ranks of a training, which only read.

        Raises:
            ConfigError: the folder exists and is to be neither replaced nor resumed; both are asked for; it is not a
                run folder; another process uses it; or its parent cannot be written.
        """
        if overwrite and resume:
            raise ConfigError("resume", resume, "a run that is replaced cannot be gone on with; leave one of both out")
        self.path = path
        self.rows: list[Mapping[str, float]] = []
        self._overwrite = overwrite
        if main:
            self._refuse(overwrite, resume)

    def _refuse(self, overwrite: bool, resume: bool) -> None:
        if len(os.fsencode(self.path.name)) > _MOST_BYTES:
            remedy = f"a name has at most {_MOST_BYTES} bytes; shorten --name"
            raise ConfigError("run folder", f"{self.path.name[:20]}...", remedy)
        place = followed("run folder", self.path)
        if place.exists() and not (overwrite or resume):
            raise self._there()
        RUN.refuse_owned(place)
        if overwrite:
            RUN.refuse_other(place)
        if resume and place.exists():
            self._refuse_foreign(place)
        parent = next(p for p in Path(os.path.realpath(place)).parents if p.exists())
        # The folder may not exist yet, so its nearest existing parent decides.
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            remedy = f"{parent} is not a writable folder; choose another --out"
            raise ConfigError("run folder", str(self.path), remedy)

    def _there(self) -> ConfigError:
        remedy = "choose another --name, --resume to go on with that run, or --overwrite to replace it"
        return ConfigError("run folder", str(self.path), remedy)

    def _refuse_foreign(self, place: Path) -> None:
        """Raise ConfigError if a resume would start from a folder that is not a run."""
        if not place.is_dir():
            raise ConfigError("run folder", str(self.path), "it is no folder; choose another --name")
        if _is_begun(place) and not (place / CONFIG).is_file():
            remedy = f"it has no {CONFIG}, so it is no run that can be resumed; choose another --name"
            raise ConfigError("run folder", str(self.path), remedy)

    def create(self, config_toml: str) -> None:
        """Create the folder with its `config.toml`; remove an older run of that name.

        Raises:
            ConfigError: it cannot be created, or it now holds something that may not be replaced.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            # Check again: the folder may have changed since `__init__`.
            if not _is_begun(self.path):
                clear(self.path)
            else:
                if not self._overwrite:
                    raise self._there()
                RUN.refuse_other(self.path)
                clear(self.path)
            # Write the owner mark before all else, so that a run that is killed here can be replaced.
            if maker(self.path) != RUN.verb:
                mark(self.path, RUN.verb)
            write_whole(self.path / CONFIG, config_toml)
            self.checkpoints.mkdir()

    @property
    def begun(self) -> bool:
        """True if the folder already holds a run."""
        return self.path.is_dir() and _is_begun(self.path)

    def finished(self, steps: int) -> bool:
        """Return True if the run finished without an error after `steps` steps.

        Raises:
            StoreError: its summary cannot be read.
        """
        said = summary_of(self.path) or {}
        return said.get("status") == "finished" and said.get("steps") == steps

    def reopen(self, config_toml: str, step: int, policy_step: int) -> None:
        """Open a run to resume after `step`; remove everything of later steps and all unfinished files.

        Damaged lines of metrics, such as after a power failure, are left out with a warning.

        Raises:
            ConfigError: it cannot be written.
            StoreError: its metrics cannot be read.
        """
        rows = [_row(line) for line in whole_lines(self.path / METRICS)]
        self.rows = [row for row in rows if row is not None and row["step"] <= step]
        if damaged := rows.count(None):
            _log.warning("%s: damaged lines that are left out: %d", self.path / METRICS, damaged)
        with self.writing():
            self._cut(config_toml, step, policy_step)

    def _cut(self, config_toml: str, step: int, policy_step: int) -> None:
        # Only a resumed run that has steps left gets here, so a finished one keeps its leftovers.
        for place in (self.path, self.checkpoints, self.states):
            remove_left_folders(place)
        remove_left_files(self.path, RUN)
        write_whole(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.checkpoints.mkdir(exist_ok=True)  # a process may have been killed before it made the folder
        # Later steps are trained again: remove their trajectories and checkpoints.
        for file in (self.path / "trajectories").glob("[0-9]*.jsonl.gz"):
            if _number(file.name.removesuffix(".jsonl.gz")) > step:
                file.unlink()
        for folder in self.checkpoints.glob("checkpoint-[0-9]*"):
            if _number(folder.name.removeprefix("checkpoint-")) > policy_step:
                shutil.rmtree(folder)
        write_whole(self.path / CONFIG, config_toml)

    @property
    def checkpoints(self) -> Path:
        """Folder of exported models."""
        return self.path / "checkpoints"

    @property
    def states(self) -> Path:
        """Folder of the training states that a run resumes from."""
        return self.path / "states"

    def step(
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
        with self.writing():
            # Trajectories first: a step counts as stored only once its row of metrics is on disk.
            write_step(self.path / "trajectories", step, trajectories, credit)
            with (self.path / METRICS).open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.rows.append(row)

    def name_tokens(self, texts: Sequence[str]) -> None:
        """Store the text of each token id, for readers without a tokenizer.

        Raises:
            ConfigError: it cannot be written.
        """
        with self.writing():
            write_tokens(self.path / "trajectories", texts)

    def summarise(self, summary: Mapping[str, Json]) -> None:
        """Write `summary.json` atomically.

        Raises:
            ConfigError: it cannot be written.
        """
        with self.writing():
            write_whole(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def writing(self) -> AbstractContextManager[None]:
        """Turn an operating system's write error in the block into a one-line ConfigError with a remedy.

        Raises (in the block):
            ConfigError: the operating system refused to write.
        """
        return writing("run folder", self.path, then=", then --resume")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the run for this process while the block lasts; create its folder if it does not exist.

        Raises:
            ConfigError: another process holds the lock, or the folder cannot be created.
        """
        # Only taking the lock is inside `writing`: errors of the caller's block pass unchanged.
        with ExitStack() as stack:
            with self.writing():
                stack.enter_context(RUN.claimed(self.path))
            yield

    def report(self) -> None:
        """Write `report.html`. Log an error as a warning only, because it must not hide why a run stopped."""
        try:
            write_report(self.path)
        except (ReplRLError, OSError) as error:
            _log.warning("report.html could not be written: %s", error)
