"""`bench fleet`: a real cluster in small, and what its figures are held to."""

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from benchmarks.scaling.page import FIGURES, PAGE, Figures, block, merged
from benchmarks.scaling.worker_overhead import (
    GROUP,
    FleetConfig,
    SleepingNode,
    fleet_on,
    ideal_s,
    measured,
    sleeping,
    told,
)
from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.ray.config import RayOptions
from repl_rl.ray.rollout_worker import WorkerCluster
from repl_rl.ray.worker_cluster import open_ray_cluster
from repl_rl.tasks import Task
from tests.support.ray.memory_cluster import MemoryCluster, MemoryNode

SMALL = FleetConfig(nodes=(2,), in_flight=16, rollout_s=0.05, weights_mb=1)


def test_a_fleet_that_costs_nothing_takes_as_long_as_its_schedule() -> None:
    assert ideal_s([4, 4, 4, 4], [3.0, 1.0, 1.0, 1.0], nodes=1, places=8) == pytest.approx(3.0)
    assert ideal_s([4, 4, 4, 4], [1.0] * 4, nodes=2, places=4) == pytest.approx(2.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_small_fleet_is_measured_and_published(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    small = ("--nodes", "1", "2", "--in-flight", "16", "--rollout-s", "0.2", "--weights-mb", "1")
    assert main(["bench", "fleet", *small, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert [(row["nodes"], row["rollouts"]) for row in found["fleets"]] == [(1, 64), (2, 128)]
    assert all(0 < row["efficiency"] <= 1 and row["nodes_lost"] == [] for row in found["fleets"])
    assert block(merged([Figures(**found)] * 2)).count("\n") == 8


def test_figures_of_two_machines_are_not_published_as_those_of_one() -> None:
    with pytest.raises(ValueError, match="different machines"):
        merged([Figures(cpus, 8, 8, []) for cpus in (2, 4)])


def test_a_node_that_is_lost_while_a_fleet_is_measured_is_named_and_its_figures_are_not_published() -> None:
    def strike(number: int, node: MemoryNode) -> None:
        if number == 3:
            node.kill()

    cluster = MemoryCluster(2, strike, SleepingNode)
    row = measured(cluster, sleeping(SMALL.rollout_s), 2, SMALL)
    for node in cluster.nodes:
        asyncio.run(node.reap())
    (lost,) = row.nodes_lost
    assert lost.why == "it was killed by the test"
    assert told(row).splitlines()[1:] == [f"lost meanwhile: {lost.name} at {lost.seat}: {lost.why}"]
    written = json.loads(json.dumps(asdict(row)))
    assert written["nodes_lost"] == [{"name": lost.name, "seat": lost.seat, "why": lost.why, "could_play": True}]
    with pytest.raises(ValueError, match=f"nodes were lost.*{lost.name}.*it was killed by the test"):
        merged([Figures(2, 8, 8, [written])])


def test_nodes_that_do_not_come_end_the_measurement_with_their_last_words() -> None:
    cluster = MemoryCluster(1, kind=SleepingNode)
    with pytest.raises(ConfigError, match=r"fleet is '1 of 2 nodes after 0\.1 s \(none was lost\)'"):
        measured(cluster, sleeping(SMALL.rollout_s), 2, SMALL, ready_s=0.1)


def memory_cluster() -> AbstractContextManager[WorkerCluster]:
    return nullcontext(MemoryCluster(16, kind=SleepingNode))


@contextmanager
def ray_cluster() -> Iterator[WorkerCluster]:
    with open_ray_cluster(RayOptions("", 16, 0, False, 300.0), SleepingNode) as started:
        yield started.cluster


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "opened",
    [pytest.param(memory_cluster, marks=pytest.mark.heavy), pytest.param(ray_cluster, marks=pytest.mark.soak)],
)
def test_sixteen_thousand_rollouts_of_sixteen_nodes_leave_the_owners_memory_as_it_was(
    opened: Callable[[], AbstractContextManager[WorkerCluster]],
) -> None:
    tasks = {f"t{n}": Task(f"t{n}", "?", "1") for n in range(256)}
    ids, kept_mib = [id for id in tasks for _ in range(GROUP)], []
    with opened() as cluster, fleet_on(cluster, sleeping(0.001), 16, 128, tasks) as source:
        for _ in range(12):
            assert len(source.collect(ids, 0)) == len(ids)
            gc.collect()
            kept_mib.append(psutil.Process().memory_info().rss / 2**20)
    later = kept_mib[4:]  # 16,384 rollouts, after as many again by half
    assert sum(later[4:]) / 4 - sum(later[:4]) / 4 < 4, kept_mib


def test_the_page_shows_the_figures_that_were_published() -> None:
    assert block(Figures(**json.loads(FIGURES.read_text()))) == PAGE.text


def test_without_figures_nothing_is_published() -> None:
    with pytest.raises(ValueError, match="bench fleet --json"):
        merged([])
