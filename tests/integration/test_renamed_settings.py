"""Old names of settings: old flags and files give the same settings, with one line; stored runs are read silently."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.cli.eval import EvalConfig
from repl_rl.cli.serve import ServeConfig
from repl_rl.cli.sft import SftConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.deprecations.old_names import OLD_SETTINGS
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_metadata import read_settings
from repl_rl.settings.argument_parser import build_flags_class, iterate_flag_names, parse

VALUES: Mapping[str, str] = {
    "against": "other.json", "bos": "false", "chat": "", "conversations": "3", "drain_s": "3.0", "eval_every": "3",
    "group_judge": "mine:f", "judge": "exact", "trainer.potential": "error_potential",
    "fleet": "ray://head:6379", "idle_s": "3.0", "learning.micro_batch": "8", "overshoot": "carry", "states": "never",
    "trainer.ahead": "1", "trainer.checkpointing": "true", "trainer.fast": "false",
    "trainer.groups": "refill", "trainer.importance": "token_mask", "trainer.micro_batch": "8",
    "trainer.mini_batches": "2", "trainer.save_every": "3", "trainer.schedule": "constant_with_warmup",
    "trainer.shared_prefixes": "off", "trainer.updates": "3", "vllm.drive": "request", "vllm.threads": "3",
    "waiting": "3",
}  # fmt: skip
REQUIRED: Mapping[type, tuple[str, ...]] = {SftConfig: ("--data", "demonstrations")}
"""Flags without which a command is refused."""
OPTIONS = {"fleet.nodes": "3", "fleet.gpus": "3", "fleet.simulate": "true", "fleet.patience_s": "3.5"}


def owner(new: str) -> type[object]:
    """The first command that has a setting."""
    kinds: tuple[type[object], ...] = (TrainConfig, EvalConfig, ServeConfig, SftConfig)
    return next(kind for kind in kinds if new in iterate_flag_names(build_flags_class(kind)))


def flags(name: str, value: str) -> list[str]:
    option = name.replace("_", "-")
    if value in ("true", "false"):
        head, dot, last = option.rpartition(".")
        return [f"--{option}" if value == "true" else f"--{head}{dot}no-{last}"]
    return [f"--{option}", value]


def written(name: str, value: str) -> str:
    """A setting as a line of a file."""
    table, _, key = name.rpartition(".")
    quoted = value if value in ("true", "false") or value.replace(".", "").isdigit() else f'"{value}"'
    return f"{f'[{table}]' if table else ''}\n{key} = {quoted}\n"


def test_every_old_name_has_a_value_here() -> None:
    assert {*VALUES} | {*OPTIONS} == {*OLD_SETTINGS}


@pytest.mark.parametrize("old", [old for old in VALUES if old != "chat"])
def test_an_old_flag_gives_the_same_setting_and_one_line(old: str, caplog: pytest.LogCaptureFixture) -> None:
    new, value = OLD_SETTINGS[old], VALUES[old]
    kind = owner(new)
    needed = REQUIRED.get(kind, ())
    expected = parse(kind, "verb", [*needed, *flags(new, value)])
    assert len(caplog.messages) == 0
    assert expected != parse(kind, "verb", needed)
    assert parse(kind, "verb", [*needed, *flags(old, value)]) == expected
    (line,) = caplog.messages
    said, meant = flags(old, "")[0], flags(new, "")[0]
    if value == "false":
        said, meant = flags(old, value)[0], flags(new, value)[0]
    assert line == f"{said} is {meant} now; the old name goes in 0.5.0"


@pytest.mark.parametrize("old", [old for old in VALUES if old != "chat"])
def test_an_old_key_of_a_file_gives_the_same_setting_and_one_line(
    old: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new, value, file = OLD_SETTINGS[old], VALUES[old], tmp_path / "mine.toml"
    kind = owner(new)
    file.write_text(written(new, value))
    words = [*REQUIRED.get(kind, ()), "--config", str(file)]
    expected = parse(kind, "verb", words)
    assert len(caplog.messages) == 0
    file.write_text(written(old, value))
    assert parse(kind, "verb", words) == expected
    assert caplog.messages == [f"{old} in {file} is {new} now; the old name goes in 0.5.0"]


@pytest.mark.parametrize("old", OPTIONS)
def test_an_old_option_of_workers_gives_the_same_setting(old: str, caplog: pytest.LogCaptureFixture) -> None:
    words = ["--workers", "ray", *(["--workers.max-workers", "2"] if old == "fleet.simulate" else [])]
    expected = parse(TrainConfig, "train", [*words, f"--{OLD_SETTINGS[old].replace('_', '-')}", OPTIONS[old]])
    assert len(caplog.messages) == 0
    assert parse(TrainConfig, "train", [*words, f"--{old.replace('_', '-')}", OPTIONS[old]]) == expected
    assert len(caplog.messages) == 1


def test_keys_of_an_old_table_are_kept_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[chat]\nenable_thinking = false\n")
    expected = {"enable_thinking": False, "no_effort": 3}
    read = parse(TrainConfig, "train", ["--config", str(file), "--chat.no-effort", "3"])
    assert read.chat_template_kwargs == expected
    assert len(caplog.messages) == 2


def test_an_option_of_the_users_own_sampler_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stubborn_sampler.py").write_text(
        "from repl_rl import ReplSampler\n\n\nclass Mine(ReplSampler):\n"
        "    def __init__(self, *, give_up_after: int = 0) -> None:\n        super().__init__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--sampler", "stubborn_sampler:Mine", "--sampler.give-up-after", "3"]
    assert parse(TrainConfig, "train", words).sampler == "stubborn_sampler:Mine(give_up_after=3)"
    assert len(caplog.messages) == 0
    assert parse(TrainConfig, "train", ["--sampler.give-up-after", "3"]).sampler == "repl(max_error_streak=3)"
    assert len(caplog.messages) == 1


def test_a_setting_under_both_names_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[trainer]\nupdates = 2\nnum_iterations = 2\n")
    with pytest.raises(ConfigError, match=r"'trainer\.updates'.*old name of 'trainer\.num_iterations'"):
        parse(TrainConfig, "train", ["--config", str(file)])


def test_a_stored_run_with_old_names_is_read_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.toml").write_text('bos = false\novershoot = "carry"\n[chat]\nx = 1\n[vllm]\nthreads = 2\n')
    config = RolloutConfig.from_run(tmp_path)
    assert (config.add_bos_token, config.newline_tokens, config.chat_template_kwargs) == (False, "carry", {"x": 1})
    assert read_settings(tmp_path) == {
        "add_bos_token": False,
        "newline_tokens": "carry",
        "chat_template_kwargs": {"x": 1},
        "vllm": {"cpu_threads": 2},
    }
    assert len(caplog.messages) == 0


def test_the_old_command_is_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--help"]) == 0
    shown = capsys.readouterr()
    assert "repl-rl workers status RUN" in shown.out
    assert shown.err == "repl-rl: `fleet` is `workers` now; the old name goes in 0.5.0\n"
