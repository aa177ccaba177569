"""One process of a training that ends in the middle of a step.

    python -m tests.support.trainer.paused_training OUT STEP OPTIMIZER

STEP 0: it never does.
"""

import copy
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from repl_rl.runs.run_folder import RunFolder
from repl_rl.tasks import Curriculum, Task
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.checkpoint import CheckpointManager, open_run
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.processes import get_rank
from tests.support.trainer.tiny_policies import tiny_model, tiny_tokenizer
from tests.support.trainer.training_process import SharedSource


class Pausing(SharedSource):
    """Ends its process, without a word, before the rollouts of a step."""

    stop_at = 0

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        if policy_step and policy_step == self.stop_at:
            os._exit(0)
        return super().collect(task_ids, policy_step)


def main(out: Path, stop_at: int, optimizer: str) -> None:
    config = TrainerConfig(
        steps=5,
        prompts_per_step=3,
        group_size=2,
        warmup_steps=0,
        num_mini_batches=1,
        learning_rate=0.01,
        optimizer=optimizer,
    )
    tasks = [Task(f"task {i}", f"{i}?", "1", family=f"odd/{i % 2}") for i in range(6)]
    model = tiny_model()
    source = Pausing(copy.deepcopy(model))
    source.stop_at = stop_at
    is_main = get_rank() == 0
    folder = RunFolder(out, overwrite=False, resume=True, main=is_main)
    with open_run(folder, "seed = 0\n", resume=True, main=is_main) as state:

        def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
            folder.write_step(record.step, record.metrics, trajectories, record.credit)

        keeper = CheckpointManager(folder.states_folder, CheckpointSchedule(every_s=0, max_time_share=1.0), state)
        ids = [task.id for task in tasks]
        chosen = Curriculum(tasks)
        run_training(
            model,
            tiny_tokenizer(),
            ids,
            source,
            config,
            folder.checkpoints_folder,
            TrainingOptions(on_step, chosen, checkpoints=keeper),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
