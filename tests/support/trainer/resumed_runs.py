"""Trainings that are stopped and resumed, compared with one that never was."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from repl_rl.runs.run_folder import RunFolder
from repl_rl.runs.store import read_trajectories
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.checkpoint import (
    CheckpointManager,
    find_newest_state,
    open_run,
)
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Sampled, Trajectory
from tests.support.strip_timings import untimed as rollouts_without_times
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

STEPS = 5
PLAIN = TrainerConfig(steps=STEPS, prompts_per_step=2, group_size=3, warmup_steps=1, learning_rate=0.01)
TASKS = [Task(f"task {i}", f"{i}?", "1", family=f"odd/{i % 2}") for i in range(6)]
ALWAYS = CheckpointSchedule(every_s=0, max_time_share=1.0)


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
            TrainingOptions(on_step, chosen, checkpoints=keeper),
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
    """Return the number of kills before it ended, at most `kills`."""
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


CLOCKED = {"trainer_idle", "sampler_idle"}
"""Figures that a clock says."""


AGED = {"staleness_mean", "staleness_max", "fresh_share", "logprob_gap_mean", "logprob_gap_max",
        "logprob_gap_after_observation", "logprob_gap_elsewhere"}  # fmt: skip
"""Figures that say which weights wrote which line, or are of the lines that those of now wrote."""


def ageless(t: Trajectory) -> Trajectory:
    """Without what says which weights wrote which line."""
    segments = [
        replace(s, lines=tuple(replace(line, policy_step=0) for line in s.lines)) if isinstance(s, Sampled) else s
        for s in t.segments
    ]
    return replace(t, segments=tuple(segments))
