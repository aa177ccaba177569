"""A world as a run has it: opened on nodes as in this process."""

from contextlib import nullcontext
from pathlib import Path

from repl_rl.cli.train import TrainConfig
from repl_rl.evaluation import evaluate_with_tampering, run_evaluation
from repl_rl.ray.config import RayOptions
from repl_rl.ray.remote_rollouts import RolloutWorkers
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.local_or_ray_rollouts import (
    build_worker_plan,
    get_workers_status,
    open_rollout_client,
    write_worker_notes,
)
from tests.support.ray.memory_cluster import QUICK, MemoryCluster
from tests.support.strip_timings import untimed

LIMITS = RolloutLimits(max_lines=2, max_line_tokens=12)
WORLD = TrainConfig(engine="transformers", concurrency=1, train_tasks=4, rollout=LIMITS)


def test_a_world_that_nodes_open_plays_and_is_evaluated_as_in_this_process(tmp_path: Path) -> None:
    tasks = WORLD.draw_tasks("train", 2)
    named = {task.id: task for task in tasks}
    plan = build_worker_plan(WORLD, RayOptions("", 1, 1, False, 60.0), QUICK)
    ids = [task.id for task in tasks for _ in range(2)]
    opened = RolloutWorkers(nullcontext(MemoryCluster(1)), plan, named)
    with SyncRollouts(WORLD.open_rollouts, named) as here, opened as nodes:
        write_worker_notes(nodes, tmp_path)
        assert untimed(nodes.collect(ids, 0)) == untimed(here.collect(ids, 0))
        assert run_evaluation(nodes, tasks) == run_evaluation(here, tasks)
        assert evaluate_with_tampering(nodes, tasks) == evaluate_with_tampering(here, tasks)
        assert nodes.runtime_info == here.runtime_info
        assert nodes.state_dict() == here.state_dict()
        assert get_workers_status(nodes)["fleet"] == nodes.get_status()
    assert (tmp_path / "fleet.json").is_file()


def test_one_process_is_a_fleet_too() -> None:
    source = open_rollout_client(RolloutConfig(), {}, "local")
    assert isinstance(source, SyncRollouts)
