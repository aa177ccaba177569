"""One process of the trainings of `test_processes`: python -m tests.support.trainer.training_process OUT

It trains in each of `WAYS`, one after the other: importing takes longer than all of them.
"""

import copy
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.tiny_policies import (
    SampledSource,
    draw,
    logprobs_of,
    prompt_of,
    tiny_model,
    tiny_tokenizer,
    trajectory_of,
)

WAYS = (True, False)
"""With the fast pass, and with TRL's own."""


class SharedSource(SampledSource):
    """Gives each process its part of the same rollouts: a rollout's dice are those of its place in the whole step."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        first = int(os.environ.get("RANK", "0")) * len(task_ids)
        return [self.placed(task, first + i, policy_step) for i, task in enumerate(task_ids)]

    def placed(self, task_id: str, place: int, policy_step: int) -> Trajectory:
        skeleton = draw(random.Random(f"{place} {policy_step}"))
        prompt = prompt_of(task_id)
        return trajectory_of(
            prompt, skeleton, logprobs_of(self.model, prompt, skeleton), place, policy_step, place == 4
        )


def trained(fast: bool, out: Path) -> None:
    """Train two steps. The records are in `out`, too."""
    config = TrainerConfig(
        steps=2,
        prompts_per_step=3,
        group_size=2,
        warmup_steps=0,
        estimator="two_stream",
        fast_logprobs=fast,
        # Plain descent: Adam would blow up the rounding of a gradient that is nearly 0, and what rounds differs.
        optimizer="sgd",
        learning_rate=0.1,
    )
    model = tiny_model()
    records: list[dict[str, float]] = []

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        records.append(record.metrics)

    source = SharedSource(copy.deepcopy(model))
    tasks = [Task(f"task {i}", f"{i}?", "1", family=f"odd/{i % 2}") for i in range(6)]
    # In one of the two ways a curriculum chooses: its draws must not depend on the number of processes either.
    curriculum = Curriculum(tasks) if config.fast_logprobs else None
    run_training(
        model, tiny_tokenizer(), [task.id for task in tasks], source, config, out, TrainingOptions(on_step, curriculum)
    )
    if os.environ.get("RANK", "0") == "0":
        (out / "records.json").write_text(json.dumps(records))


if __name__ == "__main__":
    for number, fast in enumerate(WAYS):
        trained(fast, Path(sys.argv[1]) / str(number))
