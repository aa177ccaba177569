"""Settings: every field is documented, and something reads it."""

import ast
import inspect
import itertools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

from repl_rl.cli import main
from repl_rl.cli.eval import EvalConfig
from repl_rl.cli.rollout import RolloutCommandConfig
from repl_rl.cli.train import TrainConfig
from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.run_metadata import read_settings
from repl_rl.settings.argument_parser import build_flags_class, get_registry, iterate_flag_names, load_toml, parse
from repl_rl.settings.bounded_toml import MOST_BYTES, MOST_PARTS, TooLong, parse_toml

ROOT = Path(__file__).parents[2] / "repl_rl"
OUTSIDE = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
INSIDE = "\n".join(path.read_text() for path in (ROOT.parent / "sandbox").rglob("*.py"))


def settings(kind: type) -> set[tuple[type, str]]:
    """(class, field) of a configuration and of the ones inside it."""
    found: set[tuple[type, str]] = set()
    for field in fields(kind):
        hint = get_type_hints(kind, include_extras=True)[field.name]
        seam = get_registry(hint)
        if seam is not None:
            for options in seam.get_entries_with_options().values():
                found |= settings(options)
        if isinstance(hint, type) and is_dataclass(hint):
            found |= settings(hint)
        else:
            owner = next(c for c in reversed(kind.__mro__) if field.name in inspect.get_annotations(c))
            found.add((owner, field.name))
    return found


def test_settings_stay_few() -> None:
    flags = list(iterate_flag_names(build_flags_class(TrainConfig)))
    assert len([name for name in flags if "." not in name]) <= 40
    assert len([name for name in flags if "." in name]) <= 60


ALL = sorted(
    {pair for kind in (TrainConfig, EvalConfig, RolloutCommandConfig) for pair in settings(kind)},
    key=lambda pair: (pair[0].__name__, pair[1]),
)


@cache
def bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    """What stands in each class of a module, by its name."""
    nodes = ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
    return {node.name: node.body for node in nodes if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(("owner", "name"), ALL)
def test_every_setting_is_documented(owner: type, name: str) -> None:
    statements = bodies(owner.__module__)[owner.__name__]
    for statement, following in itertools.pairwise(statements):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.target.id != name:
                continue
            assert isinstance(following, ast.Expr), f"{owner.__name__}.{name} has no docstring"
            assert isinstance(following.value, ast.Constant)
            return
    raise AssertionError(f"{owner.__name__}.{name} is the last statement: it has no docstring")


@pytest.mark.parametrize(("owner", "name"), ALL)
def test_every_setting_is_read_by_something(owner: type, name: str) -> None:
    if owner.__name__ == "RewardTable":
        return  # read as a table, by the name of a status: tests/unit/test_rewards.py
    # What a console may use is sent whole to the package inside the sandbox, and read there by name.
    read = re.search(rf"\.{name}\b(?!\s*=[^=])", OUTSIDE) or re.search(rf"\b{name}\b", INSIDE)
    assert read, f"nothing reads {owner.__name__}.{name}"


def written(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('seed = [0, "--overwrite"]', r"seed is \[0, '--overwrite'\]; give one whole number"),
        ('name = ["mine"]', r"name is \['mine'\]; give one text"),
        ("[trainer]\nlearning_rate = [1e-5]", r"trainer.learning_rate is \[1e-05\]; give one number"),
        ('overwrite = "yes"', "overwrite is 'yes'; give true or false"),
        ('overwrite = "--resume"', "overwrite is '--resume'; give true or false"),
        ("name = true", "name is True; give one text"),
        ('[trainer]\nreport_to = ["wandb", "--overwrite"]', "trainer.report_to is '--overwrite'; .* hyphen"),
        ('[trainer]\nreport_to = [["wandb"]]', "trainer.report_to is .*; give texts or numbers in one list"),
        ('[trainer]\nline_rewards = [["terse"]]', "trainer.line_rewards is .*; give names of functions, or a table"),
        ('[trainer.line_rewards]\nterse = "x"', "line_rewards.terse is 'x'; give its weight, a finite number"),
        ('[judges]\n"--overwrite x" = 1', "key is 'judges.--overwrite x'; name it with letters"),
    ],
)
def test_a_value_of_a_file_is_no_flag_and_has_the_type_of_its_setting(
    text: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(TrainConfig, "train", ["--config", str(written(tmp_path, text))])


def test_lists_and_texts_with_hyphens_of_a_file_are_read_as_they_are(tmp_path: Path) -> None:
    text = 'name = "--overwrite"\npreload = ["os"]\nseed = 3\n[trainer]\nreport_to = []\nline_rewards = { terse = -1 }'
    config = parse(TrainConfig, "train", ["--config", str(written(tmp_path, text))])
    assert (config.name, config.preload, config.seed, config.overwrite) == ("--overwrite", ("os",), 3, False)
    assert (config.trainer.line_rewards, config.trainer.report_to) == ({"terse": -1.0}, ())


LONG = "a." * 60_000 + "a"
"""A key on which tomllib would spend more than a minute."""
UNBOUNDED = {
    "a key": f"{LONG} = 1",
    "spaces between": f"{LONG.replace('.', ' . ')} = 1",
    "quoted parts": f"{LONG.replace('a', chr(34) * 2)} = 1",
    "a header": f"[{LONG}]",
    "an array of tables": f"[[{LONG}]]",
    "an inline table": f"x = {{ {LONG} = 1 }}",
    "after a text that ends with quotes": f'x = """a""""\n{LONG} = 1',
    "after a literal that ends with quotes": f"x = '''a'''''\n{LONG} = 1",
    "after a comment with quotes": f"# '''\n{LONG} = 1",
    "tables in tables": "x = " + "{ a = " * 40 + "1" + " }" * 40,
    "a part without end": f"[{'k' * 1000}]\na = 1",
    "an integer without end": f"x = [0x{'f' * 5000}]",
    "a file without end": "# \n" * (MOST_BYTES // 3 + 1),
}


@pytest.mark.parametrize("unbounded", UNBOUNDED)
def test_a_file_that_takes_time_or_memory_without_bound_is_refused(
    unbounded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, UNBOUNDED[unbounded])
    for reading in (lambda: load_toml(file), lambda: read_settings(tmp_path), lambda: RolloutConfig.from_run(tmp_path)):
        with pytest.raises(ReplRLError, match=r"config.toml'.* (has more than|at most) ") as refused:
            reading()
        assert len(str(refused.value)) < 1000
    assert main(["runs", str(tmp_path.parent)]) == 0
    # The table wraps wherever the path of the temporary folder makes it.
    assert "config.toml' " in capsys.readouterr().out.replace("\n", "")


def test_keys_up_to_the_bound_and_texts_of_any_content_are_read() -> None:
    parts = ["a"] * MOST_PARTS
    texts = [f"x = {quote}{LONG} = 1{quote}" for quote in ('"', "'", '"""', "'''")]
    assert parse_toml(".".join(parts) + " = 1")
    assert [parse_toml(text)["x"] for text in texts] == [f"{LONG} = 1"] * 4
    assert parse_toml(f"# {LONG}\nx = 1.5") == {"x": 1.5}
    with pytest.raises(TooLong):
        parse_toml(".".join([*parts, "a"]) + " = 1")


def test_a_link_out_of_a_run_is_not_followed_to_its_settings(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.toml"
    run.mkdir()
    other.write_text('name = "secret"')
    (run / "config.toml").symlink_to(other)
    for reading in (
        lambda: load_toml(run / "config.toml"),
        lambda: read_settings(run),
        lambda: RolloutConfig.from_run(run),
    ):
        with pytest.raises(ReplRLError, match="is a link that leads out of its folder"):
            reading()
    # The user names this file, so its link is followed.
    assert parse(TrainConfig, "train", ["--config", str(run / "config.toml")]).name == "secret"


NOT_UTF8 = os.fsdecode(b"q/r\xff")


@pytest.mark.parametrize(
    "words",
    [
        ("view", NOT_UTF8),
        ("replay", NOT_UTF8),
        ("runs", NOT_UTF8),
        ("runs", "compare", "a", NOT_UTF8),
        ("export", "a", "--out", NOT_UTF8),
        ("transcripts", "--from-tasks", "counting", f"--out={NOT_UTF8}"),
        ("train", "--name", NOT_UTF8),
        ("train", "--config", NOT_UTF8),
        ("eval", "--sampler.depth", NOT_UTF8),
        ("sft", "--data", "a", NOT_UTF8),
        ("serve", "--run", NOT_UTF8),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_before_any_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert r"q/r\udcff'; it is not valid UTF-8" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tasks", "validation", "out", "name", "model", "sandbox"])
def test_a_file_with_a_nul_character_in_a_name_is_refused(
    name: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path_factory.mktemp("settings") / "nul.toml"
    file.write_text(f'{name} = "a\\u0000b"\n')
    assert main(["train", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} is 'a\\x00b'; it holds a NUL character, which no name can; leave it out of {file}" in line
    assert list(tmp_path.iterdir()) == []
