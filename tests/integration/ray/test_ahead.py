"""Rollouts of steps to come on a fleet: nodes take weights between lines, each line names its own, none is too old."""

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repl_rl.errors import WeightSyncError, WorkerLost
from repl_rl.judges import GroupJudge
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_hooks import GroupJudging
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.processes import wait_for
from tests.support.ray.memory_cluster import (
    IDS,
    QUICK,
    TASKS,
    MemoryCluster,
    MemoryNode,
    fleet,
    hard_times,
    here,
    weights,
)
from tests.support.ray.paused_workers import Halting, halt, halted, hurry, let_go, slow, turns, until
from tests.support.ray.scripted_workers import WeighedEngine, rollouts
from tests.support.ray.training_process import CONFIG, STEPS, Trained
from tests.support.ray.training_process import whole as whole
from tests.support.strip_timings import untimed

AHEAD = replace(CONFIG, max_staleness_steps=2)
PATIENT = replace(QUICK, no_worker_timeout_s=20.0, heartbeat_timeout_s=20.0)
AGES = {"staleness_mean", "staleness_max", "fresh_share", "trainer_idle", "sampler_idle"}


@pytest.fixture(autouse=True)
def halting() -> None:
    halt()


def shortest(task: Task, group: Sequence[Trajectory]) -> list[float]:
    return [float(len(t.lines)) for t in group]


@asynccontextmanager
async def judged(number: int = 0) -> AsyncIterator[Rollouts]:
    """A judge adds to the outcomes of a whole group."""
    yield replace(rollouts(), hooks=(FaultRetries(), GroupJudging([GroupJudge("shortest", shortest)])))


@asynccontextmanager
async def deaf(number: int = 0) -> AsyncIterator[Rollouts]:
    """All nodes take weights but the second."""
    world = rollouts()
    if number == 1:
        engine = Deaf(world.engine.scripts, forbidden_ids=world.engine.forbidden_ids)  # type: ignore[attr-defined]
        world = replace(world, engine=engine)
    yield world


class Deaf(WeighedEngine):
    """Stays at the weights that it has."""

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        pass


async def killed(node: MemoryNode) -> None:
    node.kill()


def steps_of(played: list[Trajectory]) -> set[tuple[int, ...]]:
    return {tuple(line.policy_step for line in t.lines) for t in played}


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_any_number_of_nodes_that_play_ahead_train_the_weights_of_one_process_that_does_not(
    nodes: int, whole: Trained, tmp_path: Path
) -> None:
    cluster = MemoryCluster(nodes)
    with fleet(cluster) as source:
        trained = Trained(source, tmp_path, AHEAD)
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trained.weights.items())
    assert [t.id for t in trained.played] == [t.id for t in whole.played]
    assert [t.completion_ids for t in trained.played] == [t.completion_ids for t in whole.played]
    assert all(row["staleness_max"] <= 2 for row in trained.rows)
    assert max(row["staleness_max"] for row in trained.rows) > 0
    assert all(row.keys() - whole.rows[0].keys() == AGES for row in trained.rows)
    assert sum(len(node.played) for node in cluster.nodes) >= STEPS * CONFIG.prompts_per_step


def test_a_training_ahead_whose_nodes_die_freeze_and_come_ends_the_same(whole: Trained, tmp_path: Path) -> None:
    with fleet(hard_times()) as source:
        trained = Trained(source, tmp_path, AHEAD)
        assert len(source.pool.lost_workers) == 3
        assert source.pool.retried_groups >= 3
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in trained.weights.items())
    assert all(row["staleness_max"] <= 2 for row in trained.rows)
    assert len([t.id for t in trained.played]) == len({t.id for t in trained.played}) == len(whole.played)


def test_weights_that_come_in_between_are_those_of_the_lines_after_them_on_every_node(tmp_path: Path) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, PATIENT, opener=halted) as source:
        source.load_weights(weights(tmp_path / "1"), 1)
        source.start_rollouts(IDS[:9], 3)
        source._thread.run(until(lambda: Halting.written == 9))
        source.load_weights(weights(tmp_path / "2", b"others"), 2)
        source._thread.run(let_go())
        played = list(source.collect(IDS[:9], 3))
    assert steps_of(played) <= {(1, 2), (1, 2, 2)}
    assert {t.policy_step for t in played} == {3}
    assert all(node.played for node in cluster.nodes)
    with here() as alone:
        alone.start_rollouts(IDS[:9], 3)
        expected = alone.collect(IDS[:9], 3)
    assert [(t.id, t.seed, t.completion_ids) for t in played] == [(t.id, t.seed, t.completion_ids) for t in expected]


def test_a_group_whose_node_is_lost_begins_again_with_newer_weights(tmp_path: Path) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, PATIENT, opener=halted) as source:
        source.load_weights(weights(tmp_path / "1"), 1)
        source.start_rollouts(IDS[:9], 3)
        source._thread.run(until(lambda: Halting.written == 9))
        lost = [group.task.id for group in cluster.nodes[0].played]
        assert lost
        source.load_weights(weights(tmp_path / "2"), 2)
        source._thread.run(killed(cluster.nodes[0]))
        source._thread.run(let_go())
        played = list(source.collect(IDS[:9], 3))
    again = [t for t in played if t.task_id in lost]
    others = [t for t in played if t.task_id not in lost]
    assert {line.policy_step for t in again for line in t.lines} == {2}
    assert all(t.lines[0].policy_step == 1 for t in others)


def test_a_node_that_comes_while_rollouts_are_under_way_has_the_weights_of_now_before_it_plays(tmp_path: Path) -> None:
    cluster = MemoryCluster(1)
    with fleet(cluster, PATIENT, opener=halted) as source:
        source.load_weights(weights(tmp_path / "1"), 1)
        source.start_rollouts(IDS, 3)
        source._thread.run(until(lambda: Halting.written == 6))  # what a node has places for
        source.load_weights(weights(tmp_path / "2"), 2)
        cluster.places.append("late")
        source._thread.run(until(lambda: Halting.written == 12))
        source._thread.run(let_go())
        played = list(source.collect(IDS, 3))
    assert {line.policy_step for t in played for line in t.lines} == {1, 2}
    late = {group.task.id for group in cluster.nodes[1].played}
    assert late
    assert {line.policy_step for t in played if t.task_id in late for line in t.lines} == {2}


def test_weights_that_change_while_a_node_takes_the_ones_before_are_what_it_plays_with(tmp_path: Path) -> None:
    cluster = MemoryCluster(1)
    with fleet(cluster, PATIENT, opener=slow) as source, ThreadPoolExecutor(1) as beside:
        source.load_weights(weights(tmp_path / "1"), 1)
        source.start_rollouts(IDS, 3)
        source._thread.run(until(lambda: Halting.written == 6))
        cluster.places.append("late")
        source._thread.run(until(lambda: len(cluster.nodes) == 2 and bool(cluster.nodes[1].loads)))
        changing = beside.submit(source.load_weights, weights(tmp_path / "2"), 2)
        source._thread.run(until(lambda: cluster.nodes[0].taken == [1, 2]))
        source._thread.run(turns(100))
        assert not changing.done(), "the folder of the weights is still being read"
        source._thread.run(hurry())
        changing.result()
        assert [step for step, _ in cluster.nodes[1].loads] == [1, 2]
        source._thread.run(until(lambda: Halting.written == 12))
        source._thread.run(let_go())
        played = list(source.collect(IDS, 3))
    late = {group.task.id for group in cluster.nodes[1].played}
    assert late
    assert {line.policy_step for t in played if t.task_id in late for line in t.lines} == {2}


def test_groups_of_earlier_steps_get_a_node_first() -> None:
    cluster = MemoryCluster(1)
    with fleet(cluster, PATIENT, opener=halted) as source:
        source.start_rollouts(IDS, 1)
        source.start_rollouts(IDS, 2)
        source._thread.run(let_go())
        source.collect(IDS, 1)
        source.collect(IDS, 2)
    (node,) = cluster.nodes
    steps = [group.policy_step for group in node.played]
    assert steps == sorted(steps) == [1] * len(TASKS) + [2] * len(TASKS)


def test_an_evaluation_has_places_of_its_own() -> None:
    with fleet(MemoryCluster(1), PATIENT, opener=halted) as source:
        source.start_rollouts(IDS, 1)
        source._thread.run(until(lambda: Halting.written == 6))
        assert len(source.sample(TASKS, 0.0, plain)) == len(TASKS)
        source._thread.run(let_go())
        source.collect(IDS, 1)


def plain(world: Rollouts) -> Rollouts:
    """The rollouts of a world whose sampler waits for nobody."""
    return replace(world, sampler=ReplSampler())


def test_what_had_ended_is_told_and_is_not_played_again() -> None:
    with fleet(MemoryCluster(1)) as source:
        source.start_rollouts(IDS, 1)
        assert set(source.get_finished_rollouts(1)) <= set(range(len(IDS)))
        whole = list(source.collect(IDS, 1))
    cluster = MemoryCluster(1)
    with fleet(cluster, PATIENT, opener=halted) as source:
        source.start_rollouts(IDS, 1, {n: whole[n] for n in range(1, len(IDS))})
        source._thread.run(until(lambda: Halting.written == 1))
        assert set(source.get_finished_rollouts(1)) >= set(range(1, len(IDS)))
        source._thread.run(let_go())
        played = list(source.collect(IDS, 1))
    assert played[1:] == whole[1:]
    assert untimed(played) == untimed(whole)
    assert Halting.written == 1


def test_a_group_that_has_ended_is_told_while_others_go_on() -> None:
    cluster = MemoryCluster(1)
    groups = [(1, [n for n, id in enumerate(IDS) if id == task.id]) for task in TASKS]
    with fleet(cluster, PATIENT, opener=halted) as source:
        source.start_rollouts(IDS, 1)
        source._thread.run(until(lambda: Halting.written == 6))
        assert source.get_ended_groups(1) == {}
        source._thread.run(let_go())
        number = source.wait_for_first_group(groups)
        ended = source.get_ended_groups(1)
        assert set(groups[number][1]) <= ended.keys()
        played = source.collect(IDS, 1)
    assert all(played[n] == t for n, t in ended.items())


def test_who_waits_for_a_group_of_a_step_that_fails_waits_no_longer(tmp_path: Path) -> None:
    with fleet(MemoryCluster(2), opener=deaf) as source:
        source._thread.run(until(lambda: len(source.pool.ready_workers) == 2))
        source.load_weights(weights(tmp_path), 4)
        source.start_rollouts(IDS, 5)
        source.wait_for_first_group([(5, [len(IDS)])])
        with pytest.raises(WeightSyncError, match="the node's engine is at policy step 0, its group at 4"):
            source.collect(IDS, 5)


def test_what_group_judges_add_is_added_once_by_a_run_that_goes_on() -> None:
    with fleet(MemoryCluster(1), opener=judged) as source:
        source.start_rollouts(IDS, 1)
        wait_for(lambda: len(source.get_finished_rollouts(1)) == len(IDS), None)
        ended = source.get_finished_rollouts(1)
        whole = source.collect(IDS, 1)
    assert [t.outcome for t in whole] != [ended[n].outcome for n in range(len(IDS))]
    with fleet(MemoryCluster(1), opener=judged) as source:
        source.start_rollouts(IDS, 1, ended)
        assert source.collect(IDS, 1) == whole


def test_a_node_that_did_not_take_the_weights_is_told_by_its_line(tmp_path: Path) -> None:
    with fleet(MemoryCluster(2), opener=deaf) as source:
        source._thread.run(until(lambda: len(source.pool.ready_workers) == 2))
        source.load_weights(weights(tmp_path), 4)
        looked = source.sample_probe_lines("t0")
        assert sorted(t.lines[0].policy_step for t in looked) == [0, 4]
        assert {len(t.lines) for t in looked} == {1}
        source.start_rollouts(IDS, 5)
        with pytest.raises(WeightSyncError, match="the node's engine is at policy step 0, its group at 4"):
            source.collect(IDS, 5)


def test_a_node_that_is_lost_while_it_is_looked_at_is_none_of_those_that_tell() -> None:
    def strike(number: int, node: MemoryNode) -> None:
        if number == 1:
            node.kill()

    cluster = MemoryCluster(2, strike)
    with fleet(cluster, replace(QUICK, no_worker_timeout_s=20.0)) as source:
        source._thread.run(until(lambda: len(source.pool.ready_workers) == 2))
        assert 1 <= len(source.sample_probe_lines("t0")) <= 2
        assert [one.why for one in source.pool.lost_workers] == [str(WorkerLost("it was killed by the test"))]


def test_nothing_is_under_way_after_the_end() -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, opener=halted) as source:
        source.start_rollouts(IDS, 1)
        source.start_rollouts(IDS, 2)
        source._thread.run(until(lambda: Halting.written == 12))
    assert all(node.calls["play"] for node in cluster.nodes)
    assert all(node._inner._running_rollouts == 0 for node in cluster.nodes)


def test_how_long_anything_was_under_way_is_counted() -> None:
    with fleet(MemoryCluster(1)) as source:
        assert source.rollout_busy_s == 0.0
        source.start_rollouts(IDS, 1)
        source.collect(IDS, 1)
        assert 0.0 < source.rollout_busy_s == source.rollout_busy_s
