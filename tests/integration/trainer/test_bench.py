"""The bench of the update: both sides compute the same, and a row says what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import cli as bench
from benchmarks.update import page as update
from benchmarks.update.shared_prefixes import PREFIXES, StoredStep, bench_prefixes, bench_step
from benchmarks.update.synthetic_rollouts import CASES, Case
from benchmarks.update.trl_comparison import bench_update, update_cost
from repl_rl.errors import ConfigError, StoreError
from repl_rl.runs.store import write_step
from repl_rl.trajectory.trajectory import Sampled, Segment

SMALL = Case(vocab=512, observed_share=0.5, tokens=64, hidden=32, layers=1)


def test_the_cases_are_those_of_large_vocabularies_and_long_rollouts() -> None:
    assert [(case.vocab, case.observed_share, case.tokens) for case in CASES] == [
        (32_768, 0.5, 2048), (32_768, 0.8, 2048), (151_936, 0.5, 2048), (151_936, 0.8, 2048),
    ]  # fmt: skip


def test_both_sides_have_the_same_loss_and_the_same_gradient_of_every_weight(tmp_path: Path) -> None:
    ours, our_gradients = update_cost(SMALL, "ours", 1, tmp_path)
    theirs, gradients = update_cost(SMALL, "trl", 1, tmp_path)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=0, atol=1e-5)
        assert gradient.abs().max() > 1e-4, f"{name} is of a size at which 1e-5 says something"


@pytest.mark.heavy
def test_a_row_holds_ratios_of_time_and_memory_measured_in_processes_of_their_own() -> None:
    (row,) = json.loads(json.dumps(bench_update([Case(vocab=32_768, observed_share=0.8, tokens=512)], repeats=1)))
    assert (row["vocab"], row["observed_share"]) == (32_768, 0.8)
    assert 0 < row["time_ratio"] < 0.65
    assert 0 < row["memory_ratio"] < 0.3
    assert row["max_abs_loss_diff"] < 1e-5
    assert row["max_abs_gradient_diff"] < 1e-5


def test_prompts_and_groups_of_shared_prefixes_are_those_that_were_promised() -> None:
    assert [(case.prompt, case.rollouts, case.tokens) for case in PREFIXES] == [
        (64, 8, 64), (64, 16, 64), (256, 8, 64), (256, 16, 64), (1024, 8, 64), (1024, 16, 64),
    ]  # fmt: skip


@pytest.mark.heavy
def test_a_row_of_shared_prefixes_has_what_they_save_and_what_rounding_alone_does() -> None:
    case = Case(vocab=512, observed_share=0.5, tokens=32, rollouts=4, hidden=32, layers=1, prompt=256)
    (row,) = bench_prefixes([case], repeats=2)
    scored = 32 - 16  # tokens of a completion: what the console printed last is not scored
    assert row["token_ratio"] == pytest.approx(4 * (256 + scored) / (256 + 4 * scored))
    assert float(row["gradient_error"]) < 1e-5
    assert float(row["gradient_noise"]) < 1e-5
    text = update.block(json.loads(json.dumps([*bench_update([SMALL], repeats=1), row])))
    assert "| 256 | 4 | 3.40 |" in text


def written_at_three(segment: Segment) -> Segment:
    if isinstance(segment, Sampled):
        return replace(segment, lines=tuple(replace(line, policy_step=3) for line in segment.lines))
    return segment


def stored(folder: Path) -> StoredStep:
    """What SMALL is, as if a run's fourth step had played it, with a rollout more that nobody could grade."""
    model, rollouts = SMALL.load()
    model.save_pretrained(folder)
    played = [
        replace(one, task_id="t", policy_step=3, segments=tuple(map(written_at_three, one.segments)))
        for one in rollouts
    ]
    return StoredStep(folder, (*played, replace(played[0], id="failed", outcome=None)))


def test_rollouts_of_a_run_cost_what_they_do_whichever_step_played_them_and_ungraded_ones_are_left_out(
    tmp_path: Path,
) -> None:
    work = stored(tmp_path / "policy")
    for side in ("ours", "trl"):
        _, made_up = update_cost(SMALL, side, 1, tmp_path)
        _, played = update_cost(work, side, 1, tmp_path)
        assert played.keys() == made_up.keys()
        assert all(torch.equal(gradient, made_up[name]) for name, gradient in played.items())


def of_two_tasks(folder: Path) -> StoredStep:
    """A step of two tasks, whose groups begin otherwise, and of a third one that was not graded whole."""
    one = stored(folder)
    _, others = replace(SMALL, prompt=SMALL.prompt + 8).load()
    again = [replace(other, id=f"u{n}", task_id="u") for n, other in enumerate(others)]
    part = replace(again[0], id="v0", task_id="v")
    return StoredStep(folder, (again[0], *one.played, *again[1:], part))


def test_each_rollout_of_a_step_is_held_against_those_of_its_own_task(tmp_path: Path) -> None:
    work = of_two_tasks(tmp_path / "policy")
    assert [[one.id for one in group] for group in work.groups] == [["u0", "u1"], ["0", "1"]]
    found = {side: update_cost(work, side, 1, tmp_path) for side in ("ours", "trl")}
    (ours, mine), (theirs, other) = found["ours"], found["trl"]
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    for name, gradient in other.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("outcome", "told"), [(None, r"\[\]"), (0.0, r"\[0\.0\]")])
def test_a_step_from_which_nothing_would_be_learned_is_refused(
    outcome: float | None, told: str, tmp_path: Path
) -> None:
    played = tuple(replace(one, outcome=outcome) for one in stored(tmp_path).played)
    with pytest.raises(ConfigError, match=rf"outcomes of the rollouts is {told}; .* --step"):
        bench_step(StoredStep(tmp_path, played))


@pytest.mark.heavy
def test_a_step_of_a_run_is_measured_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "mine"
    (run / "trajectories").mkdir(parents=True)
    write_step(run / "trajectories", 4, stored(run / "checkpoints" / "final").played)
    assert bench.main(["update", "--run", str(run), "--step", "4"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["step"], row["rollouts"]) == ("mine", 4, 2)
    scored = 64 - 16
    assert row["token_ratio"] == pytest.approx(2 * (32 + scored) / (32 + 2 * scored))
    text = update.block([*json.loads(json.dumps(bench_update([SMALL], repeats=1))), row])
    assert "| `mine` | 4 | 2 | 1.25 |" in text
    with pytest.raises(StoreError):
        bench.main(["update", "--run", str(run), "--step", "5"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--run", "no/such/run"], r"policy is 'no/such/run/checkpoints/final'; there is no such folder"),
        (["--policy", "folder"], "it is read with --run"),
        (["--step", "0"], "step is 0; give at least 1"),
        (["--step", "2"], "it is read with --run"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused_at_once(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bench.main(["update", *flags])
