"""Whole runs, as a person starts them: what they leave behind, and how they stop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.runs.store import read_trajectories
from tests.support.forked_commands import run_command
from tests.support.processes import descendants, identity, wait_for

SMALL = ["--trainer.steps", "2", "--trainer.prompts-per-step", "2", "--trainer.group-size", "4", "--eval-tasks", "8"]
STUBBORN = "repl(max_error_streak=6)"
COMMAND = [sys.executable, "-m", "repl_rl.cli"]

METRICS = {
    "step", "solve_rate", "reward_mean", "line_error_rate", "lines_per_rollout", "sampled_tokens", "observed_tokens",
    "logprob_gap_mean", "logprob_gap_max", "rollout_s", "update_s", "sync_s", "sandbox_fault_rate",
    "void_line_rate", "print_rate", "try_rate", "repeat_rate",
}  # fmt: skip
SUMMARY = {
    "engine", "sandbox", "steps", "solve_rate_first", "solve_rate_last", "greedy_first", "greedy_last",
    "tamper_followed", "line_error_rate_first", "line_error_rate_last", "wall_s", "status", "stopped_at_step",
}  # fmt: skip


def train(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_command("train", "--out", str(out), "--name", "run", *SMALL, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--engine", "transformers", "--sandbox", "unsafe", "--sampler", STUBBORN),
        pytest.param(("--engine", "vllm", "--sandbox", "local"), marks=pytest.mark.heavy),
    ],
    ids=" ".join,
)
def test_a_run_leaves_the_promised_folder(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = train(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row.keys() >= METRICS for row in rows)
    assert all(row["logprob_gap_max"] <= 1e-3 for row in rows)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert (summary["status"], summary["stopped_at_step"]) == ("finished", 2)
    assert (summary["engine"], summary["sandbox"]) == (flags[1], flags[3])
    assert ["lines_saved" in row for row in rows] == [STUBBORN in flags] * 2
    stored = list(read_trajectories(folder / "trajectories"))
    assert len(stored) == 16
    assert {t.policy_step for t in stored} == {0, 1}
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "checkpoints" / "final" / "model.safetensors").is_file()
    assert (folder / "config.toml").is_file()


@pytest.mark.heavy
def test_ctrl_c_leaves_no_process_and_a_folder_that_says_where_it_stopped(tmp_path: Path) -> None:
    command = [*COMMAND, "train", "--out", str(tmp_path), "--name", "run", *SMALL, "--trainer.steps", "500"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0, run)
    started = set(descendants(run.pid))
    assert started, "the engine and the sandbox are processes"

    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)

    assert run.returncode == 130, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["stopped_at_step"] == len(metrics.read_text().splitlines())
    wait_for(lambda: not {p for p in started if identity(p[0]) == p}, None)


def test_a_step_that_cannot_be_written_ends_the_run_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["train", "--out", str(blocked / "runs"), "--engine", "transformers", "--sandbox", "unsafe"]) == 2
    assert "repl-rl: error: run folder is" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]
