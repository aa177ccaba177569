"""`runs/<name>/`: what a training run leaves behind."""

import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from repl_rl.credit.credited import LineCredit
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.machine.files import Json, write_whole
from repl_rl.record.trajectory import Trajectory
from repl_rl.runs.report import write_report
from repl_rl.runs.store import write_step, write_tokens

_log = logging.getLogger(__name__)


class RunFolder:
    """The files of one run. It exists on disk only after `create`."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Refuse early what could not be written later.

        Raises:
            ConfigError: the folder exists and `overwrite` is False, or its parent cannot be written.
        """
        if path.exists() and not overwrite:
            raise ConfigError("run folder", str(path), "choose another --name, or --overwrite to replace that run")
        parent = next(p for p in path.resolve().parents if p.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise ConfigError("run folder", str(path), f"{parent} is not a writable folder; choose another --out")
        self.path = path
        self.rows: list[Mapping[str, float]] = []

    def create(self, config_toml: str) -> None:
        """Make the folder with its `config.toml`; an older run of that name is removed."""
        if self.path.exists():
            shutil.rmtree(self.path)
        self.checkpoints.mkdir(parents=True)
        (self.path / "config.toml").write_text(config_toml)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        trajectories: Sequence[Trajectory],
        credit: Sequence[Sequence[LineCredit]] = (),
    ) -> None:
        """Append a row to `metrics.jsonl` and store the step's trajectories, with what their lines were worth."""
        row = {"step": step, **metrics}
        self.rows.append(row)
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        write_step(self.path / "trajectories", step, trajectories, credit)

    def name_tokens(self, texts: Sequence[str]) -> None:
        """Keep the text of each token id, for readers without a tokenizer."""
        write_tokens(self.path / "trajectories", texts)

    def summarise(self, summary: Mapping[str, Json]) -> None:
        """Write `summary.json` whole or not at all."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def report(self) -> None:
        """Write `report.html`. What prevents it is a warning: it must not hide why a run stopped."""
        try:
            write_report(self.path)
        except (ReplRLError, OSError) as error:
            _log.warning("report.html could not be written: %s", error)
