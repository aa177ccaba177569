"""What a server is told: a policy and its world, said here or by a stored run."""

from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.serve import ServeConfig
from repl_rl.engine import Transformers
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox import Docker, Limits

RUN = """
model = "builtin:quickstart"
name = "mine"
tasks = "gsm8k:train.jsonl"
judge = "task"
engine = "vllm"
sandbox = "unsafe"
sampler = "repl(max_error_streak=3)"
prompt = "few_shot"
concurrency = 32
seed = 7

[rollout]
max_lines = 5

[limits]
memory_mb = 700

[trainer]
steps = 3
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text(RUN)
    return tmp_path / "mine"


def test_a_run_is_served_with_its_prompt_its_sampler_and_its_limits(run: Path) -> None:
    config = ServeConfig(run=run, engine=Transformers(), sandbox=Docker(), concurrency=2)
    played = RolloutConfig.from_run(run, sandbox="local")
    assert (played.rollout, played.limits.memory_mb) == (RolloutLimits(max_lines=5), 700)
    here = RolloutConfig(
        engine=Transformers(),
        sandbox=Docker(),
        sampler="repl(max_error_streak=3)",
        prompt="few_shot",
        add_bos_token=False,
        prompt_space="observed",
        concurrency=2,
        rollout=RolloutLimits(max_lines=5),
        limits=Limits(memory_mb=700),
    )
    assert config.served_config == here
    assert config.model_name == "mine"
    assert replace(config, name="other").model_name == "other"


def test_the_policy_that_a_run_trained_is_the_one_that_is_served(run: Path) -> None:
    (run / "checkpoints" / "final").mkdir(parents=True)
    assert ServeConfig(run=run).served_config.model == str(run / "checkpoints" / "final")


@pytest.mark.parametrize("flags", ["--prompt base", "--rollout.max-lines 3", "--model FOLDER", "--limits.cpu-s 9"])
def test_what_the_run_says_is_not_said_twice(run: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--run", str(run), *flags.split()]) == 2
    assert "the run says it" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--run", str(tmp_path / "none")]) == 2
    assert "no config.toml" in capsys.readouterr().err


def test_a_folder_is_called_by_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    assert ServeConfig(model=str(tmp_path / "policy")).model_name == "policy"
    assert ServeConfig().model_name == "builtin:quickstart"
    assert ServeConfig(model="owner/name").model_name == "owner/name"
