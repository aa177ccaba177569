"""Components with options: tables of files, flags and recorded runs; the old form with parentheses, with one line."""

import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_folder import check_same_settings
from repl_rl.runs.run_metadata import read_settings
from repl_rl.settings.argument_parser import dump_toml, parse
from repl_rl.settings.component_options import get_component_fields
from repl_rl.settings.migrate_run_settings import COMPONENTS, rename_recorded
from repl_rl.trainer.config import TrainerConfig

TABLES = """
[sampler]
type = "repl"
max_error_streak = 3
[checkpoint]
every_s = 30
[workers]
type = "local"
[trainer]
loss = { type = "cispo", clip_high = 4.0 }
kl.type = "k3"
lr_scheduler = { type = "cosine_with_min_lr", min_lr_rate = 0.1 }
[trainer.estimator]
type = "two_stream"
line_weight = 0.5
[trainer.importance_sampling]
tolerance = 0.01
[trainer.optimizer]
weight_decay = 0.1
"""
FLAGS = (
    *("--sampler.max-error-streak", "3", "--checkpoint.every-s=30", "--workers.type", "local"),
    *("--trainer.loss", "cispo", "--trainer.loss.clip-high", "4.0", "--trainer.kl.type=k3"),
    *("--trainer.lr-scheduler", "cosine_with_min_lr", "--trainer.lr_scheduler.min_lr_rate", "0.1"),
    *("--trainer.estimator", "two_stream", "--trainer.estimator.line-weight", "0.5"),
    *("--trainer.importance-sampling.tolerance", "0.01", "--trainer.optimizer.weight-decay", "0.1"),
)
TEXTS = """
sampler = "repl(max_error_streak=3)"
checkpoint = "within(every_s=30)"
workers = "local"
[trainer]
loss = "cispo(clip_high=4.0)"
kl = "k3"
lr_scheduler = "cosine_with_min_lr(min_lr_rate=0.1)"
estimator = "two_stream( line_weight = 0.5 )"
importance_sampling = "token_truncate(tolerance=0.01)"
optimizer = "adamw_torch_fused(weight_decay=0.1)"
"""
CONFIG = TrainConfig(
    sampler="repl(max_error_streak=3)",
    checkpoint="within(every_s=30)",
    trainer=TrainerConfig(
        loss="cispo(clip_high=4.0)",
        kl="k3",
        lr_scheduler="cosine_with_min_lr(min_lr_rate=0.1)",
        estimator="two_stream(line_weight=0.5)",
        importance_sampling="token_truncate(tolerance=0.01)",
        optimizer="adamw_torch_fused(weight_decay=0.1)",
    ),
)


def written(folder: Path, text: str, name: str = "mine.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def train(*words: str) -> TrainConfig:
    return parse(TrainConfig, "train", words)


def test_recorded_components_are_those_of_the_training_command() -> None:
    assert {*get_component_fields(TrainConfig)} == COMPONENTS


@pytest.mark.parametrize(
    ("key", "text"), [("states", "within(seconds=60, keep=2)"), ("checkpoint", "within(every_s=60, keep_last=2)")]
)
def test_the_recorded_default_of_older_versions_is_the_present_one(key: str, text: str) -> None:
    assert rename_recorded({key: text}) == {"checkpoint": TrainConfig().checkpoint}


def test_tables_and_flags_give_the_same_settings_without_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train("--config", str(written(tmp_path, TABLES))) == CONFIG
    assert train(*FLAGS) == CONFIG
    names = 'sampler = "fenced"\ncheckpoint = "never"\n[trainer]\nestimator = "process"\n'
    plain = train("--config", str(written(tmp_path, names)))
    assert (plain.sampler, plain.checkpoint, plain.trainer.estimator) == ("fenced", "never", "process")
    assert caplog.messages == []


def test_a_flag_changes_an_option_of_a_file_and_another_type_drops_them(tmp_path: Path) -> None:
    file = str(written(tmp_path, TABLES))
    assert train("--config", file, "--trainer.estimator.line-weight", "0.1").trainer.estimator == (
        "two_stream(line_weight=0.1)"
    )
    assert train("--config", file, "--trainer.estimator", "process").trainer.estimator == "process"


def test_texts_of_a_file_give_the_same_settings_and_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path, TEXTS)
    config = train("--config", str(file))
    assert replace(config, trainer=replace(config.trainer, estimator=CONFIG.trainer.estimator)) == CONFIG
    assert len(caplog.messages) == 7
    assert caplog.messages[-2] == (
        f"trainer.importance_sampling in {file} is a table now, "
        'trainer.importance_sampling = { type = "token_truncate", tolerance = 0.01 }; '
        "the form with parentheses goes in 0.5.0"
    )
    # The line is valid TOML, and gives the same setting.
    table = caplog.messages[-2].partition(" now, ")[2].rpartition(";")[0]
    assert rename_recorded(tomllib.loads(table)) == {
        "trainer": {"importance_sampling": "token_truncate(tolerance=0.01)"}
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--trainer.estimator", "two_stream(line_weight=0.5)"],
            "--trainer.estimator two_stream --trainer.estimator.line-weight 0.5",
        ),
        (["--sampler=repl(thinking='</think>')"], "--sampler repl --sampler.thinking '</think>'"),
        (
            ["--trainer.group-sampling", "refill(most=3)"],
            "--trainer.group-sampling dynamic_sampling --trainer.group-sampling.max-rounds 3",
        ),
    ],
)
def test_a_text_of_the_command_line_is_read_and_one_line_says_what_to_type(
    words: list[str], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = train(*words)
    option = words[0].partition("=")[0]
    assert caplog.messages == [
        f"{option} has its options as flags now, {told}; the form with parentheses goes in 0.5.0"
    ]
    config, again = (
        replace(each, trainer=replace(each.trainer, group_sampling="")) for each in (config, train(*shlex.split(told)))
    )
    assert again == config


def test_an_option_that_no_table_can_hold_stays_a_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "token_truncate(tolerance=None)"
    config = train("--trainer.importance-sampling", text)
    assert caplog.messages == []
    assert f'importance_sampling = "{text}"' in dump_toml(config)


def test_the_old_key_of_the_type_is_read_and_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, '[sampler]\nname = "repl"\nmax_error_streak = 3\n')
    assert train("--config", str(file)).sampler == "repl(max_error_streak=3)"
    assert caplog.messages == ["sampler.name is sampler.type now; the old name goes in 0.5.0"]


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        (
            '[trainer.estimator]\ntype = "nosuch"\nline_weight = 0.5',
            ["--trainer.estimator.type", "nosuch", "--trainer.estimator.line-weight", "0.5"],
            "estimator is 'nosuch'; choose one of outcome, two_stream",
        ),
        (
            '[trainer.loss]\ntype = "ppo"',
            ["--trainer.loss.type", "ppo"],
            "trainer.loss is 'ppo'; choose one of grpo",
        ),
        (
            '[trainer.estimator]\ntype = "two_stream"\nweight = 0.5',
            ["--trainer.estimator", "two_stream", "--trainer.estimator.weight", "0.5"],
            "option weight of trainer.estimator two_stream is '?0.5'?; its options are line_weight, given",
        ),
        (
            "[trainer.kl]\nbeta = 0.1",
            ["--trainer.kl.beta", "0.1"],
            "trainer.kl.beta is '?0.1'?; it has no effect without trainer.kl.type; give that too",
        ),
        (
            '[trainer.kl]\ntype = "k3"\nbeta = "much"',
            ["--trainer.kl", "k3", "--trainer.kl.beta", "much"],
            "trainer.kl.beta is 'much'; give a number above 0",
        ),
        (
            '[checkpoint]\nkeep_last = 1.5',
            ["--checkpoint.keep-last", "1.5"],
            "checkpoint.keep_last is 1.5; give a whole number",
        ),
        (
            '[checkpoint]\ntype = "never"\nevery_s = 3',
            ["--checkpoint", "never", "--checkpoint.every-s", "3"],
            "option every_s of checkpoint never is '?3'?; it has no options",
        ),
        (
            '[trainer.lr_scheduler]\ntype = "cosine"\ncycles = 1',
            ["--trainer.lr-scheduler", "cosine", "--trainer.lr-scheduler.cycles", "1"],
            "option cycles of trainer.lr_scheduler cosine is '?1'?; its options are num_cycles",
        ),
        (
            "[trainer.loss]\ntype = 3",
            ["--trainer.loss.type"],
            "trainer.loss.type(.; give its value| is 3; give one text)",
        ),
        (
            '[trainer.estimater]\ntype = "process"',
            ["--trainer.estimater.type", "process"],
            "estimater.type'; did you mean '(trainer.estimator|--trainer.estimator)'",
        ),
    ],
)  # fmt: skip
def test_a_wrong_component_is_refused_with_thing_value_and_remedy(
    text: str, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in (["--config", str(written(tmp_path, text))], words):
        with pytest.raises(ConfigError, match=told):
            train(*given)
        assert main(["train", *given, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_run_records_tables_and_a_plain_text_without_options(tmp_path: Path) -> None:
    recorded = tomllib.loads(dump_toml(CONFIG))
    assert recorded["sampler"] == {"type": "repl", "max_error_streak": 3}
    assert recorded["trainer"]["estimator"] == {"type": "two_stream", "line_weight": 0.5}
    assert (recorded["workers"], recorded["trainer"]["kl"]) == ("local", "k3")
    assert train("--config", str(written(tmp_path, dump_toml(CONFIG)))) == CONFIG


def test_a_run_with_texts_opens_resumes_and_is_equal_to_one_with_tables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trajectories").mkdir()
    told = dump_toml(CONFIG)
    # The settings as an older version wrote them: each component on one line.
    old = dump_toml(replace(CONFIG, sampler="repl", checkpoint="never", trainer=TrainerConfig()))
    for new, text in (
        ('sampler = "repl"', "sampler = 'repl(max_error_streak=3)'"),
        ('checkpoint = "never"', 'checkpoint = "within(seconds=30)"'),
        ('loss = "dapo"', 'loss = "cispo(clip_high=4.0)"'),
        ('kl = ""', 'kl = "k3"'),
        ('lr_scheduler = "linear"', 'lr_scheduler = "cosine_with_min_lr(min_lr_rate=0.1)"'),
        ('estimator = "two_stream"', 'estimator = "two_stream(line_weight=0.5)"'),
        ('importance_sampling = "token_truncate"', 'importance_sampling = "token_truncate(tolerance=0.01)"'),
        ('optimizer = "adamw_torch_fused"', 'optimizer = "adamw_torch_fused(weight_decay=0.1)"'),
    ):
        assert new in old
        old = old.replace(new, text)
    file = written(tmp_path, old, "config.toml")
    check_same_settings(tmp_path, told)
    assert read_settings(tmp_path) == rename_recorded(tomllib.loads(told))
    assert RolloutConfig.from_run(tmp_path).sampler == CONFIG.sampler
    assert train("--config", str(file), "--resume").trainer == CONFIG.trainer
    assert caplog.messages == []
    written(tmp_path, told, "config.toml")
    check_same_settings(tmp_path, old)
    assert RolloutConfig.from_run(tmp_path).sampler == CONFIG.sampler
    other = replace(CONFIG, trainer=replace(CONFIG.trainer, loss="dapo"))
    with pytest.raises(ConfigError, match=r"trainer.loss is .+dapo.+ \{ type = \"cispo\", clip_high = 4.0 \}'; give"):
        check_same_settings(tmp_path, dump_toml(other))


@pytest.mark.parametrize(
    "table",
    ['type = "evil_plugin:f"', 'type = "repl"\nthinking = "a:b"', 'type = ["evil_plugin:f"]', '"evil_plugin:f()" = 1'],
)
def test_a_table_of_a_strangers_run_imports_nothing(table: str, tmp_path: Path) -> None:
    written(tmp_path, f"[sampler]\n{table}\n", "config.toml")
    with pytest.raises(ConfigError):
        RolloutConfig.from_run(tmp_path)


def test_a_key_of_a_recorded_table_is_never_read_as_several_options(tmp_path: Path) -> None:
    written(tmp_path, '[sampler]\ntype = "repl"\n"candidates=2, max_error_streak" = 1\n', "config.toml")
    with pytest.raises(ConfigError, match="option candidates=2, max_error_streak of sampler repl"):
        RolloutConfig.from_run(tmp_path)
