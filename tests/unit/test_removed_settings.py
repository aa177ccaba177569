"""A removed setting: at its neutral value a file is read as before, at another it is refused with the reason."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.deprecations.removed_settings import REMOVED, without_removed
from repl_rl.errors import ConfigError
from repl_rl.rollout_config import OF_A_RUN
from repl_rl.settings.argument_parser import flatten, load_toml, parse
from repl_rl.settings.toml_values import format_toml_value

OF_TRAIN = sorted(name for name in REMOVED if name.partition(".")[0] in OF_A_RUN)


def file_with(folder: Path, name: str, value: object) -> Path:
    table, _, key = name.rpartition(".")
    file = folder / "config.toml"
    file.write_text((f"[{table}]\n" if table else "") + f"{key} = {format_toml_value(value)}\nkept = 1\n")
    return file


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_file_with_a_neutral_value_is_read_without_it(name: str, tmp_path: Path) -> None:
    found = dict(flatten(load_toml(file_with(tmp_path, name, REMOVED[name].neutral))))
    table, _, _ = name.rpartition(".")
    assert found == {f"{table}.kept" if table else "kept": 1}


@pytest.mark.parametrize("name", OF_TRAIN)
@pytest.mark.parametrize("by", ["file", "flag"])
def test_another_value_is_refused_with_the_reason(by: str, name: str, tmp_path: Path) -> None:
    value = 0.125 if not isinstance(REMOVED[name].neutral, str) else "something"
    argv = [f"--{name.replace('_', '-')}", str(value)]
    if by == "file":
        file = file_with(tmp_path, name, value)
        file.write_text(file.read_text().replace("kept = 1\n", ""))
        argv = ["--config", str(file)]
    with pytest.raises(ConfigError, match="it was removed") as refused:
        parse(TrainConfig, "train", argv)
    assert REMOVED[name].reason in str(refused.value)


def test_what_was_not_removed_is_kept() -> None:
    table: Mapping[str, object] = {"steps": 3, "trainer": {"steps": 2, "rewards": {"ok": 0.1}}}
    assert without_removed(table) == table
