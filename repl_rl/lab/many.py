"""Host cost of a line with few and with thousands of concurrent rollouts, without engine, processes or waiting."""

import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from repl_rl.engine import ScriptedEngine
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox, LineResult, SandboxSession
from repl_rl.tasks import Task
from repl_rl.utils.package_data import find_asset

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
    return Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, "bare")


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
    await replace(rollouts, sandbox=sandbox, concurrency=places).collect(_tasks(count))
    # Subtract the consoles' own time, which is not the host's overhead.
    spent = time.process_time() - started
    return (spent - sum(sandbox.spent)) / len(sandbox.spent)


async def _memory(rollouts: Rollouts, count: int) -> float:
    """Return bytes per rollout at the peak, with `count` concurrent rollouts."""
    tracemalloc.start()
    try:
        await replace(rollouts, concurrency=count).collect(_tasks(count))
        return tracemalloc.get_traced_memory()[1] / count
    finally:
        tracemalloc.stop()
