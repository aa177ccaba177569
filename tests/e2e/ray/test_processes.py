"""Several processes that train on what one fleet plays."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.errors import InvariantError
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.local_or_ray_rollouts import FollowerRolloutClient, open_rollout_client
from tests.support.ray.memory_cluster import TASKS, here
from tests.support.trainer.launch import launch


@pytest.mark.heavy
@pytest.mark.parametrize("groups", ["", "dynamic_sampling(max_rounds=2)"], ids=["once", "refilled"])
def test_two_processes_learn_from_one_fleet_what_one_learns(groups: str, tmp_path: Path) -> None:
    # Three groups of two over two processes of three rollouts: the second group begins on one, ends on the other.
    found, weights = [], []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        launch(processes, "tests.support.ray.training_process", str(out), groups)
        found.append(json.loads((out / "told.json").read_text()))
        weights.append(load_file(out / "final" / "model.safetensors"))
    one, two = found
    assert two["played"] == one["played"]
    for a, b in zip(one["rows"], two["rows"], strict=True):
        for key in ("loss", "reward_mean", "sampled_tokens", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=0, atol=1e-6)


def test_only_the_first_of_several_processes_opens_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = open_rollout_client(RolloutConfig(), {}, "ray", rank=1)
    assert isinstance(source, FollowerRolloutClient)
    assert source.forbidden_ids == RolloutConfig().load_renderer().forbidden_ids
    with pytest.raises(InvariantError, match="only the first process samples"):
        source.sample([])


def test_what_another_process_remembers_is_taken_up_by_one_that_plays() -> None:
    following = FollowerRolloutClient(frozenset(), {})
    with here() as source:
        assert isinstance(source, SyncRollouts)
        before = source.state_dict()
        source.load_state_dict(following.state_dict())
        assert source.state_dict() == before == following.state_dict()
        following.load_state_dict(before)
        assert len(source.collect([TASKS[0].id], 0)) == 1
        assert source.collect([], 0) == []
