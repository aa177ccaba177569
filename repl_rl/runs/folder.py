"""`runs/<name>/`: what a training run leaves behind."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from repl_rl.credit.credited import LineCredit
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.machine.alone import alone
from repl_rl.machine.files import Json, write_whole
from repl_rl.machine.refused import writing
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.report import write_report
from repl_rl.runs.store import write_step, write_tokens
from repl_rl.runs.told import CONFIG, METRICS, SUMMARY, summary_of, whole_lines

_log = logging.getLogger(__name__)


class RunFolder:
    """The files of one run. It exists on disk only after `create`."""

    def __init__(self, path: Path, overwrite: bool, resume: bool = False) -> None:
        """Refuse early what could not be written later.

        Raises:
            ConfigError: the folder exists and is neither to be replaced nor gone on with, or both at once; or its
                parent cannot be written.
        """
        if overwrite and resume:
            raise ConfigError("resume", resume, "a run that is replaced cannot be gone on with; leave one of both out")
        if path.exists() and not (overwrite or resume):
            remedy = "choose another --name, --resume to go on with that run, or --overwrite to replace it"
            raise ConfigError("run folder", str(path), remedy)
        parent = next(p for p in path.resolve().parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise ConfigError("run folder", str(path), f"{parent} is not a writable folder; choose another --out")
        self.path = path
        self.rows: list[Mapping[str, float]] = []

    def create(self, config_toml: str) -> None:
        """Make the folder with its `config.toml`; an older run of that name is removed.

        Raises:
            ConfigError: it cannot be made.
        """
        with self.writing():
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
            write_whole(self.path / CONFIG, config_toml)
            self.checkpoints.mkdir()

    @property
    def begun(self) -> bool:
        """True when there is a run already."""
        return self.path.is_dir() and any(self.path.iterdir())

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
        """Have the run for this process alone, while the block lasts. The folder must exist.

        Raises:
            ConfigError: another process has it.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(alone(self.path))
            except BlockingIOError as error:
                remedy = "another process is at work on that run; wait for its end, or choose another --name"
                raise ConfigError("run folder", str(self.path), remedy) from error
            yield

    def report(self) -> None:
        """Write `report.html`. What prevents it is a warning: it must not hide why a run stopped."""
        try:
            write_report(self.path)
        except (ReplRLError, OSError) as error:
            _log.warning("report.html could not be written: %s", error)
