"""A run that is stopped anywhere goes on exactly: all that it leaves is what one leaves that was never stopped."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.errors import ConfigError, ReplRLError
from repl_rl.runs.run_folder import RunFolder, check_same_settings
from repl_rl.runs.store import read_trajectories
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule, CheckpointTimer, parse_checkpoint_schedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.grpo_config import GRPOTrainer
from repl_rl.trainer.plugins.checkpoint import (
    CheckpointManager,
    copy_tensors,
    find_difference,
    find_newest_state,
    list_states,
    open_run,
)
from repl_rl.trainer.plugins.trackers import PREFIX, TABLE
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train_loop import run_training
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.atomic_files import DIGESTS
from tests.e2e.trainer.test_processes import launch
from tests.support.strip_timings import untimed as rollouts_without_times
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

STEPS = 5
PLAIN = TrainerConfig(steps=STEPS, prompts_per_step=2, group_size=3, warmup_steps=1, learning_rate=0.01)
TASKS = [Task(f"task {i}", f"{i}?", "1", family=f"odd/{i % 2}") for i in range(6)]
ALWAYS = CheckpointSchedule(every_s=0, max_time_share=1.0)
SELDOM = CheckpointSchedule(every_s=1e6)


class Stopped(BaseException):
    """Stands for whatever ends a run."""


class Brittle:
    """A rollout source that stops the run in the middle of its nth call."""

    forbidden_ids = frozenset[int]()

    def __init__(self, stop_at: int | None) -> None:
        self.inner = SampledSource(tiny_model())
        self.left = stop_at

    def load_weights(self, folder: Path, policy_step: int) -> None:
        self.inner.load_weights(folder, policy_step)

    def collect(self, task_ids: Sequence[str], policy_step: int) -> Sequence[Trajectory]:
        random.random()  # as the code of a user may
        torch.rand(3)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Stopped
        return self.inner.collect(task_ids, policy_step)


def play(
    run: Path,
    config: TrainerConfig = PLAIN,
    stop_at: int | None = None,
    curriculum: bool = False,
    resume: bool = True,
    how: CheckpointSchedule = ALWAYS,
    tell_stop: int | None = None,
    kind: type[CheckpointManager] = CheckpointManager,
) -> None:
    """Train in `run`, from where it is; stop in the rollouts of the nth step from here, or when a step is told of."""
    folder = RunFolder(run, overwrite=False, resume=resume)
    with open_run(folder, "seed = 0\n", resume) as state:

        def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
            if record.step == tell_stop:
                raise Stopped
            folder.write_step(record.step, record.metrics, trajectories, record.credit)

        keeper = kind(folder.states_folder, how, state)
        chosen = Curriculum(TASKS, 7) if curriculum else None
        ids = [task.id for task in TASKS]
        model = tiny_model()
        run_training(
            model,
            tiny_tokenizer(),
            ids,
            Brittle(stop_at),
            config,
            folder.checkpoints_folder,
            on_step,
            chosen,
            keeper=keeper,
        )


def untimed(value: object) -> object:
    """Without what a clock says."""
    if isinstance(value, Mapping):
        return {key: untimed(one) for key, one in value.items() if not str(key).endswith("_s")}
    return [untimed(one) for one in value] if isinstance(value, list) else value


def same(one: object, other: object) -> bool:
    """Equal bit for bit, tensors too."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def rows(run: Path) -> list[object]:
    return [untimed(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_alike(run: Path, whole: Path) -> None:
    """`run` ended as `whole` did."""
    assert rows(run) == rows(whole)
    stored = [rollouts_without_times(read_trajectories(place / "trajectories")) for place in (run, whole)]
    assert stored[0] == stored[1]
    ends = [find_newest_state(place / "states") for place in (run, whole)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].step == ends[1].step
    assert same(ends[0].load_tensors(), ends[1].load_tensors())
    assert ends[0].metadata["parts"] == ends[1].metadata["parts"]
    weights = [load_file(place / "checkpoints" / "final" / "model.safetensors") for place in (run, whole)]
    assert same(*weights)
    start = tiny_model().state_dict()
    assert any(not torch.equal(w, start[name]) for name, w in weights[1].items()), "something was learned"


WAYS = {
    "plain": (PLAIN, False),
    "curriculum": (replace(PLAIN, fast_logprobs=False, anneal_steps=4), True),
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


def test_the_difference_of_two_states_is_found_bit_for_bit_and_named() -> None:
    weight = torch.tensor([0.0, float("nan")])
    saved = {"w": weight, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    assert find_difference(copy_tensors(saved), saved) == ""
    assert find_difference({**saved, "w": torch.tensor([-0.0, float("nan")])}, saved) == "w"
    assert find_difference({**saved, "w": weight.double()}, saved) == "w"
    assert find_difference({**saved, "groups": [{"lr": 0.1, "betas": (0.9, 0.98)}]}, saved, "o") == "o.groups.0.betas.1"
    assert find_difference({**saved, "groups": []}, saved) == "groups"


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
    for part in ("seed is 2, the run's 1", "prompt is left out, the run's 'bare'", "trainer.steps is 4, the run's 5"):
        assert part in str(caught.value.value)
    assert "learning_rate" not in str(caught.value)


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


def check_ended_alike(run: Path, whole: Path) -> None:
    """As `check_alike`, and what is told of both at the end."""
    check_alike(run, whole)
    ends = [untimed(json.loads((place / "summary.json").read_text())) for place in (run, whole)]
    assert isinstance(ends[0], dict)
    ends[0].pop("resumed_at_steps", None)
    assert ends[0] == ends[1]


def check_killed(
    folder: Path, kind: str, kills: int, seed: int, alike: Callable[[Path, Path], None] = check_ended_alike
) -> int:
    """How often it was killed before it ended, at most `kills` times."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.support.trainer.killed_training", str(folder), kind, str(kills), str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    logs = [(folder / f"{name}.log").read_text()[-2000:] for name in ("whole", "killed")]
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    print(done.stdout)
    alike(folder / "killed" / "run", folder / "whole" / "run")
    return int(done.stdout.split("mortal: ")[1].split()[0])


def check_killed_often(
    folder: Path, kind: str, kills: int, alike: Callable[[Path, Path], None] = check_ended_alike
) -> None:
    """As `check_killed`, in as many runs as so many kills take."""
    runs = 0
    while kills:
        kills -= check_killed(folder / str(runs), kind, kills, random.randrange(1000), alike)
        runs += 1


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
