"""`runs/<name>/`: what a training run leaves behind."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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

_log = logging.getLogger(__name__)


def _trained(folder: Path) -> bool:
    """True for a folder with what version 0.2 made first: the settings of a training, and a folder for checkpoints."""
    try:
        return "trainer" in settings_of(folder) and (folder / "checkpoints").is_dir()
    except StoreError:
        return False


RUN = Output(
    "train",
    "run folder",
    (
        *(CONFIG, METRICS, SUMMARY, "trajectories", "checkpoints", "states", "report.html", "curves.png"),
        *("fleet", "fleet.json", "tensorboard", ".unfinished-*", ".*.unfinished"),
    ),
    _trained,
    "choose another --name",
)
"""The folder of a run: what is in one, and how it is recognised."""


class RunFolder:
    """The files of one run. It exists on disk only after `create`."""

    def __init__(self, path: Path, overwrite: bool, resume: bool = False, main: bool = True) -> None:
        """Refuse early what could not be written later; nothing is written or removed yet.

        A link to a folder stands for that folder.

        Args:
            path: the folder.
            overwrite: a run that is there is to be replaced.
            resume: a run that is there is to be resumed.
            main: False for the other processes of a training, which only read.

        Raises:
            ConfigError: the folder exists and is neither to be replaced nor gone on with, or both at once; it is no
                run's; another process is at work on it; or its parent cannot be written.
        """
        if overwrite and resume:
            raise ConfigError("resume", resume, "a run that is replaced cannot be gone on with; leave one of both out")
        self.path = path
        self.rows: list[Mapping[str, float]] = []
        self._overwrite = overwrite
        if main:
            self._refuse(overwrite, resume)

    def _refuse(self, overwrite: bool, resume: bool) -> None:
        place = followed("run folder", self.path)
        if place.exists() and not (overwrite or resume):
            raise self._there()
        RUN.refuse_owned(place)
        if overwrite:
            RUN.refuse_other(place)
        if resume and place.exists():
            self._refuse_foreign(place)
        parent = next(p for p in Path(os.path.realpath(place)).parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            remedy = f"{parent} is not a writable folder; choose another --out"
            raise ConfigError("run folder", str(self.path), remedy)

    def _there(self) -> ConfigError:
        remedy = "choose another --name, --resume to go on with that run, or --overwrite to replace it"
        return ConfigError("run folder", str(self.path), remedy)

    def _refuse_foreign(self, place: Path) -> None:
        """Refuse to resume what is no run: its settings are compared only where it has some."""
        if not place.is_dir():
            raise ConfigError("run folder", str(self.path), "it is no folder; choose another --name")
        if contents(place) and not (place / CONFIG).is_file():
            remedy = f"it has no {CONFIG}, so it is no run that can be resumed; choose another --name"
            raise ConfigError("run folder", str(self.path), remedy)

    def create(self, config_toml: str) -> None:
        """Make the folder with its `config.toml`; an older run of that name is removed.

        Raises:
            ConfigError: it cannot be made; or there is something in it by now that may not be replaced.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if contents(self.path):
                if not self._overwrite:
                    raise self._there()
                RUN.refuse_other(self.path)
                clear(self.path)
            if maker(self.path) != RUN.verb:  # before all else, so that a run that is killed here can be replaced
                mark(self.path, RUN.verb)
            write_whole(self.path / CONFIG, config_toml)
            self.checkpoints.mkdir()

    @property
    def begun(self) -> bool:
        """True when there is a run already."""
        return self.path.is_dir() and bool(contents(self.path))

    def finished(self, steps: int) -> bool:
        """True when the run ended well, after as many steps.

        Raises:
            StoreError: its summary cannot be read.
        """
        said = summary_of(self.path) or {}
        return said.get("status") == "finished" and said.get("steps") == steps

    def reopen(self, config_toml: str, step: int, policy_step: int) -> None:
        """Take up a run whose next step is `step` + 1: nothing of a later one, or of one that was torn, is left.

        Raises:
            ConfigError: it cannot be written to.
        """
        rows = map(json.loads, whole_lines(self.path / METRICS))
        self.rows = [row for row in rows if row["step"] <= step]
        with self.writing():
            self._cut(config_toml, step, policy_step)

    def _cut(self, config_toml: str, step: int, policy_step: int) -> None:
        for place in (self.path, self.checkpoints, self.states):  # a run that has nothing left to write sweeps none
            remove_left_folders(place)
        remove_left_files(self.path)
        write_whole(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in self.rows))
        for file in (self.path / "trajectories").glob("[0-9]*.jsonl.gz"):
            if int(file.name.partition(".")[0]) > step:
                file.unlink()
        for folder in self.checkpoints.glob("checkpoint-[0-9]*"):
            if int(folder.name.rpartition("-")[2]) > policy_step:
                shutil.rmtree(folder)
        write_whole(self.path / CONFIG, config_toml)

    @property
    def checkpoints(self) -> Path:
        """Models, for whoever uses them."""
        return self.path / "checkpoints"

    @property
    def states(self) -> Path:
        """What the run goes on from."""
        return self.path / "states"

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        trajectories: Sequence[Trajectory],
        credit: Sequence[Sequence[LineCredit]] = (),
    ) -> None:
        """Append a row to `metrics.jsonl` and store the step's trajectories, with what their lines were worth.

        Raises:
            ConfigError: they cannot be written. What was written before can be read, and gone on from.
        """
        row = {"step": step, **metrics}
        with self.writing():
            write_step(self.path / "trajectories", step, trajectories, credit)
            with (self.path / METRICS).open("a") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        self.rows.append(row)

    def name_tokens(self, texts: Sequence[str]) -> None:
        """Keep the text of each token id, for readers without a tokenizer.

        Raises:
            ConfigError: it cannot be written.
        """
        with self.writing():
            write_tokens(self.path / "trajectories", texts)

    def summarise(self, summary: Mapping[str, Json]) -> None:
        """Write `summary.json` whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        with self.writing():
            write_whole(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def writing(self) -> AbstractContextManager[None]:
        """Have what cannot be written in the block told as one line, with a remedy.

        Raises (in the block):
            ConfigError: the system refused something.
        """
        return writing("run folder", self.path, then=", then --resume")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the run for this process alone, while the block lasts. A folder that is not there is made.

        Raises:
            ConfigError: another process has it, or it cannot be made.
        """
        with ExitStack() as stack:
            with self.writing():
                stack.enter_context(RUN.claimed(self.path))
            yield

    def report(self) -> None:
        """Write `report.html`. What prevents it is a warning: it must not hide why a run stopped."""
        try:
            write_report(self.path)
        except (ReplRLError, OSError) as error:
            _log.warning("report.html could not be written: %s", error)
