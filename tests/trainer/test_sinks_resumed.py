"""A run that is gone on with has each point once in its sinks, in order; and it is said where that cannot be had."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from repl_rl.machine.durable import DIGESTS
from repl_rl.trainer.sinks import PREFIX, TABLE
from repl_rl.trainer.states import states_in
from tests.trainer.test_resume import PLAIN, STEPS, Stopped, play

ROOT = Path(__file__).parent.parent.parent
SOLVED = f"train/{PREFIX}solve_rate"
_IN_TWO = """
import os
import sys
from pathlib import Path

from tests.trainer.test_sinks_resumed import begun, gone_on

run, sink = Path(sys.argv[1]), sys.argv[2]
if not (first := os.fork()):
    begun(run, sink)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0
gone_on(run, sink)
"""


def begun(run: Path, sink: Literal["tensorboard", "trackio", "wandb"]) -> None:
    """Stop in step 5 and lose the state of step 4, whose points the sink has."""
    with pytest.raises(Stopped):
        play(run, replace(PLAIN, report_to=(sink,), updates=2), tell_stop=5)
    (states_in(run / "states")[-1] / DIGESTS).unlink()


def gone_on(run: Path, sink: Literal["tensorboard", "trackio", "wandb"]) -> None:
    play(run, replace(PLAIN, report_to=(sink,), updates=2))


def told(run: Path) -> list[tuple[int, float]]:
    """Optimizer step and solve rate of each step, as the run folder has them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [(int(row["optimizer_steps"]), row["solve_rate"]) for row in rows]


def test_tensorboard_has_each_figure_and_table_once_after_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run, "tensorboard")
    gone_on(run, "tensorboard")
    reader = import_module("tensorboard.backend.event_processing.plugin_event_accumulator")  # as TensorBoard reads
    events = reader.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    points = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(SOLVED)]
    assert points == [(step, pytest.approx(rate)) for step, rate in told(run)]
    assert [event.step for event in events.Tensors(f"{TABLE}/text_summary")] == [step for step, _ in told(run)]


def in_two(run: Path, sink: str, **environment: str) -> Sequence[str]:
    """The same in two processes, the first of which ends as a killed one does; what the second says.

    The first is a fork of the second, which has imported already: importing takes longer than all the rest.
    """
    command = [sys.executable, "-c", _IN_TWO, str(run), sink]
    done = subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "after the state" in line]


@pytest.mark.heavy
def test_trackio_has_each_figure_and_table_once_after_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert in_two(run, "trackio", TRACKIO_DIR=str(tmp_path / "trackio")) == []
    with closing(sqlite3.connect(tmp_path / "trackio" / "repl_rl.db")) as base:
        found = base.execute("SELECT run_name, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, _ in found} == {"run"}
    rows = [json.loads(text) for _, text in found]
    points = [(row["train/global_step"], row[SOLVED]) for row in rows if SOLVED in row]
    assert points == told(run)
    assert [row["train/global_step"] for row in rows if TABLE in row] == [step for step, _ in told(run)]


@pytest.mark.heavy
def test_wandb_cannot_be_cut_back_so_what_follows_is_a_run_of_its_own_and_that_is_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (said,) = in_two(run, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    assert "wandb keeps what it was sent" in said
    assert "'run after step 3'" in said
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    # The first one was killed: wandb's own process writes blocks of 32 KiB, and the last one is lost.
    for file, steps, name in ((first, 1, b"run"), (second, 2, b"run after step 3")):
        assert file.read_bytes().count(SOLVED.encode()) >= steps
        assert name in file.read_bytes()
    assert b"after step" not in first.read_bytes()
