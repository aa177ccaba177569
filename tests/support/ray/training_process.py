"""A process of a training whose rollouts one fleet plays; the first one writes what it came to.

python -m tests.support.ray.training_process OUT GROUPS
"""

import json
import os
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from repl_rl.rollout import RolloutClient
from repl_rl.trainer.train_setup import FollowerRolloutClient, LeaderRolloutWorkers
from tests.integration.ray.test_training import CONFIG, Trained
from tests.support.ray.memory_cluster import TASKS, MemoryCluster, fleet
from tests.support.ray.scripted_workers import RENDERER


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
