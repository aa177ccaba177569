"""Sources of tasks and samplers of installed packages: found by entry points, checked, and left out if broken."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from repl_rl import Episode, RolloutSampler
from repl_rl.cli import main
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout_config import RolloutConfig, validate_recorded_settings
from repl_rl.samplers import SAMPLERS, load_sampler
from repl_rl.tasks import TASK_SOURCES, Split, Task, TaskRequest, TaskSource, get_split, load_tasks
from tests.support.documents import ROOT, blocks

(SUMS,) = [block for block in blocks("python", "docs/tasks.md") if "TaskSource" in block]
ECHO = """
from repl_rl import RolloutSampler

class Echo(RolloutSampler):
    kind, about = "echo", "says it again"

    def __init__(self, *, times: int = 1) -> None:
        self.times = times

    async def rollout(self, episode): ...
"""


def install(folder: Path, name: str, source: str, *entry_points: str) -> None:
    """A package with one module, as pip leaves it."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(entry_points))


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


def test_an_installed_package_adds_a_prefix_and_broken_ones_are_named_and_left_out(tmp_path: Path) -> None:
    install(tmp_path, "my_sums", SUMS, "[repl_rl.task_sources]", "sums = my_sums:Sums")
    broken = ("rude = no_such_module:Rude", "again = my_sums:Sums", "nameless = my_sums:TaskSource", "no = my_sums:no")
    install(tmp_path, "their_sums", "1 / 0", "[repl_rl.task_sources]", *broken, "raises = their_sums:Sums")
    code = """
from repl_rl.tasks import TASK_SOURCES, load_tasks
print(*TASK_SOURCES.entries)
print(*(task.answer for task in load_tasks("sums:100", count=3, split="held_out")))
try:
    load_tasks("sumz:100")
except Exception as error:
    print(error)
"""
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    names, answers, error = done.stdout.splitlines()
    suites = ["gsm8k", "math", "math500", "aime", "humaneval", "mbpp", "cruxeval", "cruxeval-input", "dabench"]
    assert names.split()[:11] == ["builtin", "dataset", *suites]
    assert sorted(names.split()[11:]) == ["sums", "verifiers"]
    assert len(answers.split()) == 3
    assert error.startswith("prefix of tasks sumz:100 is 'sumz'; choose one of builtin, dataset, ")
    assert "sums" in error
    assert error.endswith("or give a file that exists")
    for name in ("rude", "nameless", "no", "raises"):
        assert f"source of tasks '{name}', declared by an installed package as " in done.stderr
    assert done.stderr.count("there is one of that name") == 1, "the same class twice: either is the first"


def test_an_installed_package_names_its_sampler(tmp_path: Path) -> None:
    install(tmp_path, "my_echo", ECHO, "[repl_rl.samplers]", "echo = my_echo:Echo", "rude = no_such_module:Rude")
    done = run(tmp_path, "from repl_rl import load_sampler; print(load_sampler('echo(times=3)').times)")
    assert done.stdout == "3\n", done.stderr
    assert "sampler 'rude', declared by an installed package as no_such_module:Rude, cannot be used" in done.stderr


class Coins(TaskSource):
    """Tasks that only their sampler plays."""

    kind: ClassVar[str] = "coins"
    about: ClassVar[str] = "tosses"
    sampler: ClassVar[str | None] = "toss"

    def load(self, place: str, request: TaskRequest) -> Iterable[Task]:
        if place == "broken":
            raise KeyError(place)
        if place == "texts":
            return ["a text"]  # type: ignore[list-item]
        return [Task(f"coin-{n}", f"Toss {n}.", "heads") for n in range(int(place))]

    def get_sampler_options(self, place: str) -> Mapping[str, object]:
        return {"coins": int(place)}


class Toss(RolloutSampler):
    kind: ClassVar[str] = "toss"
    about: ClassVar[str] = "tosses coins"

    def __init__(self, *, coins: int = 0) -> None:
        self.coins = coins

    async def rollout(self, episode: Episode) -> None:
        """Ends at once."""


@pytest.fixture
def coins() -> Iterator[None]:
    TASK_SOURCES.register(Coins)
    SAMPLERS.register(Toss)
    yield
    del TASK_SOURCES.entries["coins"], SAMPLERS.entries["toss"]


@pytest.mark.usefixtures("coins")
def test_tasks_in_another_split_and_beyond_the_count_are_dropped() -> None:
    held = load_tasks("coins:100", split="held_out")
    assert {get_split(task.question) for task in held} == {Split.HELD_OUT}
    assert len(held) + len(load_tasks("coins:100", split="train")) == 100
    assert [task.id for task in load_tasks("coins:100", count=2)] == ["coin-0", "coin-1"]
    with pytest.raises(ConfigError, match=r"number of tasks in coins:0 .* is 0; give a file with at least one"):
        load_tasks("coins:0")


@pytest.mark.usefixtures("coins")
@pytest.mark.parametrize(
    ("place", "told"), [("broken", r"raised KeyError\('broken'\)"), ("texts", "has a str; return tasks only")]
)
def test_errors_of_a_source_name_it(place: str, told: str) -> None:
    with pytest.raises(UserCodeError, match=f"task source 'coins': .*{told}"):
        load_tasks(f"coins:{place}")


@pytest.mark.usefixtures("coins")
def test_a_source_brings_the_sampler_that_alone_plays_its_tasks() -> None:
    assert RolloutConfig(tasks="coins:3").sampler == "toss(coins=3)"
    sampler = load_sampler("toss(coins=3)")
    assert isinstance(sampler, Toss)
    assert sampler.coins == 3
    with pytest.raises(ConfigError, match="'toss'; it plays --tasks coins:NAME alone"):
        RolloutConfig(sampler="toss")
    with pytest.raises(ConfigError, match="'fenced'; toss alone plays --tasks coins:NAME"):
        RolloutConfig(tasks="coins:3", sampler="fenced")


@pytest.mark.usefixtures("coins")
def test_a_stored_run_with_a_source_of_a_package_needs_trust() -> None:
    with pytest.raises(ConfigError, match=r"tasks in config.toml is 'coins:3'; .*--trust"):
        validate_recorded_settings({"tasks": "coins:3"}, "config.toml")
    for harmless in ("builtin:easy", "gsm8k:test.jsonl", "dataset:mine", "gone.jsonl", "gone:away.jsonl"):
        validate_recorded_settings({"tasks": harmless}, "config.toml")


def test_an_unknown_prefix_is_one_line_and_files_may_have_colons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "--tasks", "gsm9k:test.jsonl", "--engine", "transformers"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "prefix of tasks gsm9k:test.jsonl is 'gsm9k'; choose one of builtin, dataset, gsm8k" in line
    monkeypatch.chdir(tmp_path)
    Path("a:b.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n')
    assert [task.answer for task in load_tasks("a:b.jsonl?judge=exact")] == ["2"]
    with pytest.raises(ConfigError, match=r"tasks file is '/no:such\.jsonl'; it cannot be read"):
        load_tasks("/no:such.jsonl")
