"""Commands that are printed for a person run as they are printed."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from repl_rl.cli.next_steps import USUAL
from repl_rl.engine import ENGINES
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.list_runs import RunStatus, read_run_info
from repl_rl.sandbox import SANDBOXES
from tests.integration.test_onward import named
from tests.support.processes import wait_for
from tests.support.serve.raw_requests import program

COMMAND = [sys.executable, "-m", "repl_rl.cli"]
SMALL = shlex.split(
    "--engine transformers --sandbox unsafe --trainer.prompts-per-step 2 --trainer.group-size 4 --train-tasks 8 "
    "--eval-tasks 4 --rollout.max-lines 3 --concurrency 4"
)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_usual_engine_and_sandbox_are_those_of_every_verb() -> None:
    usual = {field.name: field.default for field in fields(RolloutConfig) if field.name in USUAL}
    assert usual == USUAL
    assert (ENGINES.resolve(RolloutConfig().engine).kind, SANDBOXES.resolve(RolloutConfig().sandbox).kind) == tuple(
        USUAL.values()
    )


def run(*words: str, limit_s: float = 250, typed: str | None = None) -> str:
    """What a command prints that succeeds, without a terminal, or at one where a person types."""
    far, near = pty.openpty()
    os.write(far, (typed or "").encode())
    stdin = subprocess.DEVNULL if typed is None else near
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=limit_s, stdin=stdin)
    os.close(far)
    os.close(near)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.heavy
def test_the_three_commands_that_a_training_ends_with_run_as_they_are_printed(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER", "true")
    shown = run("train", "--name", "my run", "--trainer.steps", "1", *SMALL).splitlines()
    view, replay, serve = named(shown[-3:])
    assert [shlex.split(command)[:2] for command in (view, replay, serve)] == [
        ["repl-rl", "view"], ["repl-rl", "replay"], ["repl-rl", "serve"],
    ]  # fmt: skip
    assert "report.html" in run(*shlex.split(view)[1:])
    assert ">>> " in run(*shlex.split(replay)[1:], typed="\n:q\n")
    assert "determinism 100.00%" in run(*shlex.split(replay)[1:], "--verify")
    with program(desk, *shlex.split(serve)[2:]) as (_, address):
        assert httpx.get(f"{address}/models").json()["data"][0]["id"] == "my run"
    asked = [command.replace(" --sandbox unsafe", "") for command in (view, replay, serve)]
    assert asked == named(run().splitlines())[:3]  # a folder of runs may hold a stranger's
    assert "nothing is left to do" in run("train", "--name", "my run", "--trainer.steps", "1", *SMALL, "--resume")


@pytest.mark.heavy
def test_the_command_that_goes_on_with_an_interrupted_run_does_so_as_it_is_printed(desk: Path) -> None:
    words = [*COMMAND, "train", "--overwrite", "--name", "mine", "--trainer.steps", "6", *SMALL]
    metrics = Path("runs/mine/metrics.jsonl")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as stopped:
        try:
            wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, stopped)
            stopped.send_signal(signal.SIGINT)
            assert stopped.wait(60) == 130
        finally:
            stopped.kill()
    head, command, *_ = run().splitlines()
    assert head.startswith("runs/mine was interrupted after step ")
    (printed,) = named([command])
    assert "is finished" not in run(*shlex.split(printed)[1:])
    assert read_run_info(Path("runs/mine")).status is RunStatus.FINISHED
    assert read_run_info(Path("runs/mine")).step == 6
