"""docs/training.md shows published runs and no others, and how they were made."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models.training import FIGURES, PAGE, block, command, record
from repl_rl.cli.train import TrainConfig
from repl_rl.settings.argument_parser import dump_toml, parse
from repl_rl.trainer.config import TrainerConfig


def test_every_share_stands_in_the_generated_block() -> None:
    assert not re.search(r"\d+(\.\d+)? ?%", PAGE.around)


def test_a_command_gives_the_settings_of_its_run_again(tmp_path: Path) -> None:
    config = TrainConfig(name="a", tasks="builtin:lists", curriculum=True, trainer=TrainerConfig(steps=7))
    (tmp_path / "config.toml").write_text(dump_toml(replace(config, overwrite=True)))
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished"}))
    words = command(record(tmp_path)).split()
    assert words[:2] == ["repl-rl", "train"]
    assert parse(TrainConfig, "train", words[2:]) == config
    (tmp_path / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    with pytest.raises(SystemExit, match="the run is interrupted"):
        record(tmp_path)


def test_the_table_of_the_page_is_that_of_the_published_runs() -> None:
    assert PAGE.text == block(json.loads(FIGURES.read_text()))


def test_two_task_families_and_two_samplers_were_learned_in_published_runs() -> None:
    runs = json.loads(FIGURES.read_text())
    learned = [run for run in runs if run["summary"]["solve_rate_last"] > run["summary"]["solve_rate_first"]]
    assert len({run["config"].get("tasks", "builtin:quickstart") for run in learned}) >= 2
    assert len({run["config"].get("sampler", "repl") for run in learned}) >= 2
