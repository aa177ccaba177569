"""A training on a fleet ends as one in one process, bit for bit, whatever becomes of the nodes."""

from pathlib import Path

import pytest
import torch

from tests.support.ray.memory_cluster import MemoryCluster, fleet, hard_times
from tests.support.ray.scripted_workers import RENDERER
from tests.support.ray.training_process import CONFIG, STEPS, Trained
from tests.support.ray.training_process import whole as whole
from tests.support.trainer.tiny_policies import tiny_model


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
