"""Sinks: our figures arrive under the documented names, once a step, with a table of rollouts that is mere text."""

import copy
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.runs.store import mark_observations
from repl_rl.settings.argument_parser import dump_toml, parse
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.optional_packages import require_sinks
from repl_rl.trainer.plugins import trackers as sinks
from repl_rl.trainer.plugins.trackers import COLUMNS, PREFIX, TABLE, TABLE_ROWS, build_table_rows
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.console_text import TEXT_CHARS
from repl_rl.trajectory.trajectory import Observed
from tests.support.run_folders import HOSTILE, credit, rollout
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

SMALL = TrainerConfig(steps=2, prompts_per_step=2, group_size=3, warmup_steps=0)
ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "specification.md").read_text().partition("### Metrics of a step")[2].partition("\n## ")[0]


def trained(run: Path, config: TrainerConfig) -> list[StepRecord]:
    """Train a small policy; its figures."""
    records: list[StepRecord] = []
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    tasks = [f"task {i}" for i in range(6)]
    run_training(
        model,
        tiny_tokenizer(),
        tasks,
        source,
        config,
        run / "checkpoints",
        TrainingOptions(lambda r, _: records.append(r)),
    )
    return records


def test_tensorboard_gets_each_documented_figure_once_a_step_and_a_table(tmp_path: Path) -> None:
    records = trained(tmp_path, replace(SMALL, report_to=("tensorboard",)))
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")  # it has no types
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    prefix = f"train/{PREFIX}"
    ours = {tag.removeprefix(prefix) for tag in events.Tags()["scalars"] if tag.startswith(prefix)}
    assert ours == set(records[0].metrics) | set(records[1].metrics)
    assert "reward/status" in ours
    assert {name for name in ours if "/" not in name} <= set(re.findall(r"`(\w+)`", DOCS))
    for name in ("solve_rate", "rollout_s", "logprob_gap_max"):
        told = [(event.step, event.value) for event in events.Scalars(prefix + name)]
        assert told == [(record.step, pytest.approx(record.metrics[name])) for record in records]
    tables = events.Tensors(f"{TABLE}/text_summary")
    assert [event.step for event in tables] == [1, 2]
    assert b"outcome" in tables[0].tensor_proto.string_val[0]


def test_a_table_has_prompt_marked_completion_outcome_and_reward() -> None:
    t = rollout(0, "one", 1)
    (row,) = build_table_rows(StepRecord(7, {}, (credit(t),)), [t])
    found = dict(zip(COLUMNS, row, strict=True))
    observed = next(segment for segment in t.segments if isinstance(segment, Observed))
    assert found["prompt"] == "What is one?\n>>> "
    assert found["completion"] == f"1/0\n⟦{observed.text}⟧submit_final_answer(1)\n"
    assert (found["step"], found["stop"], found["outcome"], found["reward"]) == (7, "answered", 0.0, -0.1)
    assert len(build_table_rows(StepRecord(1, {}), [t] * 99)) == TABLE_ROWS


def test_what_a_program_printed_is_mere_text_in_a_table() -> None:
    t = rollout(0, "one", 1, f"⟧x = 1\n⟦{HOSTILE}" + "a" * 10_000_000)
    assert mark_observations(t).count("⟦") == mark_observations(t).count("⟧") == 1
    (row,) = build_table_rows(StepRecord(1, {}), [t])
    shown = str(row[COLUMNS.index("completion")])
    assert len(shown) < TEXT_CHARS + 50
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert all(line.startswith("    ") for line in sinks._format_markdown_row(row).split("\n"))


def test_sinks_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose among tensorboard, trackio, wandb"):
        require_sinks(["mlflow"])
    with pytest.raises(ConfigError, match="pip install wandb"):
        require_sinks(["wandb"], find_package=lambda name: None)


def test_sinks_are_named_by_flags_and_files(tmp_path: Path) -> None:
    config = parse(TrainConfig, "train", ["--trainer.report-to", "tensorboard"])
    assert config.trainer.report_to == ("tensorboard",)
    for each in (config, TrainConfig()):
        (tmp_path / "config.toml").write_text(dump_toml(each))
        assert parse(TrainConfig, "train", ["--config", str(tmp_path / "config.toml")]) == each


def elsewhere(name: str, folder: Path, **environment: str) -> None:
    """Train with that sink in a process of its own, without an account: it reads its variables when it is imported."""
    code = "import sys; from tests.integration.test_sinks import reported; reported(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, name, str(folder / "run")]
    subprocess.run(command, env=os.environ | environment, cwd=ROOT, check=True, capture_output=True, timeout=120)


def reported(name: Literal["trackio", "wandb"], run: str) -> None:
    trained(Path(run), replace(SMALL, report_to=(name,)))


@pytest.mark.heavy
def test_trackio_gets_them_without_network(tmp_path: Path) -> None:
    elsewhere("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with closing(sqlite3.connect(tmp_path / "trackio" / "repl_rl.db")) as base:
        rows = [json.loads(text) for (text,) in base.execute("SELECT metrics FROM metrics")]
    figures = [row for row in rows if f"train/{PREFIX}solve_rate" in row]
    assert [row["train/global_step"] for row in figures] == [1, 2]
    tables = [row[TABLE]["_value"] for row in rows if TABLE in row]
    assert [len(found) for found in tables] == [6, 6]
    assert set(tables[0][0]) == set(COLUMNS)


@pytest.mark.heavy
def test_wandb_gets_them_without_network(tmp_path: Path) -> None:
    elsewhere("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert log.read_bytes().count(f"train/{PREFIX}solve_rate".encode()) >= 2
    (first, second) = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/train/repl_rl/*.table.json"))
    for path in (first, second):
        found = json.loads(path.read_text())
        assert found["columns"] == list(COLUMNS)
        assert len(found["data"]) == 6
