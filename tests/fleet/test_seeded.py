"""The engine that seeds its sessions, on real Ray: any number of nodes trains the weights of one process."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from repl_rl.cli.train import TrainConfig
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import Fleet, RolloutThread
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.members import Waits
from repl_rl.rollout.fleet.ray import Started, on_ray
from repl_rl.rollout.fleet.source import NodeFleet
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.fleets import plan_of
from repl_rl.trainer.loop import fit
from repl_rl.trainer.source import StepRecord
from tests.processes import wait_for
from tests.untimed import untimed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]
STEPS = 5
CONFIG = TrainerConfig(steps=STEPS, prompts_per_step=4, group_size=2, warmup_steps=0, dtype="float32")
LIMITS = RolloutLimits(max_lines=2, max_line_tokens=12)
WORLD = TrainConfig(engine="transformers", sandbox="local", concurrency=1, train_tasks=8, rollout=LIMITS)
"""One rollout at a time on each node: a pass over several differs in the last bit."""
TASKS = {task.id: task for task in WORLD.drawn("train", 8)}


class Trained:
    """What a training came to."""

    def __init__(self, source: Fleet, out: Path) -> None:
        self.played: list[Trajectory] = []
        tokenizer = WORLD.renderer().tokenizer
        final = fit(WORLD.model_folder, tokenizer, list(TASKS), source, CONFIG, out, self.step)
        self.weights = load_file(final / "model.safetensors")

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        self.played += untimed(trajectories)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    with RolloutThread(WORLD.rollouts, TASKS) as source:
        return Trained(source, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    with on_ray(OnRay("", 4, 1, True, 600.0)) as cluster:
        yield cluster


@pytest.mark.parametrize(("nodes", "shared"), [(1, True), (2, False), (4, True)])
def test_any_number_of_nodes_on_ray_trains_the_weights_of_one_process(
    nodes: int, shared: bool, started: Started, whole: Trained, tmp_path: Path
) -> None:
    plan = plan_of(WORLD, OnRay("", nodes, 1, True, 600.0), Waits(patience_s=600), shared)
    with NodeFleet(nullcontext(started.cluster), plan, TASKS) as source:
        wait_for(lambda: len(source.crew.ready) == nodes, None, 600)
        trained = Trained(source, tmp_path)
        assert all(member.groups for member in source.crew.ready)
        assert not source.crew.lost
    assert [t.id for t in trained.played] == [t.id for t in whole.played]
    assert trained.played == whole.played
    assert trained.weights.keys() == whole.weights.keys()
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trained.weights.items())
    untrained = load_file(WORLD.model_folder / "model.safetensors")
    assert any(not torch.equal(weight, untrained[name].float()) for name, weight in whole.weights.items())
