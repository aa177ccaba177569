"""A fleet on a cluster in memory: it plays what one process plays, whatever becomes of its nodes."""

import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.errors import ConfigError, UnrecoverableError, UserCodeError
from repl_rl.ray.remote_rollouts import STATUS, RolloutWorkers
from repl_rl.ray.worker_pool import MOST_BEGUN
from repl_rl.rollout import Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.processes import wait_for
from tests.support.ray.memory_cluster import IDS, QUICK, TASKS, MemoryCluster, MemoryNode, fleet, here, weights
from tests.support.ray.scripted_workers import rollouts
from tests.support.strip_timings import untimed


@pytest.fixture(scope="module")
def expected() -> list[Trajectory]:
    """What one process plays."""
    with here() as source:
        return untimed(source.collect(IDS, 0))


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_any_number_of_nodes_plays_what_one_process_plays(nodes: int, expected: list[Trajectory]) -> None:
    cluster = MemoryCluster(nodes)
    with fleet(cluster) as source, here() as alone:
        assert untimed(source.collect(IDS, 0)) == expected
        greedy = untimed(source.sample(TASKS, temperature=0.0))
        alone.collect(IDS, 0)
        assert greedy == untimed(alone.sample(TASKS, temperature=0.0))
        assert source.state_dict() == alone.state_dict()
        assert source.runtime_info == alone.runtime_info
        mine, theirs = source.metrics(expected), alone.metrics(expected)
        assert {name: mine[name] for name in theirs} == theirs
    assert sum(len(node.played) for node in cluster.nodes) == 2 * len(TASKS)


def test_all_nodes_have_work() -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster) as source:
        source.collect(IDS, 0)
        source.collect(IDS, 0)
    assert all(node.played for node in cluster.nodes)


def test_only_groups_weights_and_heartbeats_cross_the_wire_however_many_lines_are_played(tmp_path: Path) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster) as source:
        for step in (1, 2, 3):
            source.load_weights(weights(tmp_path / str(step)), step)
            assert sum(len(t.lines) for t in source.collect(IDS, step)) > 2 * len(TASKS)
    for node in cluster.nodes:
        assert node.calls.keys() <= {"open", "load", "play", "beat", "close"}
        assert (node.calls["open"], node.calls["load"], node.calls["close"]) == (1, 3, 1)
    assert sum(node.calls["play"] for node in cluster.nodes) == 3 * len(TASKS)


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_are_killed_at_any_moment_change_nothing(seed: int, expected: list[Trajectory]) -> None:
    rng = random.Random(seed)
    fatal = set(rng.sample(range(1, len(TASKS) + 1), 3))

    def strike(number: int, node: MemoryNode) -> None:
        if number in fatal:
            rng.choice([node, *cluster.nodes]).kill()

    cluster = MemoryCluster(2, strike)
    with fleet(cluster) as source:
        assert untimed(source.collect(IDS, 0)) == expected
        assert untimed(source.collect(IDS, 0)) == expected


def test_a_frozen_node_is_given_up_and_what_it_says_later_is_ignored(expected: list[Trajectory]) -> None:
    def strike(number: int, node: MemoryNode) -> None:
        node.frozen = node.frozen or number == 2

    cluster = MemoryCluster(2, strike)
    with fleet(cluster) as source:
        assert untimed(source.collect(IDS, 0)) == expected
        (lost,) = source.pool.lost_workers
        assert "its heartbeat took longer than 0.5 s" in lost.why
        assert source.pool.retried_groups >= 1
        assert source.metrics(expected)["fleet_nodes_lost"] == 1


def test_a_seat_whose_nodes_have_played_nothing_is_taken_again_and_again() -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, replace(QUICK, retry_backoff_s=0.01)) as source:
        source.collect(IDS, 0)
        for lost in range(1, 6):
            wait_for(lambda: len(source.pool.ready_workers) == 2, None)
            cluster.nodes[-1].kill()
            wait_for(lambda: len(source.pool.lost_workers) == lost, None)  # noqa: B023
        wait_for(lambda: len(source.pool.ready_workers) == 2, None)
        assert len({one.seat for one in source.pool.lost_workers}) == 1
        assert len(cluster.nodes) == 7


def test_a_seat_that_rests_keeps_no_other_from_being_taken() -> None:
    cluster = MemoryCluster(3)
    with fleet(cluster, replace(QUICK, retry_backoff_s=600, max_retry_backoff_s=600), nodes=2) as source:
        wait_for(lambda: len(source.pool.ready_workers) == 2, None)
        cluster.nodes[0].kill()
        wait_for(lambda: len(source.pool.lost_workers) == 1, None)
        wait_for(lambda: len(source.pool.ready_workers) == 2, None)
        assert source.pool.lost_workers[0].seat not in source.pool.workers


def test_a_node_that_joins_has_the_weights_of_now_before_it_plays(tmp_path: Path) -> None:
    def strike(number: int, node: MemoryNode) -> None:
        if number == 3:
            cluster.places.append("late")
            node.kill()

    cluster = MemoryCluster(1, strike)
    with fleet(cluster) as source:
        source.load_weights(weights(tmp_path / "w"), 7)
        played = source.collect(IDS, 7)
    assert {t.policy_step for t in played} == {7}
    assert len(cluster.nodes) >= 2
    assert all(node.loads == [(7, False)] for node in cluster.nodes if node.played)


def test_where_the_folder_is_not_shared_weights_are_sent(tmp_path: Path) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, shared=False) as source:
        source.load_weights(weights(tmp_path / "w"), 1)
        assert {t.policy_step for t in source.collect(IDS, 1)} == {1}
        ready = [node for node in cluster.nodes if node.played]
    assert ready
    assert all(node.loads == [(1, True)] for node in ready)


def test_a_node_whose_weights_arrive_as_others_never_plays(tmp_path: Path) -> None:
    cluster = MemoryCluster(1)
    with fleet(cluster, replace(QUICK, retry_backoff_s=0.05)) as source:
        cluster.garbled.add(1)
        with pytest.raises(UnrecoverableError, match="weights of policy step 1 arrived as others"):
            source.load_weights(weights(tmp_path / "w"), 1)
        cluster.garbled.clear()
    assert not any(node.played for node in cluster.nodes)


def test_without_a_node_the_run_stops_after_its_patience_with_last_words() -> None:
    def strike(number: int, node: MemoryNode) -> None:
        cluster.places.clear()
        for each in cluster.nodes:
            each.kill()

    cluster = MemoryCluster(2, strike)
    with fleet(cluster) as source, pytest.raises(UnrecoverableError) as raised:
        source.collect(IDS, 0)
    assert raised.value.exit_code == 3
    assert "node 0 at seat 0: it was killed by the test; node 1 at seat 1" in str(raised.value)
    assert "--resume" in str(raised.value)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_all_of_whose_nodes_go_at_any_moment_and_never_start_again_stops_within_its_patience(seed: int) -> None:
    last = random.Random(seed).randrange(1, len(TASKS) + 1)

    def strike(number: int, node: MemoryNode) -> None:
        if number == last:
            cluster.refuses = True
            for each in cluster.nodes:
                each.kill()

    cluster = MemoryCluster(2, strike)
    with fleet(cluster, replace(QUICK, retry_backoff_s=0.1)) as source:
        begun_s = time.monotonic()
        with pytest.raises(UnrecoverableError, match=r"node \d+ at seat 0: .*; node \d+ at seat 1: "):
            source.collect(IDS, 0)
        assert time.monotonic() - begun_s < QUICK.no_worker_timeout_s + 10


@pytest.mark.parametrize("call", ["open", "load"])
def test_a_node_that_freezes_before_it_can_play_is_given_up_as_one_that_plays(call: str, tmp_path: Path) -> None:
    cluster = MemoryCluster(1)
    with fleet(cluster, replace(QUICK, no_worker_timeout_s=30)) as source:
        source.load_weights(weights(tmp_path / "w"), 1)
        first = cluster.nodes[0]
        cluster.stuck = call
        first.kill()
        wait_for(lambda: len(cluster.nodes) == 2, None)
        cluster.stuck, cluster.nodes[1].frozen = "", True
        assert {t.policy_step for t in source.collect(IDS, 1)} == {1}
        assert [one.name for one in source.pool.lost_workers] == ["node 0", "node 1"]


def test_a_hand_over_whose_peer_freezes_ends_with_its_heartbeat(tmp_path: Path, expected: list[Trajectory]) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, replace(QUICK, load_timeout_s=1e6)) as source:
        wait_for(lambda: len(source.pool.ready_workers) == 2, None)
        cluster.nodes[0].frozen = True
        source.load_weights(weights(tmp_path / "w"), 0)
        assert [one.name for one in source.pool.lost_workers] == ["node 0"]
        assert untimed(source.collect(IDS, 0)) == expected


def play_on(source: RolloutWorkers) -> None:
    """Until it fails, or does not."""
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 20:
        source.collect(IDS, 0)


def test_a_run_whose_cluster_is_silent_stops_although_its_nodes_play() -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster) as source:
        source.collect(IDS, 0)
        cluster.silent = True
        with pytest.raises(
            UnrecoverableError, match=r"fleet on memory .* has not answered for \d+ s \(the head is gone\)"
        ):
            play_on(source)


def test_weights_for_which_the_cluster_has_no_room_stop_the_run_and_end_no_node(tmp_path: Path) -> None:
    cluster = MemoryCluster(2)
    with fleet(cluster, shared=False) as source:
        cluster.full = True
        with pytest.raises(UnrecoverableError, match="object store of memory is 'full'; give it room"):
            source.load_weights(weights(tmp_path / "w"), 1)
        assert not source.pool.lost_workers


def test_a_task_under_which_node_after_node_goes_stops_the_run() -> None:
    def strike(number: int, node: MemoryNode) -> None:
        if node.played[-1].task.id == "t3":
            node.kill()

    with (
        fleet(MemoryCluster(2, strike)) as source,
        pytest.raises(UnrecoverableError, match=f"t3, .* {MOST_BEGUN} nodes"),
    ):
        source.collect(IDS, 0)


def test_a_cluster_without_room_stops_the_run_before_it_begins() -> None:
    cluster = MemoryCluster(1)
    cluster.refuses = True
    with pytest.raises(UnrecoverableError, match="the cluster has no room"), fleet(cluster):
        pass


@asynccontextmanager
async def unopenable(number: int) -> AsyncIterator[Rollouts]:
    if number >= 0:
        raise ConfigError("model folder", "nowhere", "there is no such folder")
    yield rollouts()


def test_what_a_person_can_mend_is_said_as_in_one_process() -> None:
    unopened = fleet(MemoryCluster(2), opener=unopenable)
    with pytest.raises(ConfigError, match="model folder is 'nowhere'") as raised, unopened:
        pass
    assert (raised.value.thing, raised.value.exit_code) == ("model folder", 2)


class Clumsy(RolloutSampler):
    """Fails in most rollouts, or in few."""

    few = False

    async def rollout(self, episode: Episode) -> None:
        if episode.task.id != "t0" or not self.few:
            raise ValueError("oh")
        await episode.sample()


@asynccontextmanager
async def clumsy(number: int) -> AsyncIterator[Rollouts]:
    yield rollouts(Clumsy())


def test_a_sampler_that_fails_in_most_rollouts_stops_the_run_as_in_one_process() -> None:
    with fleet(MemoryCluster(2), opener=clumsy) as source, pytest.raises(UserCodeError, match="oh"):
        source.collect(IDS, 0)


def test_what_nodes_do_stands_in_the_run_folder(tmp_path: Path) -> None:
    with fleet(MemoryCluster(2)) as source:
        source.write_notes(tmp_path)
        source.collect(IDS, 0)
        told = json.loads((tmp_path / STATUS).read_text())
        assert [node["state"] for node in told["nodes"]] == ["ready", "ready"]
        assert told["cluster"] == "memory"
    left = json.loads((tmp_path / STATUS).read_text())["nodes"]
    assert [node["state"] for node in left] == ["ended", "ended"]


def test_a_fleet_goes_on_with_what_one_process_remembers() -> None:
    with here() as alone:
        alone.collect(IDS, 0)
        memory = alone.state_dict()
    with fleet(MemoryCluster(1)) as source:
        source.load_state_dict(memory)
        assert source.state_dict() == memory


def test_what_only_older_versions_kept_in_a_state_is_passed_over() -> None:
    with here() as alone, fleet(MemoryCluster(1)) as source:
        for rollouts in (alone, source):
            memory = rollouts.state_dict()
            rollouts.load_state_dict(json.dumps({**json.loads(memory), "tally": {"kept_chunks": 3}}))
            assert rollouts.state_dict() == memory
