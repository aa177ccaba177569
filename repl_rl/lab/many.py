"""What a line costs the host with few rollouts at once and with thousands: no engine, no processes, no waiting."""

import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from repl_rl.engine import ScriptedEngine
from repl_rl.machine.assets import asset
from repl_rl.rollout import ReplSampler, Rollouts
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.sandbox import InProcessSandbox, PushResult, SandboxSession
from repl_rl.tasks import Task

FEW, MANY = 64, 4096
LINES = ("x = 6 * 7\n", "x\n", "# six times seven\n", "sum([x, x])\n")
_REPEATS = 3


async def many(few: int = FEW, most: int = MANY) -> dict[str, float]:
    """CPU milliseconds of a line beyond the console's own, with `few` and `most` rollouts at once; KiB a rollout.

    Both play the same number of rollouts, interleaved; medians of three. Memory is what Python allocates while all of
    them are under way, in-memory consoles included.
    """
    rollouts = _rollouts()
    costs: dict[int, list[float]] = {few: [], most: []}
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
    renderer = Renderer.from_folder(asset("policies/quickstart"))
    engine = ScriptedEngine.from_text(LINES, renderer.encode)
    limits = RolloutLimits(max_lines=len(LINES))
    return Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), limits, "bare")


def _tasks(count: int) -> Sequence[Task]:
    return [Task("t", "What is 6 * 7?", "42")] * count


class _Clocked:
    """An in-memory console that says what CPU time its lines took."""

    def __init__(self, inner: SandboxSession, spent: list[float]) -> None:
        self._inner = inner
        self._spent = spent

    @property
    def ended(self) -> bool:
        return self._inner.ended

    async def push(self, line: str) -> PushResult:
        started = time.process_time()  # nobody else runs in between: this console never waits
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
    spent = time.process_time() - started
    return (spent - sum(sandbox.spent)) / len(sandbox.spent)


async def _memory(rollouts: Rollouts, count: int) -> float:
    """Bytes a rollout at the peak, with `count` of them at once."""
    tracemalloc.start()
    try:
        await replace(rollouts, concurrency=count).collect(_tasks(count))
        return tracemalloc.get_traced_memory()[1] / count
    finally:
        tracemalloc.stop()
