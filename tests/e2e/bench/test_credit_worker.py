"""Runs of the credit experiment with the bundled policy, a few steps of a few rollouts each."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.credit.conditions import BASELINE, Way, conditions
from benchmarks.credit.experiment import Experiment, run_experiment
from benchmarks.credit.jobs import TUNING, Job
from benchmarks.credit.rows import POINTS, Run, Start
from benchmarks.credit.settings import Settings, base_of, header
from benchmarks.credit.worker import opened, repaired
from repl_rl.errors import ConfigError
from tests.support.run_folders import rollout

WAYS: tuple[Way, ...] = ("lines", "fenced")
TINY = Settings(tokens=60, prompts_per_step=2, group_size=2, held_out=4, agreement_tokens=20, engine="transformers")


@pytest.mark.heavy
def test_every_run_starts_from_the_bundled_policy_and_ends_with_its_tokens(tmp_path: Path) -> None:
    chosen = conditions([BASELINE, "two_stream/penalty"])
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
        assert tuple(run.agreement) == POINTS
        for found in run.agreement.values():
            assert -1 <= found["cosine"] <= 1
            assert found["signal"] <= 1
            assert found["tokens"] >= TINY.agreement_tokens
        assert run.learning_rate == TINY.learning_rate
    first, second = (run for run in runs if isinstance(run, Run))
    # Equal seeds and an equal policy: both sampled the same rollouts in their first step.
    assert (first.tokens[0], first.solve[0]) == (second.tokens[0], second.solve[0])
    assert first.agreement["start"]["tokens"] == second.agreement["start"]["tokens"]


def test_a_run_that_chooses_a_rate_has_that_rate_and_no_figures_that_cost_time(tmp_path: Path) -> None:
    (chosen,) = conditions([BASELINE])
    with opened(TINY, tmp_path) as worker:
        run = worker.play(Job("lines", chosen, TUNING[0], 1e-3))
    assert isinstance(run, Run)
    assert (run.seed, run.learning_rate, run.after, run.agreement) == (TUNING[0], 1e-3, {}, {})


@pytest.mark.heavy
def test_a_run_with_rollouts_ahead_says_how_old_they_were_and_leaves_none_under_way(tmp_path: Path) -> None:
    aged, fresh = conditions(["ahead_2/token_band"])[0], conditions([BASELINE])[0]
    with opened(replace(TINY, tokens=150, agreement_tokens=0), tmp_path) as worker:
        runs = [worker.play(Job("lines", condition)) for condition in (aged, fresh)]
        assert not worker.source._prefetched
    old, new = (run for run in runs if isinstance(run, Run))
    assert 0 < old.staleness <= 2
    assert (new.staleness, new.kept) == (0.0, 1.0)
    assert old.gap < 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["failing", "slipping"])
def test_runs_can_start_from_a_policy_that_was_taught(kind: Literal["failing", "slipping"], tmp_path: Path) -> None:
    settings = replace(TINY, start=kind, failing_steps=2, slipping_steps=3, agreement_tokens=0)
    (chosen,) = conditions(["errors/first"])
    with opened(settings, tmp_path) as worker:
        start, run = worker.play(Job("lines")), worker.play(Job("lines", chosen))
    assert isinstance(start, Start)
    assert isinstance(run, Run)
    assert run.agreement == {}
    fingerprint = header(settings, base_of(settings))["fingerprint"]
    assert (tmp_path / f"{kind}-lines-{fingerprint}" / "model.safetensors").exists()


@pytest.mark.heavy
def test_a_model_is_shown_the_console_and_fences_by_equally_many_demonstrations_and_what_it_writes_is_kept(
    tmp_path: Path,
) -> None:
    shown = replace(
        TINY, start="shown", shown_steps=3, families=("chain", "reverse"), agreement_tokens=0, transcripts=2
    )
    with opened(shown, tmp_path) as worker:
        assert {task.family for task in (*worker.tasks, *worker.held_out)} == {"chain", "reverse"}
        starts = [worker.play(Job(way)) for way in WAYS]
        runs = [worker.play(Job(c.way, c)) for c in conditions([BASELINE, "fenced"])]
    for row in (*starts, *runs):
        assert len(row.transcripts) == 2
        assert all(text.startswith(task.question) for text, task in zip(row.transcripts, worker.held_out, strict=False))
    assert [">>> " in row.transcripts[0] for row in starts] == [True, False]
    lines, fenced = (row.figures for row in starts if isinstance(row, Start))
    assert lines.keys() == fenced.keys() > {"with_error", "repaired"}


def test_what_a_start_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is 'mine'; start is 'bundled', which does not read it"):
        replace(TINY, model="mine")
    with pytest.raises(ConfigError, match=r"families is .*chain.*; start is 'bundled', which does not read it"):
        replace(TINY, families=("chain",))
    with pytest.raises(ConfigError, match="families is 'poems'; choose among "):
        replace(TINY, start="shown", families=("poems",))


def test_errors_are_repaired_where_the_rollout_solves_all_the_same() -> None:
    right, failed = rollout(0, "task", 0), rollout(0, "task", 1)
    assert repaired([right, replace(failed, outcome=1.0), failed]) == {"with_error": 2 / 3, "repaired": 1 / 2}
    assert repaired([right]) == {"with_error": 0.0, "repaired": 0.0}


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
    assert (tmp_path / f"bundled-fenced-{report['fingerprint']}" / "model.safetensors").exists()
