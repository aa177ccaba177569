"""A curriculum in training: it chooses the tasks of each step by the outcomes so far."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.cli import main
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

TASKS = [
    Task(f"{family} {n}", f"{family} {n}?", "1", family=family) for family in ("sums/1", "sums/3") for n in range(8)
]
CONFIG = TrainerConfig(steps=16, prompts_per_step=3, group_size=2, warmup_steps=0, estimator="outcome")


class Graded(SampledSource):
    """Everything of level 1 is solved; of level 3, one rollout of each two."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        played = super().collect(task_ids, policy_step)
        outcomes = [float("/1" in task_id or place % 2) for place, task_id in enumerate(task_ids)]
        return [replace(t, outcome=outcome) for t, outcome in zip(played, outcomes, strict=True)]


def play(out: Path, seed: int) -> tuple[list[list[str]], list[float]]:
    """Task ids of every step, and the mean level that each step reported."""
    model = tiny_model()
    source, levels = Graded(copy.deepcopy(model)), list[float]()
    steps: list[list[str]] = []

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        steps.append([t.task_id for t in trajectories])
        levels.append(record.metrics["level_mean"])

    curriculum = Curriculum(TASKS, seed)
    run_training(
        model, tiny_tokenizer(), [task.id for task in TASKS], source, CONFIG, out, TrainingOptions(on_step, curriculum)
    )
    assert curriculum.solve_rates["sums/1"] > 0.9 > 0.6 > curriculum.solve_rates["sums/3"]
    return steps, levels


def test_training_moves_to_the_family_that_is_solved_now_and_then_and_repeats_exactly(tmp_path: Path) -> None:
    steps, levels = play(tmp_path / "a", 0)
    for step, level in zip(steps, levels, strict=True):
        assert step[::2] == step[1::2], "the rollouts of a group share a task"
        assert level == pytest.approx(sum(3 if "/3" in task_id else 1 for task_id in step) / len(step))
    assert sum(levels) / len(levels) > 2.3, "without a curriculum it is 2"
    again, _ = play(tmp_path / "b", 0)
    assert again == steps


def test_a_curriculum_of_one_family_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["train", "--tasks", "builtin:count", "--train-tasks", "20", "--out", str(tmp_path)]
    assert main([*flags, "--curriculum"]) == 2
    assert "all tasks are of one family, so it has no effect" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
