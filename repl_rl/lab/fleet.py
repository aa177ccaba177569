"""`repl-rl bench fleet`: what a fleet costs its owner, and how close it comes to a fleet that costs nothing.

Nodes are real actors of a Ray cluster on this machine; their engine sleeps as one on a GPU would, so that a machine of
few cores can hold many. Measured is everything but the engine: scheduling, calls, pickled trajectories, weights.
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
from repl_rl.machine.cores import cores
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.again import Part
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet.choice import OnRay
from repl_rl.rollout.fleet.members import Lost
from repl_rl.rollout.fleet.messages import Beat, Cluster, Group, Setting, Weights
from repl_rl.rollout.fleet.node import RolloutNode, checksum
from repl_rl.rollout.fleet.schedule import Attempt, Schedule
from repl_rl.rollout.fleet.source import NodeFleet, Plan
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.world import World

LINES = 8
"""Of each rollout."""
GROUP = 8
"""Rollouts of a group."""
_SPREAD = 0.5
"""Of the logarithms of rollouts' lengths."""
_READY_S = 900.0
"""For all nodes of a fleet to be there."""
_BATCHES = 4
"""How many times what is in flight is played."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class FleetConfig:
    """How large, and how long."""

    nodes: tuple[int, ...] = (1, 2, 4)
    """Numbers of nodes, >= 1 each; every one is a process with the packages of a real node."""
    in_flight: int = 256
    """Rollouts in flight on each node, >= 8: a group."""
    rollout_s: float = 4.0
    """Mean length of a rollout, seconds, > 0."""
    weights_mb: int = 100
    """Weights that every node is given, MB, >= 1."""

    def __post_init__(self) -> None:
        least = {"nodes": min(self.nodes, default=0), "in_flight": self.in_flight, "weights_mb": self.weights_mb}
        for name, floor in (("nodes", 1), ("in_flight", GROUP), ("weights_mb", 1)):
            if least[name] < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if self.rollout_s <= 0:
            raise ConfigError("rollout_s", self.rollout_s, "give more than 0")


@dataclass(frozen=True, slots=True)
class Row:
    """What one number of nodes came to."""

    nodes: int
    in_flight: int
    """Rollouts, on all nodes together."""
    rollouts: int
    """That were played."""
    rollout_s: float
    """Mean length of a rollout."""
    wall_s: float
    ideal_s: float
    """What the same schedule takes where nothing costs anything."""
    efficiency: float
    """The second of these two by the first, at most 1."""
    owner_cpu_ms_a_rollout: float
    weights_mb: int
    weights_s: float
    """Until all nodes had them."""
    nodes_lost: tuple[Lost, ...]
    """While it was measured: figures with any are no figures."""


@dataclass(frozen=True, slots=True)
class Sleeping:
    """What a node that sleeps is opened with."""

    facts: Facts
    trajectory: Trajectory
    rollout_s: float


class SleepingNode(RolloutNode):
    """Sleeps for as long as a group would take, and gives a recorded rollout for each."""

    _asleep: Sleeping
    _step = 0

    async def open(self, setting: Setting) -> Facts:
        """See `Node.open`."""
        self._asleep = pickle.loads(setting.opener)
        return self._asleep.facts

    async def load(self, weights: Weights, files: Mapping[str, bytes] | None) -> str | None:
        """See `Node.load`."""
        folder = Path(weights.folder) if files is None else await asyncio.to_thread(self._written, files)
        self._step = weights.policy_step
        return await asyncio.to_thread(checksum, folder)

    async def play(self, group: Group) -> Part:
        """See `Node.play`."""
        await asyncio.sleep(length_s(group.task.id, group.size, self._asleep.rollout_s))
        # copied, as pickled trajectories of a real node share nothing
        one = pickle.dumps(self._asleep.trajectory)
        played = (replace(pickle.loads(one), id=f"{group.task.id}-{n}") for n in range(group.size))
        return Part(tuple(replace(trajectory, task_id=group.task.id) for trajectory in played))

    async def beat(self) -> Beat:
        """See `Node.beat`."""
        return Beat(os.getpid(), policy_step=self._step)


def length_s(task_id: str, size: int, rollout_s: float) -> float:
    """How long a group takes: as long as its longest rollout."""
    dice = random.Random(hashlib.blake2b(task_id.encode(), digest_size=8).digest())
    return max(rollout_s * dice.lognormvariate(-_SPREAD * _SPREAD / 2, _SPREAD) for _ in range(size))


def ideal_s(sizes: Sequence[int], lengths_s: Sequence[float], nodes: int, places: int) -> float:
    """How long the same schedule takes where nothing costs anything."""
    schedule = Schedule(sizes, within_s=1e9)
    for node in range(nodes):
        schedule.join(f"node {node}", places)
    now_s, order = 0.0, itertools.count()
    ends: list[tuple[float, int, Attempt]] = []
    while not schedule.finished:
        for attempt in schedule.assign(now_s):
            heapq.heappush(ends, (now_s + lengths_s[attempt.group], next(order), attempt))
        now_s, _, ended = heapq.heappop(ends)
        schedule.finish(ended)
    return now_s


def run_fleet(config: FleetConfig, tell: Tell) -> dict[str, object]:
    """Measure each number of nodes, and return what `bench fleet --json` writes."""
    asleep = sleeping(config.rollout_s)
    on_ray = import_module("repl_rl.rollout.fleet.ray").on_ray
    rows = []
    with on_ray(OnRay("", max(config.nodes), 0, False, 300.0), SleepingNode) as started:
        for nodes in config.nodes:
            rows.append(measured(started.cluster, asleep, nodes, config))
            tell(told(rows[-1]))
    return {"cpus": cores(), "lines": LINES, "group": GROUP, "fleets": [asdict(row) for row in rows]}


def told(row: Row) -> str:
    """A line about a fleet that was measured, and another about each node that spoiled the figures."""
    lost = [f"lost meanwhile: {one.name} at {one.seat}: {one.why}" for one in row.nodes_lost]
    return "\n".join((f"{row.nodes} nodes: efficiency {row.efficiency:.3f}", *lost))


def measured(cluster: Cluster, asleep: Sleeping, nodes: int, config: FleetConfig, ready_s: float = _READY_S) -> Row:
    """A fleet of so many nodes on `cluster`, which sleep as `asleep` says.

    Raises:
        ConfigError: not all nodes were there after `ready_s`.
        BrokenDown: none was left.
    """
    groups = _BATCHES * config.in_flight * nodes // GROUP
    tasks = {f"t{n}": Task(f"t{n}", "?", "1") for n in range(groups)}
    opened = fleet_on(cluster, asleep, nodes, config.in_flight, tasks)
    with opened as source, tempfile.TemporaryDirectory() as folder:
        _wait_for(source, nodes, ready_s)
        _write_weights(Path(folder) / "model.safetensors", config.weights_mb)
        began_s = time.perf_counter()
        source.load_weights(Path(folder), 1)
        weights_s = time.perf_counter() - began_s
        began_s, cpu_s = time.perf_counter(), time.process_time()
        played = source.collect([id for id in tasks for _ in range(GROUP)], 1)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        lost = tuple(source.crew.lost)
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


def fleet_on(cluster: Cluster, asleep: Sleeping, nodes: int, in_flight: int, tasks: Mapping[str, Task]) -> NodeFleet:
    """Nodes that sleep, at most so many, with so many rollouts in flight on each, to which weights are sent."""
    setting = Setting(pickle.dumps(asleep), 0, os.getcwd(), ())
    plan = Plan(setting, ReplSampler(), RolloutLimits(), False, in_flight, nodes, shared=False)
    return NodeFleet(nullcontext(cluster), plan, tasks)


def _wait_for(source: NodeFleet, nodes: int, limit_s: float) -> None:
    """Have so many nodes ready.

    Raises:
        ConfigError: they are not in time; names those that were lost.
    """
    ends_s = time.monotonic() + limit_s
    while (ready := len(source.crew.ready)) < nodes:
        if time.monotonic() > ends_s:
            lost = "; ".join(f"{one.name} at {one.seat}: {one.why}" for one in source.crew.lost) or "none was lost"
            remedy = "free cores and memory for them, or measure fewer: --nodes"
            raise ConfigError("fleet", f"{ready} of {nodes} nodes after {limit_s:g} s ({lost})", remedy)
        time.sleep(0.1)


def _write_weights(file: Path, mb: int) -> None:
    dice = random.Random(0)
    with file.open("wb") as out:
        for _ in range(mb):
            out.write(dice.randbytes(10**6))


def sleeping(rollout_s: float) -> Sleeping:
    """A rollout of so many lines, played once."""
    renderer = World().renderer()
    script = [i for n in range(LINES) for i in renderer.written(f"x = {n} * 37 + 12\n")]
    engine = ScriptedEngine([script], forbidden_ids=renderer.forbidden_ids)
    limits = RolloutLimits(max_lines=LINES)
    rollouts = Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, "bare")
    (trajectory,) = asyncio.run(rollouts.collect([Task("t", "What is 6 * 7?", "42")]))
    return Sleeping(rollouts.facts, trajectory, rollout_s)
