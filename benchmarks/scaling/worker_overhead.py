"""`repl-rl bench fleet`: overhead of rollout workers for the owner process, and efficiency against an ideal schedule.

Workers are real actors of a Ray cluster on this machine. Their engine sleeps instead of computing, so that a machine
with few cores can run many. The benchmark covers everything except the engine: scheduling, calls, pickled trajectories,
weights.
"""

import asyncio
import hashlib
import heapq
import itertools
import os
import pickle
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.ray.config import RayOptions
from repl_rl.ray.remote_rollouts import RolloutWorkers, WorkerPlan
from repl_rl.ray.rollout_worker import (
    GroupRequest,
    Heartbeat,
    RolloutWorker,
    WeightsRef,
    WorkerCluster,
    WorkerSetup,
    compute_checksum,
)
from repl_rl.ray.worker_pool import GroupAttempt, GroupScheduler, LostWorker
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.concurrent_rollouts import BatchResult
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.rollout_stats import RuntimeInfo
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.hardware import count_cores

LINES = 8
"""Lines per rollout."""
GROUP = 8
"""Rollouts per group."""
_SPREAD = 0.5
"""Standard deviation of the logarithm of rollout lengths."""
_READY_S = 900.0
"""Timeout for all workers to start, seconds."""
_BATCHES = 4
"""Number of groups to play, as a multiple of those in flight."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class FleetConfig:
    """Number of workers and size of the load."""

    nodes: tuple[int, ...] = (1, 2, 4)
    """Numbers of workers, >= 1 each; every worker is a process with the packages of a real one."""
    in_flight: int = 256
    """Rollouts in flight per worker, >= 8, the size of a group."""
    rollout_s: float = 4.0
    """Mean length of a rollout, seconds, > 0."""
    weights_mb: int = 100
    """Size of the weights that every worker loads, MB, >= 1."""

    def __post_init__(self) -> None:
        least = {"nodes": min(self.nodes, default=0), "in_flight": self.in_flight, "weights_mb": self.weights_mb}
        for name, floor in (("nodes", 1), ("in_flight", GROUP), ("weights_mb", 1)):
            if least[name] < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if self.rollout_s <= 0:
            raise ConfigError("rollout_s", self.rollout_s, "give more than 0")


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements with one number of workers."""

    nodes: int
    in_flight: int
    """Rollouts in flight on all workers together."""
    rollouts: int
    """Rollouts that were played."""
    rollout_s: float
    """Mean length of a rollout, seconds."""
    wall_s: float
    ideal_s: float
    """Time of the same schedule without overhead, seconds."""
    efficiency: float
    """`ideal_s` over `wall_s`, at most 1."""
    owner_cpu_ms_a_rollout: float
    weights_mb: int
    weights_s: float
    """Seconds until all workers have the weights."""
    nodes_lost: tuple[LostWorker, ...]
    """Workers lost during the measurement; with any, the row is invalid."""


@dataclass(frozen=True, slots=True)
class Sleeping:
    """Settings of a sleeping worker."""

    facts: RuntimeInfo
    trajectory: Trajectory
    rollout_s: float


class SleepingNode(RolloutWorker):
    """Worker that sleeps for the length of a group, and returns a recorded rollout for each."""

    _asleep: Sleeping
    _step = 0

    async def open(self, setting: WorkerSetup) -> RuntimeInfo:
        """See `Node.open`."""
        self._asleep = pickle.loads(setting.opener)
        return self._asleep.facts

    async def load_weights(self, weights: WeightsRef, files: Mapping[str, bytes] | None) -> str | None:
        """See `Node.load`."""
        # Without shared files the weights arrive as bytes and have to be written first.
        folder = Path(weights.folder) if files is None else await asyncio.to_thread(self._write_weights, files)
        self._step = weights.policy_step
        return await asyncio.to_thread(compute_checksum, folder)

    async def run_group(self, group: GroupRequest) -> BatchResult:
        """See `Node.play`."""
        await asyncio.sleep(length_s(group.task.id, group.size, self._asleep.rollout_s))
        # Copy, because the pickled trajectories of a real worker share nothing.
        one = pickle.dumps(self._asleep.trajectory)
        played = (replace(pickle.loads(one), id=f"{group.task.id}-{n}") for n in range(group.size))
        return BatchResult(tuple(replace(trajectory, task_id=group.task.id) for trajectory in played))

    async def get_heartbeat(self) -> Heartbeat:
        """See `Node.beat`."""
        return Heartbeat(os.getpid(), policy_step=self._step)


def length_s(task_id: str, size: int, rollout_s: float) -> float:
    """Return the length of a group, seconds, which is that of its longest rollout."""
    dice = random.Random(hashlib.blake2b(task_id.encode(), digest_size=8).digest())
    return max(rollout_s * dice.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD) for _ in range(size))


def ideal_s(sizes: Sequence[int], lengths_s: Sequence[float], nodes: int, places: int) -> float:
    """Return the time of the same schedule without overhead, seconds."""
    schedule = GroupScheduler(sizes, within_s=1e9)
    for node in range(nodes):
        schedule.add_worker(f"node {node}", places)
    # Simulate the schedule: assign all free places, then advance the clock to the next end.
    now_s, order = 0.0, itertools.count()
    ends: list[tuple[float, int, GroupAttempt]] = []
    while not schedule.is_finished:
        for attempt in schedule.assign_groups(now_s):
            heapq.heappush(ends, (now_s + lengths_s[attempt.group], next(order), attempt))
        now_s, _, ended = heapq.heappop(ends)
        schedule.finish(ended)
    return now_s


def run_fleet(config: FleetConfig, tell: Tell) -> dict[str, object]:
    """Measure each number of workers, and return the content of `bench fleet --json`."""
    asleep = sleeping(config.rollout_s)
    on_ray = import_module("repl_rl.ray.worker_cluster").open_ray_cluster
    rows = []
    with on_ray(RayOptions("", max(config.nodes), 0, False, 300.0), SleepingNode) as started:
        for nodes in config.nodes:
            rows.append(measured(started.cluster, asleep, nodes, config))
            tell(told(rows[-1]))
    return {"cpus": count_cores(), "lines": LINES, "group": GROUP, "fleets": [asdict(row) for row in rows]}


def told(row: Row) -> str:
    """Return a line about a measurement, and one per worker that was lost and makes it invalid."""
    lost = [f"lost meanwhile: {one.name} at {one.seat}: {one.why}" for one in row.nodes_lost]
    return "\n".join((f"{row.nodes} nodes: efficiency {row.efficiency:.3f}", *lost))


def measured(
    cluster: WorkerCluster, asleep: Sleeping, nodes: int, config: FleetConfig, ready_s: float = _READY_S
) -> Row:
    """Measure `nodes` sleeping workers on `cluster`.

    Raises:
        ConfigError: not all workers were ready after `ready_s`.
        UnrecoverableError: no worker was left.
    """
    groups = _BATCHES * config.in_flight * nodes // GROUP
    tasks = {f"t{n}": Task(f"t{n}", "?", "1") for n in range(groups)}
    opened = fleet_on(cluster, asleep, nodes, config.in_flight, tasks)
    with opened as source, tempfile.TemporaryDirectory() as folder:
        # Measure the weight sync, then the rollouts, once all workers are ready.
        _wait_for(source, nodes, ready_s)
        _write_weights(Path(folder) / "model.safetensors", config.weights_mb)
        began_s = time.perf_counter()
        source.load_weights(Path(folder), 1)
        weights_s = time.perf_counter() - began_s
        began_s, cpu_s = time.perf_counter(), time.process_time()
        played = source.collect([id for id in tasks for _ in range(GROUP)], 1)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        lost = tuple(source.pool.lost_workers)
    # The ideal schedule has the same group lengths, which depend only on the tasks' ids.
    lengths_s = [length_s(id, GROUP, config.rollout_s) for id in tasks]
    best_s = ideal_s([GROUP] * groups, lengths_s, nodes, config.in_flight)
    return Row(
        nodes=nodes,
        in_flight=config.in_flight * nodes,
        rollouts=len(played),
        rollout_s=config.rollout_s,
        wall_s=wall_s,
        ideal_s=best_s,
        efficiency=best_s / wall_s,
        owner_cpu_ms_a_rollout=1000 * cpu_s / len(played),
        weights_mb=config.weights_mb,
        weights_s=weights_s,
        nodes_lost=lost,
    )


def fleet_on(
    cluster: WorkerCluster, asleep: Sleeping, nodes: int, in_flight: int, tasks: Mapping[str, Task]
) -> RolloutWorkers:
    """Open at most `nodes` sleeping workers with `in_flight` rollouts each, without a shared folder for weights."""
    setting = WorkerSetup(pickle.dumps(asleep), 0, os.getcwd(), ())
    plan = WorkerPlan(setting, ReplSampler(), RolloutLimits(), False, in_flight, nodes, shares_folder=False)
    return RolloutWorkers(nullcontext(cluster), plan, tasks)


def _wait_for(source: RolloutWorkers, nodes: int, limit_s: float) -> None:
    """Wait until `nodes` workers are ready.

    Raises:
        ConfigError: they are not ready in time; names those that were lost.
    """
    ends_s = time.monotonic() + limit_s
    while (ready := len(source.pool.ready_workers)) < nodes:
        if time.monotonic() > ends_s:
            lost = (
                "; ".join(f"{one.name} at {one.seat}: {one.why}" for one in source.pool.lost_workers) or "none was lost"
            )
            remedy = "free cores and memory for them, or measure fewer: --nodes"
            raise ConfigError("fleet", f"{ready} of {nodes} nodes after {limit_s:g} s ({lost})", remedy)
        time.sleep(0.1)


def _write_weights(file: Path, mb: int) -> None:
    dice = random.Random(0)
    with file.open("wb") as out:
        for _ in range(mb):
            out.write(dice.randbytes(10**6))


def sleeping(rollout_s: float) -> Sleeping:
    """Play one rollout with `LINES` lines, which the sleeping workers return."""
    renderer = RolloutConfig().load_renderer()
    script = [i for n in range(LINES) for i in renderer.encode_as_sampled(f"x = {n} * 37 + 12\n")]
    engine = ScriptedEngine([script], forbidden_ids=renderer.forbidden_ids)
    limits = RolloutLimits(max_lines=LINES)
    rollouts = Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, RolloutSettings("bare"))
    (trajectory,) = asyncio.run(rollouts.collect([Task("t", "What is 6 * 7?", "42")]))
    return Sleeping(rollouts.runtime_info, trajectory, rollout_s)
