"""A process of a training whose rollouts one fleet plays; the first one writes what it came to.

python -m tests.support.ray.training_process OUT GROUPS
"""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from repl_rl.rollout import RolloutClient
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.local_or_ray_rollouts import FollowerRolloutClient, LeaderRolloutWorkers
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.ray.memory_cluster import TASKS, MemoryCluster, fleet, here
from tests.support.ray.scripted_workers import RENDERER
from tests.support.strip_timings import untimed
from tests.support.trainer.tiny_policies import tiny_model

STEPS = 5
CONFIG = TrainerConfig(
    steps=STEPS, prompts_per_step=3, group_size=2, warmup_steps=0, importance_sampling="token_truncate(tolerance=100.0)"
)


class Trained:
    """What a training came to."""

    def __init__(self, source: RolloutClient, out: Path, config: TrainerConfig = CONFIG) -> None:
        self.rows: list[dict[str, float]] = []
        self.played: list[Trajectory] = []
        tokenizer = RENDERER.tokenizer
        model = tiny_model(vocab=len(tokenizer), hidden=16, layers=1)
        final = run_training(
            model, tokenizer, [task.id for task in TASKS], source, config, out, TrainingOptions(self.step)
        )
        self.weights = load_file(final / "model.safetensors")

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        figures = {k: v for k, v in record.metrics.items() if not k.endswith("_s") and not k.startswith("fleet_")}
        self.rows.append(figures)
        self.played += untimed(trajectories)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with here() as source:
        return Trained(source, tmp_path_factory.mktemp("whole"))


def opened(rank: int, alone: bool) -> AbstractContextManager[RolloutClient]:
    if rank:
        return FollowerRolloutClient(RENDERER.forbidden_ids, {task.id: task for task in TASKS})
    return fleet(MemoryCluster(2)) if alone else fleet(MemoryCluster(2), kind=LeaderRolloutWorkers)


def main(out: Path, groups: str) -> None:
    rank, alone = int(os.environ.get("RANK", "0")), "WORLD_SIZE" not in os.environ
    with opened(rank, alone) as source:
        trained = Trained(source, out, replace(CONFIG, group_sampling=groups))
    if rank == 0:
        told = {"rows": trained.rows, "played": [repr(trajectory) for trajectory in trained.played]}
        (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
