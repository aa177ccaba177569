"""The examples run, print what their docstrings promise, and use public modules only."""

import ast
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from repl_rl.cli.train import TrainConfig
from repl_rl.credit.advantage_estimators import GroupRewards, load_estimator
from repl_rl.engine import Transformers
from repl_rl.samplers import load_sampler
from repl_rl.settings.argument_parser import parse
from repl_rl.trajectory.trajectory import Stop, Trajectory
from repl_rl.utils.package_data import find_asset
from tests.support.documents import PAGES, ROOT
from tests.support.scripted_rollouts import TASK, world

EXAMPLES = ROOT / "examples"
NAMES = ("custom_sampler", "custom_sandbox", "custom_estimator", "debug_one_rollout")
PUBLIC = {
    "repl_rl",
    "repl_rl.sandbox",
    "repl_rl.sandbox.base",
    "repl_rl.sandbox.conformance",
    "repl_rl.trajectory.trajectory",
}
"""Modules that an example may import from."""


def run(name: str, *options: str, stdin: str = "") -> str:
    """Run a Python program of the examples. Return what it printed."""
    command = [sys.executable, *options, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the examples importable by their names."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_imports_public_modules_only(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 130
    modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.split(".")[0] == "repl_rl"} <= PUBLIC


def test_the_readme_lists_every_example() -> None:
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert set(NAMES) <= set(listed)
    assert sorted(listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.usefixtures("importable")
def test_the_sampler_pays_for_looking_and_stops_at_repeated_errors() -> None:
    def played(*lines: str) -> Trajectory:
        (trajectory,) = asyncio.run(world(lines, load_sampler("custom_sampler:LookFirst(bonus=0.5)")).collect([TASK]))
        return trajectory

    looked = played("1/0\n", "6 * 7\n", "submit_final_answer(42)\n")
    assert [[reward.value for reward in line.rewards] for line in looked.lines] == [[], [], [0.5]]
    guessed = played("submit_final_answer(42)\n")
    assert [line.rewards for line in guessed.lines] == [()]
    stuck = played("1/0\n", "1/0\n", "6 * 7\n", "submit_final_answer(42)\n")
    assert (stuck.stop, len(stuck.lines)) == (Stop.FINISHED, 2)


@pytest.mark.usefixtures("importable")
def test_the_estimator_is_the_outcome_above_the_mean_minus_the_penalty_of_an_error() -> None:
    rewards_G_L = ((0.0, -0.1), (0.0,), (-0.1,))
    group = GroupRewards.from_rows((1.0, 0.0, None), rewards_G_L, shaping_G_L=rewards_G_L)
    blame_errors = load_estimator("custom_estimator:blame_errors(penalty=0.25)")
    assert blame_errors(group) == ((0.5, 0.25), (-0.5,), (-0.25,))


@pytest.mark.heavy
def test_custom_sampler_prints_a_transcript_per_rollout() -> None:
    *transcripts, last = re.split(r"^--- |^(?=looked_first)", run("custom_sampler"), flags=re.MULTILINE)[1:]
    assert len(transcripts) == 6
    assert all(re.search(r"^>>> \S", text, re.MULTILINE) for text in transcripts)
    rewarded = [text for text in transcripts if "line rewards [0.1]" in text]
    assert last.strip() == f"looked_first {len(rewarded)} in 6 rollouts"
    for text in rewarded:  # an answer, with console output before it
        assert re.search(r"^(?!>>> |\.\.\. ).+\n>>> submit_final_answer", text, re.MULTILINE)


@pytest.mark.heavy
def test_custom_sandbox_records_its_lines_and_keeps_every_promise() -> None:
    printed = run("custom_sandbox")
    assert "recorded '6 * 7': ok, '42'\n" in printed
    assert "recorded '1 / 0': exception, 'ZeroDivisionError: division by zero'\n" in printed
    kept = {name: (int(k), int(n)) for name, k, n in re.findall(r"^(.+): (\d+) of (\d+) kept$", printed, re.MULTILINE)}
    assert {"fidelity", "limits", "host functions", "latency", "workspace"} <= set(kept)
    assert all(k == n > 0 for k, n in kept.values())


@pytest.mark.heavy
def test_custom_estimator_trains_three_steps_and_its_penalty_reaches_the_update() -> None:
    printed = run("custom_estimator")
    rows = re.findall(r"^step (\d+) .* with an error (\S+)  without (\S+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    # A solved rollout is at most 1 above its group's mean, and an error costs 0.5.
    blamed = [float(row[1]) for row in rows if row[1] != "none"]
    assert blamed
    assert all(-1.5 <= advantage <= 0.5 for advantage in blamed)
    assert all(-1.0 <= float(row[2]) <= 1.0 for row in rows)
    assert "recorded: {'type': 'custom_estimator:blame_errors', 'penalty': 0.5}" in printed


@pytest.mark.heavy
def test_a_debugger_stops_at_each_line_of_the_rollout() -> None:
    """Drive pdb by its commands: look at the first line at the marked place, then run to the end."""
    text = (EXAMPLES / "debug_one_rollout.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(text, 1) if line.endswith("# BREAKPOINT")]
    commands = (
        *(f"break {number}", "continue", "p 'stopped at', line.text, result.status.value", "continue"),
        *("p 'stopped at', line.text, result.status.value", f"clear {EXAMPLES / 'debug_one_rollout.py'}:{number}"),
        *("continue", "quit"),
    )
    printed = run("debug_one_rollout", "-m", "pdb", stdin="\n".join(commands) + "\n")
    assert r"('stopped at', 'x = 6 x 7\n', 'syntax_error')" in printed
    assert r"('stopped at', 'x = 6 * 7\n', 'ok')" in printed
    assert "outcome 1.0, stop answered, failure None\n" in printed
    assert "tokens to train on: 18 of 43\n" in printed
    assert "threads: 1\n" in printed
    assert f"(Pdb) break {number}\n" in PAGES["docs/debugging.md"]


def test_the_configurations_of_the_debugger_name_what_is_there() -> None:
    configurations = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
    by_name = {each["name"]: each for each in configurations}
    rollout = Path(by_name["Debug one rollout"]["program"].replace("${workspaceFolder}", str(ROOT)))
    assert rollout == EXAMPLES / "debug_one_rollout.py"
    verb, *flags = by_name["Train three steps"]["args"]
    settings = parse(TrainConfig, verb, flags, presets=find_asset("presets"))
    assert (settings.engine, settings.concurrency, settings.trainer.steps) == (Transformers(), 1, 3)
    assert by_name["Current test file"]["args"][0] == "${file}"
