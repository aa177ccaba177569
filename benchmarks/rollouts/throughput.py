"""Profile of rollouts of the bundled policy on its own tasks.

Host cost of a line with few and with thousands of concurrent rollouts, without engine, processes or waiting.

Timing of contenders.

`bench rollout`: all contenders in one run, interleaved, and a profile of the time per line.
"""

import asyncio
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.random_policies import SIZES, write_policy
from benchmarks.rollouts.baselines import WAYS, Played, Stage, Way, play
from benchmarks.rollouts.forced_lengths import ForcedRenderer, Plan, TimedEngine, leased
from benchmarks.rollouts.loop_profile import Stopwatch, profile, watched
from benchmarks.rollouts.text_loop import text_loop
from benchmarks.rollouts.trl_loop import TrlLoop
from repl_rl.engine import Engine, EngineOptions, ScriptedEngine, Vllm, open_engine
from repl_rl.engine.vllm_engine import open_vllm
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.retry import FaultRetries
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox, LineResult, SandboxSession, open_sandbox
from repl_rl.sandbox.base import Sandbox
from repl_rl.tasks import Split, Task, load_tasks
from repl_rl.utils.hardware import count_cores
from repl_rl.utils.package_data import find_asset


@dataclass(frozen=True, slots=True)
class Timed:
    """One pass over the tasks."""

    played: Played
    watch: Stopwatch

    @property
    def rate(self) -> float:
        """Sampled tokens per second."""
        return sum(trajectory.sampled_tokens for trajectory in self.played.trajectories) / self.watch.wall_s


async def bundled(sandbox: Sandbox, rollouts: int, repeats: int) -> dict[str, object]:
    """Play as many tasks as `rollouts`, all at once, `repeats` (>= 1) times."""
    folder = find_asset("policies/quickstart")
    tasks = load_tasks("builtin:quickstart", split=Split.TRAIN, count=rollouts, seed=0)
    renderer = Renderer.from_folder(folder)
    never = renderer.forbidden_ids
    async with open_engine("vllm", model=folder, max_sessions=rollouts, forbidden_ids=never) as engine:
        settings, hooks = RolloutSettings("bare", concurrency=rollouts), (FaultRetries(),)
        ours = Rollouts(engine, sandbox, renderer, ReplSampler(), RolloutLimits(), settings, hooks)
        # Warm up.
        await _run(ours, tasks, engine)
        runs = [await _run(ours, tasks, engine) for _ in range(repeats)]
    return {
        "ours": statistics.median(run.rate for run in runs),
        "profile": profile(runs[-1].played, runs[-1].watch),
    }


async def _run(rollouts: Rollouts, tasks: Sequence[Task], engine: Engine) -> Timed:
    timed = TimedEngine(engine)
    async with leased(rollouts.sandbox, len(tasks)) as consoles:
        fresh = replace(rollouts, engine=timed, sandbox=consoles)
        async with watched() as watch:
            trajectories = await fresh.collect(tasks)
    return Timed(Played(trajectories, timed.engine_s), watch)


FEW, MANY = 64, 4096
LINES = ("x = 6 * 7\n", "x\n", "# six times seven\n", "sum([x, x])\n")
_REPEATS = 3


async def many(few: int = FEW, most: int = MANY) -> dict[str, float]:
    """Measure CPU milliseconds per line without the console's own, with `few` and `most` concurrent rollouts.

    It also measures KiB per rollout. Both sizes play the same number of rollouts, interleaved; results are medians of
    three. Memory is the peak that Python allocates while all rollouts run, in-memory consoles included.
    """
    rollouts = _rollouts()
    costs: dict[int, list[float]] = {few: [], most: []}
    # Interleave the sizes, so that other load affects both.
    for _ in range(_REPEATS):
        for places, found in costs.items():
            found.append(await _host_s(rollouts, places, most))
    cost = {places: statistics.median(found) for places, found in costs.items()}
    return {
        "few": few,
        "many": most,
        "few_host_ms": 1000 * cost[few],
        "many_host_ms": 1000 * cost[most],
        "ratio": cost[most] / cost[few],
        "rollout_kib": await _memory(rollouts, few) / 1024,
    }


def _rollouts() -> Rollouts:
    renderer = Renderer.from_folder(find_asset("policies/quickstart"))
    engine = ScriptedEngine.from_text(LINES, renderer.encode)
    limits = RolloutLimits(max_lines=len(LINES))
    return Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, RolloutSettings("bare"))


def _tasks(count: int) -> Sequence[Task]:
    return [Task("t", "What is 6 * 7?", "42")] * count


class _Clocked:
    """In-memory console that records the CPU time of its lines."""

    def __init__(self, inner: SandboxSession, spent: list[float]) -> None:
        self._inner = inner
        self._spent = spent

    @property
    def ended(self) -> bool:
        return self._inner.ended

    async def push(self, line: str) -> LineResult:
        # This console never waits, so nothing else runs in between.
        started = time.process_time()
        try:
            return await self._inner.push(line)
        finally:
            self._spent.append(time.process_time() - started)


class _ClockedSandbox:
    def __init__(self) -> None:
        self._inner = InProcessSandbox()
        self.name = self._inner.name
        self.python_version = self._inner.python_version
        self.spent: list[float] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        async with self._inner.session() as session:
            yield _Clocked(session, self.spent)


async def _host_s(rollouts: Rollouts, places: int, count: int) -> float:
    sandbox = _ClockedSandbox()
    started = time.process_time()
    settings = replace(rollouts.settings, concurrency=places)
    await replace(rollouts, sandbox=sandbox, settings=settings).collect(_tasks(count))
    # Subtract the consoles' own time, which is not the host's overhead.
    spent = time.process_time() - started
    return (spent - sum(sandbox.spent)) / len(sandbox.spent)


async def _memory(rollouts: Rollouts, count: int) -> float:
    """Return bytes per rollout at the peak, with `count` concurrent rollouts."""
    tracemalloc.start()
    try:
        await replace(rollouts, settings=replace(rollouts.settings, concurrency=count)).collect(_tasks(count))
        return tracemalloc.get_traced_memory()[1] / count
    finally:
        tracemalloc.stop()


async def rates(ways: Mapping[str, Way], stage: Stage, repeats: int) -> dict[str, list[float]]:
    """Return sampled tokens per second of each contender and repeat; within a repeat they run one after the other."""
    measured: dict[str, list[float]] = {key: [] for key in ways}
    for _ in range(repeats):
        for key, found in measured.items():
            # Consoles start before the clock does.
            async with leased(stage.sandbox, stage.plan.rollouts) as consoles:
                started = time.perf_counter()
                sampled = await ways[key](replace(stage, sandbox=consoles))
                found.append(sampled / (time.perf_counter() - started))
    return measured


Json = dict[str, object]
_STOCK = "stock "
KEYS = ("uninterrupted", "bound", "ours", "request_a_line", "lockstep", "text_loop", "trl")
"""Contenders, in the order of each repeat."""
STOCK_BLOCK = 128
"""Default block size of vLLM on CPU. Ours is smaller, which makes one request per line cheaper for every contender."""
STOCK_WAYS = ("request_a_line", "lockstep", "text_loop")
"""Contenders that are also measured on vLLM with its default block size, as without this package."""


@dataclass(frozen=True, slots=True)
class RolloutEffort:
    """Size of the measurement."""

    rollouts: int = 64
    """Concurrent rollouts (>= 1)."""
    lines: int = 16
    """Lines per rollout (>= 1)."""
    repeats: Mapping[str, int] = field(default_factory=lambda: {"small": 3, "medium": 1})
    """Repeats per contender, by size of the policy (>= 1); the JSON has medians."""


def bench_rollout(effort: RolloutEffort | None = None) -> Json:
    """Measure, and return the content of `bench rollout --json`.

    `small` and `medium` hold sampled tokens per second of each contender, null if it cannot run (`reasons` gives the
    reason). `ratios` holds the speed of ours over each. `stock` has the same for contenders that compute a line's
    prefix again, on an engine with vLLM's default block size.

    Raises:
        SandboxUnavailable: this machine does not support `local`.
        ConfigError: vLLM is not installed.
    """
    return asyncio.run(_measure(effort or RolloutEffort()))


async def _measure(effort: RolloutEffort) -> Json:
    report: Json = {}
    async with open_sandbox("local", warm=effort.rollouts) as sandbox:
        for name in effort.repeats:
            report[name] = await _size(name, effort, sandbox)
        report["bundled"] = await bundled(sandbox, effort.rollouts, max(effort.repeats.values()))
    plan = {"rollouts": effort.rollouts, "lines": effort.lines, "repeats": dict(effort.repeats)}
    report["many"] = await many()
    return report | {"plan": plan, "cpus": count_cores(), "load_average": os.getloadavg()[0]}


async def _size(name: str, effort: RolloutEffort, sandbox: Sandbox) -> Json:
    """Return all figures of one size of the policy."""
    plan = Plan(effort.rollouts, effort.lines)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parameters = write_policy(SIZES[name], folder)
        opening = EngineOptions(folder, max_sessions=effort.rollouts)
        engine = await stack.enter_async_context(open_vllm(opening, Vllm()))
        ways = dict(WAYS)
        ways["text_loop"] = await stack.enter_async_context(text_loop(opening, Vllm()))
        ways["trl"] = TrlLoop(folder, plan)
        ways |= await _stock(stack, opening, Vllm(block_size=STOCK_BLOCK))
        stage, repeats = Stage(plan, engine, sandbox, ForcedRenderer(folder, plan)), effort.repeats[name]
        # Warm up every contender with one line per rollout.
        await rates(ways, replace(stage, plan=Plan(effort.rollouts, 1)), 1)
        raw = await rates(ways, stage, repeats)
        profiles = [await _profile(stage) for _ in range(repeats)]
    medians = {key: statistics.median(found) for key, found in raw.items()}
    # All ratios are ours over theirs, so above 1 means that ours is faster.
    ratios = {key: medians["ours"] / rate for key, rate in medians.items() if key != "ours"}
    stock = {key: _STOCK + key for key in STOCK_WAYS}
    return {
        **{key: medians[key] for key in KEYS},
        "reasons": {},
        "ratios": {key: ratios[key] for key in KEYS if key != "ours"},
        "stock": {key: medians[name] for key, name in stock.items()}
        | {"block_size": STOCK_BLOCK, "ratios": {key: ratios[name] for key, name in stock.items()}},
        "raw": raw,
        "profile": {part: statistics.median(found[part] for found in profiles) for part in profiles[0]},
        "parameters": parameters,
        "fallback": engine.fallback_reason,
    }


async def _stock(stack: AsyncExitStack, opening: EngineOptions, options: Vllm) -> dict[str, Way]:
    """Open the stock contenders, on separate engines."""
    engine = await stack.enter_async_context(open_vllm(opening, options))

    def on_stock(way: Way) -> Way:
        return lambda stage: way(replace(stage, engine=engine))

    loop = await stack.enter_async_context(text_loop(opening, options))
    return {_STOCK + key: on_stock(WAYS[key]) if key in WAYS else loop for key in STOCK_WAYS}


async def _profile(stage: Stage) -> dict[str, float]:
    """Return the parts of a line's time; `vllm_host_ms` is the host time of `bound`: vLLM's front end alone."""
    # `bound` samples the same chunks without consoles, so its host time is vLLM's.
    async with watched() as engine_alone:
        await WAYS["bound"](stage)
    async with leased(stage.sandbox, stage.plan.rollouts) as consoles:
        async with watched() as watch:
            played = await play(replace(stage, sandbox=consoles))
        parts = profile(played, watch)
    vllm_host_ms = 1000 * engine_alone.cpu_s / (stage.plan.rollouts * stage.plan.lines)
    return parts | {"vllm_host_ms": vllm_host_ms, "own_host_ms": parts["host_ms"] - vllm_host_ms}
