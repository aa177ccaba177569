"""Where the time of a line goes, and what it costs the host."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from repl_rl.lab.ways import Played

_LOOK_S = 0.005


@dataclass(slots=True)
class Stopwatch:
    """What was seen while a way played."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of this process: vLLM's front end, asyncio, the record. Engine and consoles are processes of their own."""
    late_s: list[float] = field(default_factory=list)
    """How late the event loop came to something that was ready."""

    @property
    def queue_s(self) -> float:
        """Mean wait of something that is ready for the event loop, seconds."""
        return statistics.fmean(self.late_s) if self.late_s else 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Stopwatch]:
    """Measure the block: wall clock, this process's CPU time, and how late its event loop is."""
    watch = Stopwatch()
    looking = asyncio.create_task(_look(watch))
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        yield watch
    finally:
        watch.cpu_s, watch.wall_s = time.process_time() - cpu, time.perf_counter() - wall
        looking.cancel()
        await asyncio.wait({looking})


async def _look(watch: Stopwatch) -> None:
    while True:
        due = time.perf_counter() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        watch.late_s.append(time.perf_counter() - due)


def profile(played: Played, watch: Stopwatch) -> dict[str, float]:
    """Milliseconds of a line, in the mean over all lines.

    `engine`, `kernel`: wall clock inside the engine's session and inside the console, without the wait for our event
    loop, which is `queue` (one wait for each of them); `splice`: all the rest of a rollout. `host`: CPU time of this
    process, shared by all rollouts.
    """
    lines = [line for trajectory in played.trajectories for line in trajectory.lines]
    wall_s = sum(trajectory.wall_s for trajectory in played.trajectories)
    kernel_s = sum(line.execution.elapsed_s for line in lines if line.execution is not None)
    count, queue_s = len(lines), watch.queue_s
    parts = {
        "engine": played.engine_s / count - queue_s,
        "kernel": kernel_s / count - queue_s,
        "queue": 2 * queue_s,
        "splice": (wall_s - played.engine_s - kernel_s) / count,
        "host": watch.cpu_s / count,
    }
    return {f"{name}_ms": 1000 * value for name, value in parts.items()} | {"engine_share": played.engine_s / wall_s}
