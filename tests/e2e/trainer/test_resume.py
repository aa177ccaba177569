"""A run that is stopped anywhere goes on exactly: all that it leaves is what one leaves that was never stopped."""

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.runs.run_folder import RunFolder, check_same_settings
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule, CheckpointTimer, parse_checkpoint_schedule
from repl_rl.trainer.plugins.checkpoint import (
    CheckpointManager,
    find_newest_state,
    list_states,
    open_run,
)
from repl_rl.trainer.plugins.trackers import PREFIX, TABLE
from repl_rl.trainer.trl_arguments import GRPOTrainer
from repl_rl.utils.atomic_files import DIGESTS
from tests.support.trainer.launch import launch
from tests.support.trainer.resumed_runs import (
    ALWAYS,
    PLAIN,
    STEPS,
    Stopped,
    check_alike,
    check_killed,
    check_killed_often,
    play,
    rows,
    same,
)

SELDOM = CheckpointSchedule(every_s=1e6)


WAYS = {
    "plain": (PLAIN, False),
    "curriculum": (replace(PLAIN, fast_logprobs=False), True),
    "lora": (replace(PLAIN, lora_rank=2, kl="k3"), True),
    "updates": (replace(PLAIN, num_iterations=2, num_mini_batches=2, lr_scheduler="cosine"), False),
}


@pytest.mark.parametrize(
    "way", ["lora", *(pytest.param(way, marks=pytest.mark.heavy) for way in WAYS if way != "lora")]
)
def test_a_run_that_is_stopped_in_any_step_ends_as_one_that_never_was(way: str, tmp_path: Path) -> None:
    config, curriculum = WAYS[way]
    play(tmp_path / "whole", config, curriculum=curriculum)
    for stop_at in (0, 2, 1):  # in its 1st step, in its 3rd, in its 4th
        with pytest.raises(Stopped):
            play(tmp_path / "stopped", config, stop_at, curriculum)
    play(tmp_path / "stopped", config, curriculum=curriculum)
    check_alike(tmp_path / "stopped", tmp_path / "whole")


def check_checkpoints_alike(run: Path, whole: Path, names: Sequence[str]) -> None:
    """Both have these checkpoints, with the same weights, moments, schedules and random generators."""
    folders = [place / "checkpoints" for place in (run, whole)]
    for folder in folders:
        assert sorted(place.name for place in folder.glob("checkpoint-*")) == sorted(names)
    for name in names:
        assert same(*(load_file(folder / name / "model.safetensors") for folder in folders))
        for part in ("optimizer.pt", "scheduler.pt"):
            assert same(*(torch.load(folder / name / part, weights_only=True) for folder in folders))
        counted = [json.loads((folder / name / "trainer_state.json").read_text()) for folder in folders]
        for one in counted:
            one.pop("log_history")  # a state has none: metrics.jsonl has the figures
        assert counted[0] == counted[1]


@pytest.mark.parametrize("before", [0, 1])
def test_a_run_with_checkpoints_is_gone_on_with_and_has_those_of_one_that_never_was_stopped(
    before: int, tmp_path: Path
) -> None:
    config = replace(PLAIN, save_steps=1, num_iterations=2)
    play(tmp_path / "whole", config)
    with pytest.raises(Stopped):  # a command may ask for checkpoints where the one before it did not
        play(tmp_path / "stopped", replace(config, save_steps=before), 3)
    play(tmp_path / "stopped", config)
    check_alike(tmp_path / "stopped", tmp_path / "whole")
    names = [f"checkpoint-{2 * step}" for step in range(1, STEPS + 1)]
    if not before:
        for name in names[:3]:
            shutil.rmtree(tmp_path / "whole" / "checkpoints" / name)
        names = names[3:]
    check_checkpoints_alike(tmp_path / "stopped", tmp_path / "whole", names)


class WithoutWeights(CheckpointManager):
    """Takes up all but the weights."""

    def load_model_state(self, trainer: GRPOTrainer) -> None:
        pass


class WithoutOptimizer(CheckpointManager):
    """Takes up all but the optimizer."""

    def load_optimizer_state(self, trainer: GRPOTrainer) -> None:
        pass


@pytest.mark.parametrize(("kind", "where"), [(WithoutWeights, "weights"), (WithoutOptimizer, "optimizer")])
def test_what_was_not_taken_up_is_noticed_before_anything_is_trained(
    kind: type[CheckpointManager], where: str, tmp_path: Path
) -> None:
    with pytest.raises(Stopped):
        play(tmp_path, stop_at=3)
    before = rows(tmp_path)
    with pytest.raises(ReplRLError, match=rf"^{where}[.\w]* differs from the saved state .*000003"):
        play(tmp_path, kind=kind)
    assert rows(tmp_path) == before


def test_who_stops_between_two_states_saves_the_last_step(tmp_path: Path) -> None:
    play(tmp_path / "whole")
    with pytest.raises(Stopped):
        play(tmp_path / "stopped", stop_at=3, how=SELDOM)
    assert [place.name for place in list_states(tmp_path / "stopped" / "states")] == ["000000", "000003"]
    play(tmp_path / "stopped", how=SELDOM)
    check_alike(tmp_path / "stopped", tmp_path / "whole")


def test_a_step_whose_weights_have_moved_but_that_nobody_was_told_of_is_made_again(tmp_path: Path) -> None:
    play(tmp_path / "whole")
    with pytest.raises(Stopped):
        play(tmp_path / "stopped", tell_stop=4)
    play(tmp_path / "stopped")
    check_alike(tmp_path / "stopped", tmp_path / "whole")


def test_tensorboard_has_each_figure_and_table_once_after_a_resume(tmp_path: Path) -> None:
    config = replace(PLAIN, report_to=("tensorboard",), num_iterations=2)
    with pytest.raises(Stopped):
        play(tmp_path, config, tell_stop=5)
    (list_states(tmp_path / "states")[-1] / DIGESTS).unlink()  # of step 4, whose points TensorBoard has
    play(tmp_path, config)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [(int(row["optimizer_steps"]), row["solve_rate"]) for row in rows]
    assert len(told) == STEPS
    reader = import_module("tensorboard.backend.event_processing.plugin_event_accumulator")  # as TensorBoard reads
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    figures = events.Tensors(f"train/{PREFIX}solve_rate")
    assert [(event.step, event.tensor_proto.float_val[0]) for event in figures] == [
        (step, pytest.approx(rate)) for step, rate in told
    ]
    assert [event.step for event in events.Tensors(f"{TABLE}/text_summary")] == [step for step, _ in told]


def test_rows_and_rollouts_after_the_state_are_replayed_and_a_torn_row_is_dropped(tmp_path: Path) -> None:
    play(tmp_path / "whole")
    run = tmp_path / "stopped"
    with pytest.raises(Stopped):
        play(run, tell_stop=5)
    newest_state = list_states(run / "states")[-1]
    (newest_state / DIGESTS).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    play(run)
    check_alike(run, tmp_path / "whole")


@pytest.mark.parametrize("harm", ["cut", "changed", "missing"])
def test_a_broken_state_is_named_and_the_one_before_it_taken(harm: str, tmp_path: Path) -> None:
    play(tmp_path / "whole")
    run = tmp_path / "stopped"
    with pytest.raises(Stopped):
        play(run, stop_at=3)
    broken = list_states(run / "states")[-1]
    tensors = broken / "tensors.pt"
    whole = tensors.read_bytes()
    if harm == "missing":
        tensors.unlink()
    else:
        middle = len(whole) // 2
        tensors.write_bytes(
            whole[:middle] + (b"" if harm == "cut" else bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        )
    told: list[str] = []
    found = find_newest_state(run / "states", told.append)
    assert found is not None
    assert found.step == 2
    assert len(told) == 1
    assert str(broken) in told[0]
    assert "tensors.pt" in told[0]
    play(run)
    check_alike(run, tmp_path / "whole")


def test_as_many_states_are_kept_as_asked_for(tmp_path: Path) -> None:
    play(tmp_path / "run", how=replace(ALWAYS, keep_last=3))
    assert [place.name for place in list_states(tmp_path / "run" / "states")] == ["000003", "000004", "000005"]


def test_steps_may_grow(tmp_path: Path) -> None:
    constant = replace(PLAIN, lr_scheduler="constant", warmup_steps=0)
    play(tmp_path / "whole", constant)
    play(tmp_path / "grown", replace(constant, steps=3))
    play(tmp_path / "grown", constant)
    check_alike(tmp_path / "grown", tmp_path / "whole")


def test_a_run_that_is_resumed_with_fewer_steps_ends_as_one_of_so_many(tmp_path: Path) -> None:
    constant = replace(PLAIN, lr_scheduler="constant", warmup_steps=0)
    play(tmp_path / "short", replace(constant, steps=3))
    with pytest.raises(Stopped):
        play(tmp_path / "stopped", constant, 3)
    play(tmp_path / "stopped", replace(constant, steps=3))
    check_alike(tmp_path / "stopped", tmp_path / "short")


def test_a_run_at_its_end_takes_no_further_step(tmp_path: Path) -> None:
    play(tmp_path / "run")
    before = load_file(tmp_path / "run" / "checkpoints" / "final" / "model.safetensors")
    play(tmp_path / "run", stop_at=0)
    assert same(load_file(tmp_path / "run" / "checkpoints" / "final" / "model.safetensors"), before)
    assert len(rows(tmp_path / "run")) == STEPS


def test_other_settings_are_refused_by_naming_each(tmp_path: Path) -> None:
    own = 'seed = 1\nname = "a"\nprompt = "bare"\n[trainer]\nsteps = 5\nsave_every = 1\nlearning_rate = 0.1\n'
    (tmp_path / "config.toml").write_text(own)
    free = 'seed = 1\nname = "b"\nprompt = "bare"\n[trainer]\nsteps = 6\nlearning_rate = 0.1\n'
    check_same_settings(tmp_path, free)
    with pytest.raises(ConfigError) as caught:
        check_same_settings(tmp_path, "seed = 2\n[trainer]\nsteps = 4\nlearning_rate = 0.1\n")
    for part in ("seed is 2, the run's 1", "prompt is left out, the run's 'bare'"):
        assert part in str(caught.value.value)
    assert "learning_rate" not in str(caught.value)
    assert "steps" not in str(caught.value)
    (tmp_path / "states" / "000003").mkdir(parents=True)
    check_same_settings(tmp_path, own.replace("steps = 5", "steps = 3"))
    with pytest.raises(ConfigError, match=r"settings is 'trainer.steps is 2, and step 3 is saved'; give"):
        check_same_settings(tmp_path, own.replace("steps = 5", "steps = 2"))


def test_two_processes_cannot_have_one_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", overwrite=False)
    with (
        open_run(folder, "", resume=False),
        pytest.raises(ConfigError, match="another process is using it"),
        open_run(RunFolder(tmp_path / "run", overwrite=False, resume=True), "", resume=True),
    ):
        raise AssertionError
    with open_run(RunFolder(tmp_path / "run", overwrite=False, resume=True), "", resume=True) as state:
        assert state is None


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("step_s", "saved"), [(7.0, 8), (100.0, 1), (45.0, 1)])
def test_at_most_a_minute_or_one_step_is_lost(step_s: float, saved: int) -> None:
    clock = Clock()
    pace = CheckpointTimer(CheckpointSchedule(), clock)
    steps = 0
    for _ in range(1000):
        clock.now_s += step_s
        steps += 1
        if pace.is_due():
            assert steps == saved
            pace.mark_saved()
            steps = 0


def test_saving_takes_no_more_than_its_share() -> None:
    clock = Clock()
    pace, spent_s = CheckpointTimer(CheckpointSchedule(), clock), 0.0
    for _ in range(1000):
        clock.now_s += 10
        if pace.is_due():
            pace.mark_saved()
            pace.record_cost(5.0)
            spent_s += 5.0
    assert 0.008 < spent_s / clock.now_s <= 0.01


def test_how_often_is_read_from_a_name_with_options() -> None:
    assert parse_checkpoint_schedule("never") is None
    assert parse_checkpoint_schedule("within") == CheckpointSchedule()
    assert parse_checkpoint_schedule("within(every_s=5, keep_last=3)") == CheckpointSchedule(5, keep_last=3)
    for wrong in ("hourly", "within(every_s=-1)", "within(keep_last=0)", "never(keep=1)", "within(max_time_share=2)"):
        with pytest.raises(ConfigError):
            parse_checkpoint_schedule(wrong)


@pytest.mark.soak
@pytest.mark.timeout(1200)  # four launches, each with a limit of its own
def test_two_processes_that_end_in_a_step_go_on_as_if_they_had_not(tmp_path: Path) -> None:
    launch(2, "tests.support.trainer.paused_training", str(tmp_path / "whole"), "0", PLAIN.optimizer)
    for stop_at in (3, 4, 0):
        launch(2, "tests.support.trainer.paused_training", str(tmp_path / "paused"), str(stop_at), PLAIN.optimizer)
    check_alike(tmp_path / "paused", tmp_path / "whole")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["scripted"])
def test_a_run_that_is_killed_at_random_moments_ends_as_one_that_never_was(kind: str, tmp_path: Path) -> None:
    check_killed(tmp_path, kind, 4, random.randrange(1000))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["transformers", "scripted", "lora", "curriculum"])
def test_twenty_kills_change_nothing(kind: str, tmp_path: Path) -> None:
    check_killed_often(tmp_path, kind, 20)
