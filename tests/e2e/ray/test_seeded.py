"""The engine that seeds its sessions, on real Ray: any number of nodes trains the weights of one process."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.cli.train import TrainConfig
from repl_rl.ray.config import RayOptions
from repl_rl.ray.remote_rollouts import RolloutWorkers
from repl_rl.ray.worker_cluster import StartedCluster, open_ray_cluster
from repl_rl.ray.worker_pool import WorkerTimeouts
from repl_rl.rollout import RolloutClient, SyncRollouts
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.local_or_ray_rollouts import build_worker_plan
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.processes import wait_for
from tests.support.strip_timings import untimed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = 5
CONFIG = TrainerConfig(steps=STEPS, prompts_per_step=4, group_size=2, warmup_steps=0, dtype="float32")
LIMITS = RolloutLimits(max_lines=2, max_line_tokens=12)
WORLD = TrainConfig(engine="transformers", sandbox="local", concurrency=1, train_tasks=8, rollout=LIMITS)
"""One rollout at a time on each node: a pass over several differs in the last bit."""
TASKS = {task.id: task for task in WORLD.draw_tasks("train", 8)}


class Trained:
    """What a training came to."""

    def __init__(self, source: RolloutClient, out: Path) -> None:
        self.played: list[Trajectory] = []
        tokenizer = WORLD.load_renderer().tokenizer
        final = run_training(
            WORLD.model_folder, tokenizer, list(TASKS), source, CONFIG, out, TrainingOptions(self.step)
        )
        self.weights = load_file(final / "model.safetensors")

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        self.played += untimed(trajectories)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with SyncRollouts(WORLD.open_rollouts, TASKS) as source:
        return Trained(source, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def started() -> Iterator[StartedCluster]:
    with open_ray_cluster(RayOptions("", 4, 1, True, 600.0)) as cluster:
        yield cluster


@pytest.mark.parametrize(("nodes", "shared"), [(1, True), (2, False), (4, True)])
def test_any_number_of_nodes_on_ray_trains_the_weights_of_one_process(
    nodes: int, shared: bool, started: StartedCluster, whole: Trained, tmp_path: Path
) -> None:
    plan = build_worker_plan(
        WORLD, RayOptions("", nodes, 1, True, 600.0), WorkerTimeouts(no_worker_timeout_s=600), shared
    )
    with RolloutWorkers(nullcontext(started.cluster), plan, TASKS) as source:
        wait_for(lambda: len(source.pool.ready_workers) == nodes, None, 600)
        trained = Trained(source, tmp_path)
        assert all(member.groups_played for member in source.pool.ready_workers)
        assert not source.pool.lost_workers
    assert [t.id for t in trained.played] == [t.id for t in whole.played]
    assert trained.played == whole.played
    assert trained.weights.keys() == whole.weights.keys()
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trained.weights.items())
    untrained = load_file(WORLD.model_folder / "model.safetensors")
    assert any(not torch.equal(weight, untrained[name].float()) for name, weight in whole.weights.items())
