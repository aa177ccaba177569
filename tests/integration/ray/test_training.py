"""A training on a fleet ends as one in one process, bit for bit, whatever becomes of the nodes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.rollout import RolloutClient
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train_loop import run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.ray.memory_cluster import TASKS, MemoryCluster, fleet, hard_times, here
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
        final = run_training(model, tokenizer, [task.id for task in TASKS], source, config, out, self.step)
        self.weights = load_file(final / "model.safetensors")

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        figures = {k: v for k, v in record.metrics.items() if not k.endswith("_s") and not k.startswith("fleet_")}
        self.rows.append(figures)
        self.played += untimed(trajectories)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with here() as source:
        return Trained(source, tmp_path_factory.mktemp("whole"))


def check_alike(trained: Trained, whole: Trained) -> None:
    assert trained.played == whole.played
    assert trained.rows == whole.rows
    assert trained.weights.keys() == whole.weights.keys()
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trained.weights.items())


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_any_number_of_nodes_trains_the_weights_of_one_process(nodes: int, whole: Trained, tmp_path: Path) -> None:
    cluster = MemoryCluster(nodes)
    with fleet(cluster) as source:
        check_alike(Trained(source, tmp_path), whole)
    assert sum(len(node.played) for node in cluster.nodes) == STEPS * CONFIG.prompts_per_step
    moved = tiny_model(vocab=len(RENDERER.tokenizer), hidden=16, layers=1).state_dict()
    assert any(not torch.equal(weight, moved[name]) for name, weight in whole.weights.items())


def test_a_training_whose_nodes_die_freeze_and_come_ends_the_same(whole: Trained, tmp_path: Path) -> None:
    cluster = hard_times()
    with fleet(cluster) as source:
        trained = Trained(source, tmp_path)
        assert len(source.pool.lost_workers) == 3
    check_alike(trained, whole)
    assert len(cluster.nodes) >= 5
