"""The world of a run: read in one way, opened by two doors, and found again in what a run has recorded."""

import asyncio
from dataclasses import fields, replace
from pathlib import Path

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.engine import RequestMode, Transformers, Vllm
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import OF_A_RUN, RolloutConfig, find_recorded_task
from repl_rl.samplers import load_sampler
from repl_rl.sandbox import Docker, Limits, Local, Unsafe
from repl_rl.settings.argument_parser import dump_toml
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.train import train

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results" / "quickstart"
OLDER = Path(__file__).parents[1] / "stored" / "older_run"

OLD = """
engine = "vllm"
sandbox = "docker"
preload = "json"
sampler = "repl"
overshoot = "carry"
concurrency = 32
name = "old"
train_tasks = 64

[rollout]
max_lines = 5
optimistic = true
give_up_after = 3

[limits]
memory_mb = 700
open_files = 64
inodes = 4096

[docker]
memory_mb = 2048
cpus = 2.0
processes = 2048

[engine_options]
context_tokens = 256
dtype = "bfloat16"
seed = 0
max_sessions = 256
threads = 1
drive = "request"
sleep = false
verbose = false

[trainer]
steps = 3
line_weight = 0.5
"""
"""As the version before this one wrote it."""


def written(folder: Path, text: str) -> Path:
    (folder / "config.toml").write_text(text)
    return folder


def test_a_run_of_the_version_before_keeps_its_engine_options_its_preload_and_its_limits(tmp_path: Path) -> None:
    world = RolloutConfig.from_run(written(tmp_path, OLD))
    assert world.engine == Vllm(cpu_threads=1, request_mode=RequestMode.REQUEST)
    assert (world.context_tokens, world.dtype) == (256, "bfloat16")
    assert world.sandbox == Docker(memory_mb=2048)
    assert (world.preload, world.newline_tokens, world.concurrency) == (("json",), "carry", 32)
    assert world.limits == Limits(memory_mb=700)
    assert world.rollout == RolloutLimits(max_lines=5)
    sampler = load_sampler(world.sampler)
    assert isinstance(sampler, ReplSampler)
    assert sampler.max_error_streak == 3


def test_another_engine_or_sandbox_takes_the_place_of_the_recorded_one_and_the_same_keeps_its_options(
    tmp_path: Path,
) -> None:
    run = written(tmp_path, OLD)
    assert RolloutConfig.from_run(run, engine="transformers", sandbox="unsafe").engine == Transformers()
    assert RolloutConfig.from_run(run, sandbox="unsafe").sandbox == Unsafe()
    assert RolloutConfig.from_run(run, engine="vllm", sandbox="docker") == RolloutConfig.from_run(run)


def test_a_run_of_an_older_version_is_read_and_the_published_one_is_the_world_of_make_train() -> None:
    world = RolloutConfig.from_run(OLDER)
    assert (world.engine, world.sandbox, world.newline_tokens) == (Vllm(), Local(), "refuse")
    assert RolloutConfig.from_run(PUBLISHED) == replace(
        RolloutConfig(), add_bos_token=False, prompt_space="observed"
    ), "it was made before plain prompts began with BOS, and the space after a prompt was ever sampled"


def test_what_a_recorded_setting_cannot_be_any_more_is_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = RolloutConfig.from_run(written(tmp_path, OLD.replace("inodes = 4096", "inodes = 100")))
    assert world.limits == Limits(memory_mb=700)
    assert "limits.inodes = 100 was recorded" in caplog.text
    assert "rollout.optimistic = True was recorded" in caplog.text


@pytest.mark.parametrize(
    ("recorded", "read"),
    [
        ("repl(optimistic=True)", "repl"),
        ("repl(optimistic=True, max_error_streak=2)", "repl(max_error_streak=2)"),
        ("repl(max_error_streak=2, optimistic=True)", "repl(max_error_streak=2)"),
    ],
)
def test_a_run_that_was_sampled_optimistically_is_read_without_it(recorded: str, read: str, tmp_path: Path) -> None:
    assert RolloutConfig.from_run(written(tmp_path, f'sampler = "{recorded}"\n')).sampler == read


@pytest.mark.parametrize(("text", "complaint"), [
    ('sandbox = "moon"', r"sandbox is 'moon'; choose one of local"),
    ("[rollout]\nmax_lnes = 3", r"unknown key in .*config.toml is 'rollout.max_lnes'; did you mean"),
    ("[rollout]\nmax_lines = 0", r"rollout.max_lines is 0; give at least 1"),
    ('sandbx = "local"', "unknown key .*'sandbx'; did you mean 'sandbox'"),
    ("[docker]\nmemory_mb = 1", "docker.memory_mb is 1"),
    ('concurrency = "many"', "concurrency"),
    ("=", "it is not TOML"),
])  # fmt: skip
def test_a_recorded_run_is_read_with_the_checks_of_the_command_line(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        RolloutConfig.from_run(written(tmp_path, f'sandbox = "docker"\n{text}' if "docker" in text else text))


def test_what_a_run_says_beside_its_world_is_known() -> None:
    own = {field.name for field in fields(TrainConfig)} - {field.name for field in fields(RolloutConfig)}
    assert own == OF_A_RUN


def test_a_world_is_found_again_in_the_settings_of_its_run(tmp_path: Path) -> None:
    config = TrainConfig(engine="transformers", sandbox="unsafe", preload=("json",), concurrency=4, name="mine")
    world = RolloutConfig.from_run(written(tmp_path, dump_toml(config)), sandbox="unsafe")
    assert world == RolloutConfig(engine="transformers", sandbox="unsafe", preload=("json",), concurrency=4)


def test_trajectories_of_no_run_have_the_default_world(tmp_path: Path) -> None:
    assert RolloutConfig.from_run(tmp_path) == RolloutConfig()
    assert find_recorded_task(tmp_path, "nobody's", RolloutConfig()) is None


def test_consoles_have_the_limits_and_the_preloads_of_their_world() -> None:
    world = RolloutConfig(sandbox="unsafe", preload=("json", "colorsys"), limits=Limits(output_bytes=256))

    async def work() -> tuple[str, str]:
        async with world.open_consoles(warm=1) as sandbox, sandbox.session() as console:
            loaded = await console.push("import sys; 'colorsys' in sys.modules")
            return loaded.text, (await console.push("print('a' * 1000)")).text

    loaded, flood = asyncio.run(work())
    assert loaded == "True\n"
    assert len(flood) < 400


def test_what_a_person_can_mend_is_refused_before_anything_is_opened() -> None:
    async def opened(world: RolloutConfig) -> None:
        async with world.open_rollouts():
            raise AssertionError("nothing is opened")

    for world, complaint in (
        (RolloutConfig(sampler="repl(max_error_streak=9)"), "max_error_streak is 9"),
        (RolloutConfig(model="/no/such"), "/no/such"),
        (RolloutConfig(sampler="feedback"), "chat template"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            asyncio.run(opened(world))
    with pytest.raises(ConfigError, match="prompt is 'poem'"):
        RolloutConfig(prompt="poem")


@pytest.mark.parametrize(
    ("world", "config", "complaint"),
    [
        (RolloutConfig(sampler="feedback"), TrainerConfig(prompts_per_step=4), "chat template"),
        (RolloutConfig(), TrainerConfig(prompts_per_step=4, estimator="outcom"), "outcom"),
        (RolloutConfig(engine=Vllm(block_size=16)), TrainerConfig(prompts_per_step=4), r"block_size is 16"),
        (RolloutConfig(), TrainerConfig(prompts_per_step=6), "training tasks is 5.*--trainer.prompts-per-step"),
    ],
)
def test_a_run_from_python_is_refused_before_it_has_a_folder(
    world: RolloutConfig, config: TrainerConfig, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        train(world, config, out=tmp_path / "run", train_tasks=5)
    assert not (tmp_path / "run").exists()


def test_a_world_is_a_value() -> None:
    assert RolloutConfig(engine="vllm") == RolloutConfig(engine=Vllm()) != replace(RolloutConfig(), seed=1)
