"""Which GPUs of a cluster nodes are given: none that something else has, nor the one that this process trains on."""

import pytest

from repl_rl.errors import ConfigError
from repl_rl.ray.actor_calls import Machine
from repl_rl.ray.config import RayOptions
from repl_rl.ray.connect_cluster import validate_free_gpus
from repl_rl.ray.start_local_cluster import get_worker_gpu_variables
from repl_rl.ray.worker_cluster import compute_worker_capacity


@pytest.mark.parametrize(
    ("gpus", "there", "free", "held", "found"),
    [(1, 8, 8, 0, 8), (1, 8, 4, 0, 4), (1, 8, 0, 3, 3), (2, 8, 8, 0, 4), (2, 8, 3, 1, 2), (1, 4, 4, 2, 4)],
    ids=["all", "others have half", "mine", "pairs", "an odd one", "one of mine that Ray has not placed yet"],
)
def test_a_machine_has_room_for_nodes_on_gpus_that_nobody_else_has(
    gpus: int, there: int, free: int, held: int, found: int
) -> None:
    machine = Machine("id", "host", there, free)
    assert compute_worker_capacity(RayOptions("head:6379", 0, gpus, False, 60.0), False, machine, held) == (found, gpus)


@pytest.mark.parametrize(("gpus", "there"), [(1, 0), (2, 1), (0, 8)])
def test_a_machine_without_enough_gpus_has_room_for_one_node_that_takes_none(gpus: int, there: int) -> None:
    machine = Machine("id", "host", there, there)
    assert compute_worker_capacity(RayOptions("head:6379", 4, gpus, False, 60.0), False, machine, 0) == (1, 0)


@pytest.mark.parametrize(("offered", "there", "trainers"), [(7, 8, 1), (4, 8, 4), (0, 1, 1), (0, 0, 1), (8, 0, 1)])
def test_gpus_that_nobody_trains_on_are_rays(offered: int, there: int, trainers: int) -> None:
    validate_free_gpus("fleet", offered, there, trainers)


@pytest.mark.parametrize(("offered", "there", "trainers", "remedy"), [
    (8, 8, 1, "CUDA_VISIBLE_DEVICES=1,2,3,4,5,6,7 ray start"),
    (5, 8, 4, "CUDA_VISIBLE_DEVICES=4,5,6,7 ray start"),
    (1, 1, 1, "ray start --num-gpus=0"),
    (2, 2, 4, "ray start --num-gpus=0"),
])  # fmt: skip
def test_a_cluster_whose_nodes_would_share_a_gpu_with_the_trainer_is_refused(
    offered: int, there: int, trainers: int, remedy: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        validate_free_gpus("fleet", offered, there, trainers)
    assert f"fleet is 'Ray has {offered} of the {there} GPUs of this machine, {trainers} are" in str(raised.value)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(("seen", "processes", "left"), [
    ("0,1,2,3,4,5,6,7", 1, {"CUDA_VISIBLE_DEVICES": "1,2,3,4,5,6,7"}),
    ("3,5,6", 2, {"CUDA_VISIBLE_DEVICES": "6"}),
    ("3", 1, {}),
    ("", 1, {}),
])  # fmt: skip
def test_a_cluster_of_ours_is_given_the_gpus_that_are_not_trained_on(
    seen: str, processes: int, left: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert get_worker_gpu_variables() == left
