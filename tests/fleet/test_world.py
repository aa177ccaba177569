"""A world as a run has it: opened on nodes as in this process."""

from contextlib import nullcontext
from pathlib import Path

from repl_rl.cli.train import TrainConfig
from repl_rl.evaluation import evaluate, evaluate_tampered
from repl_rl.rollout import RolloutThread
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.source import NodeFleet
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.trainer.fleets import fleet_for, fleet_status, keep_notes, plan_of
from repl_rl.world import World
from tests.fleet.memory import QUICK, MemoryCluster
from tests.untimed import untimed

LIMITS = RolloutLimits(max_lines=2, max_line_tokens=12)
WORLD = TrainConfig(engine="transformers", concurrency=1, train_tasks=4, rollout=LIMITS)


def test_a_world_that_nodes_open_plays_and_is_evaluated_as_in_this_process(tmp_path: Path) -> None:
    tasks = WORLD.drawn("train", 2)
    named = {task.id: task for task in tasks}
    plan = plan_of(WORLD, OnRay("", 1, 1, False, 60.0), QUICK)
    ids = [task.id for task in tasks for _ in range(2)]
    opened = NodeFleet(nullcontext(MemoryCluster(1)), plan, named)
    with RolloutThread(WORLD.rollouts, named) as here, opened as nodes:
        keep_notes(nodes, tmp_path)
        assert untimed(nodes.collect(ids, 0)) == untimed(here.collect(ids, 0))
        assert evaluate(nodes, tasks) == evaluate(here, tasks)
        assert evaluate_tampered(nodes, tasks) == evaluate_tampered(here, tasks)
        assert nodes.facts == here.facts
        assert nodes.memory() == here.memory()
        assert fleet_status(nodes)["fleet"] == nodes.status()
    assert (tmp_path / "fleet.json").is_file()


def test_one_process_is_a_fleet_too() -> None:
    source = fleet_for(World(), {}, "local")
    assert isinstance(source, RolloutThread)
