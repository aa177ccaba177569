"""Runs of the credit experiment with the bundled policy, a few steps of a few rollouts each."""

from pathlib import Path

import pytest

from repl_rl.lab.credit.conditions import BASELINE, conditions
from repl_rl.lab.credit.experiment import Experiment, run_experiment
from repl_rl.lab.credit.jobs import Job
from repl_rl.lab.credit.rows import Run, Start
from repl_rl.lab.credit.settings import Settings
from repl_rl.lab.credit.worker import opened

TINY = Settings(tokens=60, prompts_per_step=2, group_size=2, held_out=4, engine="transformers")


def test_every_run_starts_from_the_bundled_policy_and_ends_with_its_tokens(tmp_path: Path) -> None:
    chosen = conditions([BASELINE, "two_stream/gated"])
    with opened(TINY, tmp_path) as worker:
        start = worker.play(Job("lines"))
        runs = [worker.play(Job("lines", condition)) for condition in chosen]
        again = worker.play(Job("lines"))
    assert isinstance(start, Start)
    assert start.figures == (again.figures if isinstance(again, Start) else {})
    for run in runs:
        assert isinstance(run, Run)
        assert len(run.tokens) == len(run.solve) == len(run.error) == len(run.lines) >= 2
        assert run.tokens[-2] <= TINY.tokens < run.tokens[-1]
        assert 0 <= run.gap < 1e-3
        assert set(run.after) == set(start.figures)
    first, second = (run for run in runs if isinstance(run, Run))
    # Equal seeds and an equal policy: both sampled the same rollouts in their first step.
    assert (first.tokens[0], first.solve[0]) == (second.tokens[0], second.solve[0])


@pytest.mark.heavy
def test_workers_play_lines_and_blocks_and_the_report_holds_both(tmp_path: Path) -> None:
    settings = Settings(tokens=60, prompts_per_step=2, group_size=2, held_out=4, engine="transformers", fenced_steps=2)
    experiment = Experiment(tmp_path, settings, [BASELINE, "fenced"], seeds=1, workers=2)
    report = run_experiment(experiment, lambda _: None)
    rows = report["rows"]
    assert isinstance(rows, list)
    assert sorted((row["kind"], row.get("condition"), row.get("way")) for row in rows) == [
        ("run", "fenced", None),
        ("run", BASELINE, None),
        ("start", None, "fenced"),
        ("start", None, "lines"),
    ]
    assert (tmp_path / f"fenced-{report['fingerprint']}" / "model.safetensors").exists()
