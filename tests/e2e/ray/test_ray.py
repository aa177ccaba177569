"""A fleet on Ray: two simulated machines, real actors, real consoles."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from ray._common.utils import get_ray_address_file

from repl_rl.ray.actor_calls import kill_actor, start_actor
from repl_rl.ray.config import RayOptions
from repl_rl.ray.remote_rollouts import RolloutWorkers, WorkerPlan
from repl_rl.ray.rollout_worker import RolloutWorker
from repl_rl.ray.start_local_cluster import add_machine, remove_machine
from repl_rl.ray.worker_cluster import RayWorkerCluster, StartedCluster, open_ray_cluster
from repl_rl.ray.worker_pool import WorkerTimeouts
from repl_rl.rollout import SyncRollouts
from repl_rl.trajectory.trajectory import Trajectory
from tests.e2e.test_docs_commands import SMALL
from tests.support.processes import wait_for
from tests.support.ray.memory_cluster import IDS, TASKS, setting, weights
from tests.support.ray.scripted_workers import LIMITS, isolated, rollouts
from tests.support.strip_timings import untimed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
WAITS = WorkerTimeouts(
    heartbeat_interval_s=0.5, heartbeat_timeout_s=6, poll_interval_s=0.5, retry_backoff_s=0.1, no_worker_timeout_s=120
)


@pytest.fixture(scope="module")
def expected() -> Sequence[Trajectory]:
    with SyncRollouts(isolated, {task.id: task for task in TASKS}) as source:
        return untimed(source.collect(IDS, 0))


def found() -> str:
    """Which cluster a program of this user finds that looks for one."""
    address = Path(get_ray_address_file(None))
    return address.read_text() if address.is_file() else ""


@pytest.fixture(scope="module")
def started() -> Iterator[StartedCluster]:
    """A cluster of two machines; when it is gone, nothing of it is left."""
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    before = set(psutil.Process().children(recursive=True))
    shared = set(Path("/dev/shm").iterdir())
    known = found()
    with open_ray_cluster(RayOptions("", 2, 1, True, 120.0)) as started:
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
        assert found() == known, "nobody else finds it, and none of another's is written over"
        yield started
    wait_for(lambda: set(psutil.Process().children(recursive=True)) <= before, None, 30)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert not [file for file in set(Path("/dev/shm").iterdir()) - shared if "plasma" in file.name]


def on(started: StartedCluster, stack: ExitStack, shared: bool = True, nodes: int = 0) -> RolloutWorkers:
    plan = WorkerPlan(setting(isolated), rollouts().sampler, LIMITS, False, 6, nodes, WAITS, shared)
    return stack.enter_context(RolloutWorkers(nullcontext(started.cluster), plan, {task.id: task for task in TASKS}))


def pids(source: RolloutWorkers) -> list[int]:
    return [member.heartbeat.pid for member in source.pool.ready_workers if member.heartbeat.pid]


def both(source: RolloutWorkers) -> list[int]:
    wait_for(lambda: len(pids(source)) >= 2, None)
    return pids(source)


def test_nodes_on_ray_play_what_one_process_plays(
    started: StartedCluster, expected: Sequence[Trajectory], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        source = on(started, stack, shared=False)
        both(source)
        assert gc.get_freeze_count() > 0, "the owner's collector leaves out what was there before"
        assert untimed(source.collect(IDS, 0)) == expected
        source.load_weights(weights(tmp_path / "w"), 3)
        assert {t.policy_step for t in source.collect(IDS, 3)} == {3}
        assert [member.groups_played > 0 for member in source.pool.ready_workers] == [True, True]


def listening(process: psutil.Process) -> list[str]:
    """Where a process listens."""
    with suppress(psutil.NoSuchProcess):  # some that started are done
        found = process.net_connections("inet")
        return [one.laddr.ip.removeprefix("::ffff:") for one in found if one.status == psutil.CONN_LISTEN]
    return []


def test_a_cluster_of_ours_listens_on_the_loopback_address_alone_and_wants_a_token(started: StartedCluster) -> None:
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    heard = [address for process in processes for address in listening(process)]
    assert heard
    assert set(heard) <= {"127.0.0.1", "::1"}


def test_a_node_that_is_killed_or_frozen_is_outlived_and_leaves_nothing(
    started: StartedCluster, expected: Sequence[Trajectory]
) -> None:
    with ExitStack() as stack:
        source = on(started, stack)
        for number, harm in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            victim = psutil.Process(both(source)[0])
            children = victim.children(recursive=True)
            assert children, "the node's consoles"
            struck = threading.Timer(0.2, victim.send_signal, [harm])
            struck.start()
            while len(source.pool.lost_workers) < number:
                assert untimed(source.collect(IDS, 0)) == expected
            struck.join()
            wait_for(lambda: not any(p.is_running() for p in (victim, *children)), None, 30)  # noqa: B023
        assert untimed(source.collect(IDS, 0)) == expected


def test_a_machine_that_comes_is_used_and_one_that_goes_is_outlived(
    started: StartedCluster, expected: Sequence[Trajectory]
) -> None:
    assert started.machines is not None
    with ExitStack() as stack:
        source = on(started, stack)
        both(source)
        machine = add_machine(started.machines, num_cpus=1)
        wait_for(lambda: len(source.pool.ready_workers) == 3, None)
        assert untimed(source.collect(IDS, 0)) == expected
        gone = threading.Timer(0.1, remove_machine, [started.machines, machine])
        gone.start()
        while not source.pool.lost_workers:
            assert untimed(source.collect(IDS, 0)) == expected
        gone.join()
        assert untimed(source.collect(IDS, 0)) == expected


def test_gpus_that_something_else_on_the_cluster_has_are_no_seats_until_they_are_free(started: StartedCluster) -> None:
    assert started.machines is not None
    machine = add_machine(started.machines, num_cpus=1, num_gpus=3)  # Ray counts them; nobody looks for them
    cluster = RayWorkerCluster(RayOptions("", 0, 1, True, 120.0), True)

    def seats() -> list[str]:
        return [seat for seat in asyncio.run(cluster.list_slots()) if machine.node_id[:6] in seat]

    wait_for(lambda: len(seats()) == 3, None, 60)
    other = start_actor(RolloutWorker, machine.node_id, gpus=1)
    wait_for(lambda: len(seats()) == 2, None, 60)
    mine = seats()[1]
    node = asyncio.run(cluster.start_worker(mine))
    assert len(seats()) == 2
    assert seats()[0] == mine, "what is held comes first, and is a seat as long as it is"
    kill_actor(other)
    wait_for(lambda: len(seats()) == 3, None, 60)
    node.kill()
    wait_for(lambda: seats()[0] != mine and len(seats()) == 3, None, 60)
    remove_machine(started.machines, machine)


def test_the_command_of_the_page_trains_on_two_nodes(tmp_path: Path) -> None:
    command = "train --name wide --workers ray --workers.max-workers 2 --workers.simulate-machines true"
    argv = [sys.executable, "-m", "repl_rl.cli", *command.split(), *SMALL["train"].split()]
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=500)
    summary = json.loads((tmp_path / "runs" / "wide" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 1)
    assert len(json.loads((tmp_path / "runs" / "wide" / "fleet.json").read_text())["nodes"]) == 2
