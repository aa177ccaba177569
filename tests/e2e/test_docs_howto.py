"""Settings and scripts of docs/howto.md run; links of all pages lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.train import TrainConfig
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.store import write_step
from repl_rl.runs.trajectory_player import MOST, TrajectoryPlayer
from repl_rl.settings.argument_parser import parse
from repl_rl.tasks import load_tasks
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.trl_arguments import grpo_args
from tests.support import documents
from tests.support.documents import ROOT
from tests.unit.test_replay import played

PAGE = documents.PAGES["docs/howto.md"]


def blocks(language: str) -> list[str]:
    return documents.blocks(language, "docs/howto.md")


def script(containing: str) -> str:
    (found,) = [source for source in blocks("python") if containing in source]
    return found


def test_the_tasks_and_the_settings_of_the_page_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("problems.jsonl").write_text(blocks("json")[0])
    assert [task.judge for task in load_tasks("problems.jsonl")] == ["exact", "numeric"]
    Path("mine.toml").write_text(blocks("toml")[0])
    config = parse(TrainConfig, "train", ["--config", "mine.toml"])
    assert (config.model, config.rollout.max_lines, config.trainer.save_steps) == ("qwen", 16, 20)
    for chosen in (config.trainer, replace(config.trainer, dtype="bfloat16")):
        assert grpo_args(chosen, tmp_path).save_steps == 20


def test_the_page_trains_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train_mine.py").write_text(
        script("RolloutConfig(engine").replace("concurrency=8", 'concurrency=8, sandbox="unsafe"')
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = import_module("train_mine")
    final = module.main(TrainerConfig(steps=1, prompts_per_step=1, group_size=2), tmp_path / "mine")
    sys.modules.pop("train_mine")
    assert (final / "model.safetensors").is_file()
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        ".repl-rl",
        *("config.toml", "metrics.jsonl", "summary.json", "trajectories", "checkpoints", "states", "report.html"),
    }
    recorded = RolloutConfig.from_run(tmp_path / "mine", sandbox="unsafe")
    assert replace(recorded, model=RolloutConfig().model) == RolloutConfig(
        engine="transformers", sandbox="unsafe", concurrency=8
    )


@pytest.mark.heavy
def test_the_page_trains_in_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train_mine.py").write_text(script("RolloutConfig(engine"))
    (command,) = re.findall(r"^accelerate .*train_mine\.py$", PAGE, re.MULTILINE)
    program, *words = shlex.split(command)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), words[0], "--cpu", *words[1:]],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split()[:2] for line in done.stdout.splitlines()][-2:] == [["1", "12"], ["2", "12"]]


def test_the_player_and_the_kernel_of_the_page_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_step(Path("runs/quickstart"), 1, [played(["x = 6\n", "x\n", "exit()\n"])])
    namespace: dict[str, object] = {}
    exec(script("TrajectoryPlayer"), namespace)
    assert isinstance(namespace["player"], TrajectoryPlayer)
    assert main(["kernel", "install", "--prefix", str(tmp_path)]) == 0
    (spec,) = tmp_path.glob("share/jupyter/kernels/*/kernel.json")
    assert f"`{json.loads(spec.read_text())['display_name']}`" in PAGE


def test_the_page_about_replay_says_how_many_trajectories_the_player_takes() -> None:
    assert f"({MOST:,} at most)" in " ".join(documents.PAGES["docs/replay.md"].split())


def test_every_page_can_be_reached_from_the_readme_and_no_link_is_broken() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        if page.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                linked = (page.parent / target).resolve()
                assert linked.exists(), f"{page.name}: {target}"
                waiting.append(linked)
    pages = {
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("notebooks/*.ipynb"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
    }
    assert pages <= seen
