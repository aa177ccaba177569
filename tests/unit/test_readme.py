"""The README: its commands parse, its sampler works, and its figures are those of the published run."""

import ast
import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.generated_blocks import Block
from benchmarks.models import publish_run as publish
from repl_rl.cli import VERBS
from repl_rl.samplers import load_sampler
from repl_rl.settings.argument_parser import flatten, load_toml
from repl_rl.settings.migrate_run_settings import rename_recorded
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trajectory.trajectory import Stop
from scripts.site.architecture import draw_file, plan
from tests.support.scripted_rollouts import TASK, world

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_sampler_in_the_readme_is_short_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    (tmp_path / "readme_sampler.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sampler = load_sampler("readme_sampler:ThinkFirst")
    lines = ["# six times seven\n", "6 * 7\n", "submit_final_answer(42)\n"]
    t = asyncio.run(world(lines, sampler).collect([TASK]))[0]
    sys.modules.pop("readme_sampler")
    assert t.stop is Stop.ANSWERED
    assert [[reward.value for reward in line.rewards] for line in t.lines] == [[], [0.05], []]


def test_readme_and_design_name_the_functions_of_the_loop_in_their_order() -> None:
    body = ast.parse((ROOT / "examples" / "minimal_grpo.py").read_text()).body
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    loop = README.partition("## Minimal loop")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", loop, re.MULTILINE) == functions[:7]
    design = (ROOT / "docs" / "design.md").read_text().partition("## Words")[0]
    assert re.findall(r"\(`(\w+)`\)", design) == functions[:7]
    assert functions[7:] == ["run", "main"]


def test_the_picture_of_the_packages_is_what_their_imports_are() -> None:
    assert "(docs/house.svg)" in README
    remedy = "run: python -m scripts.site.architecture docs/house.svg"
    assert (ROOT / "docs" / "house.svg").read_text() == draw_file(plan()), remedy


def test_every_command_in_the_readme_is_a_verb_or_a_make_target() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    assert commands
    for command in commands:
        words = shlex.split(command)
        known = {"make": targets, "repl-rl": VERBS}[words[0]]
        assert words[1] in known, command


def test_the_figures_are_those_of_the_published_run() -> None:
    assert Block(ROOT / "README.md", "models/publish_run").text == publish.block(publish.FOLDER)


def test_the_published_run_is_what_make_train_does_and_names_no_place_of_the_machine_that_made_it() -> None:
    for file in ("summary.json", "config.toml"):
        assert not re.search(r'"/\w', (publish.FOLDER / file).read_text())
    said = rename_recorded(dict(flatten(load_toml(publish.FOLDER / "config.toml"))))
    for name in ("steps", "prompts_per_step", "group_size", "learning_rate", "estimator", "importance_sampling"):
        assert said[f"trainer.{name}"] == getattr(TrainerConfig(), name)


def test_the_figures_of_the_sandbox_are_those_of_the_published_measurement() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "sandbox.json").read_text())
    assert Block(ROOT / "benchmarks" / "results" / "sandbox.md", "models/publish_run").text == publish.sandbox_block(
        figures
    )
