"""A run that plays ahead and is stopped anywhere: where it goes on bit for bit, and what differs where it cannot."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.runs.store import read_trajectories
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.checkpoint import find_newest_state
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.strip_timings import untimed
from tests.support.trainer.ahead_runs import CONFIG, EarlySource, Stopped, play
from tests.support.trainer.resumed_runs import AGED, CLOCKED, ageless, check_killed, check_killed_often, rows, same
from tests.support.trainer.tiny_policies import tiny_model


class Halted(EarlySource):
    """Stops the run in the middle of its nth call of `collect`."""

    left = -1

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        if not self.left:
            raise Stopped
        self.left -= 1
        return super().collect(task_ids, policy_step)


def quick() -> Halted:
    """Its rollouts are done before weights come."""
    return Halted(tiny_model(), quick=True)


def unmoved(lines: int) -> Halted:
    """Its draws and log probabilities are those of the first weights, whichever it was given last."""
    return Halted(tiny_model(), lines=lines, deaf=True)


def figures(run: Path, but: set[str]) -> list[Mapping[str, object]]:
    told: list[Mapping[str, object]] = []
    for row in rows(run):
        assert isinstance(row, dict)
        told.append({name: value for name, value in row.items() if name not in but})
    return told


def rollouts(run: Path, aged: bool) -> list[Trajectory]:
    """Those that were learned from; `aged`: whichever weights wrote their lines."""
    told = untimed(read_trajectories(run / "trajectories"))
    return list(map(ageless, told)) if aged else told


def check_alike(run: Path, whole: Path, aged: bool = False) -> None:
    """`run` ended as `whole` did, bit for bit; `aged`: but for what says which weights wrote which line."""
    but = CLOCKED | (AGED if aged else set())
    assert figures(run, but) == figures(whole, but)
    assert rollouts(run, aged) == rollouts(whole, aged)
    ends = [find_newest_state(place / "states") for place in (run, whole)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].step == ends[1].step
    assert same(ends[0].load_tensors(), ends[1].load_tensors())
    if not aged:
        assert ends[0].metadata["parts"] == ends[1].metadata["parts"]
    weights = [load_file(place / "checkpoints" / "final" / "model.safetensors") for place in (run, whole)]
    assert same(*weights)


def stopped(
    run: Path,
    source: Callable[[], Halted],
    stops: Sequence[int],
    halts: Sequence[int],
    config: TrainerConfig,
    curriculum: bool = True,
) -> list[Halted]:
    """Train in `run` with a source for each process: stopped when those steps are told of, then in that many steps
    from where each goes on, then no more."""
    sources = []
    for stop_after, left in [*((step, -1) for step in stops), *((None, left) for left in halts)]:
        sources.append(source())
        sources[-1].left = left
        with pytest.raises(Stopped):
            play(run, sources[-1], stop_after, curriculum, config)
    sources.append(source())
    play(run, sources[-1], None, curriculum, config)
    return sources


@pytest.mark.parametrize(("curriculum", "updates"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.heavy)])
def test_where_all_that_was_under_way_had_ended_the_run_goes_on_bit_for_bit(
    curriculum: bool, updates: int, tmp_path: Path
) -> None:
    config = replace(CONFIG, num_iterations=updates)
    play(tmp_path / "whole", quick(), curriculum=curriculum, config=config)
    sources = stopped(tmp_path / "run", quick, [1, 4], [0, 1], config, curriculum)
    check_alike(tmp_path / "run", tmp_path / "whole")
    kept = [{step // updates: len(begun.finished) for step, begun in source.began.items()} for source in sources[1:]]
    assert not any(kept[0].values()), "where it began nothing was under way"
    assert all(list(counts.values())[:3] == [6, 6, 0] for counts in kept[1:]), "each was played once"


@pytest.mark.parametrize("lines", [1, pytest.param(3, marks=pytest.mark.heavy)])
def test_where_weights_decide_no_draw_what_begins_again_changes_no_weight_either(lines: int, tmp_path: Path) -> None:
    config = replace(CONFIG, importance_sampling="token_truncate(tolerance=100.0)")
    play(tmp_path / "whole", unmoved(lines), config=config)
    sources = stopped(tmp_path / "run", lambda: unmoved(lines), [4], [2], config)
    check_alike(tmp_path / "run", tmp_path / "whole", aged=True)
    begun = [begun for source in sources[1:] for begun in source.began.values()]
    assert any(len(one.finished) < 6 for one in begun[:2]), "some began again"
    with pytest.raises(AssertionError):
        check_alike(tmp_path / "run", tmp_path / "whole")


@pytest.mark.heavy
def test_a_run_that_is_killed_at_random_moments_ends_in_the_weights_of_one_that_never_was(tmp_path: Path) -> None:
    check_killed(tmp_path, "ahead", 4, random.randrange(1000), partial(check_alike, aged=True))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_change_no_weight(tmp_path: Path) -> None:
    check_killed_often(tmp_path, "ahead", 20, partial(check_alike, aged=True))


def check_all_alike(run: Path, whole: Path) -> None:
    """As `check_alike`, but for what says which weights wrote which line; and each checkpoint, the best one, the final
    one and its adapters are there with the same weights and moments."""
    check_alike(run, whole, aged=True)
    models = [place / "checkpoints" for place in (run, whole)]
    names = [{file.relative_to(place).as_posix() for file in place.rglob("*")} for place in models]
    assert names[0] == names[1]
    kept = {f"checkpoint-{step}" for step in range(1, len(rows(run)) + 1)} | {"adapter", "best", "final"}
    assert {name for name in names[0] if "/" not in name} >= kept
    for name in names[0]:
        if name.endswith(".safetensors"):
            assert same(*(load_file(place / name) for place in models)), name
        if name.endswith(("optimizer.pt", "scheduler.pt")):
            assert same(*(torch.load(place / name, weights_only=True) for place in models)), name


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_change_no_checkpoint_where_adapters_are_trained_ahead_and_evaluated(tmp_path: Path) -> None:
    check_killed_often(tmp_path, "checkpoints", 20, check_all_alike)
