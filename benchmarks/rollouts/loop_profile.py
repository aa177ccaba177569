"""Profile of a line's time and its cost on the host."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.rollouts.baselines import Played

_LOOK_S = 0.005


@dataclass(slots=True)
class Stopwatch:
    """Measurements while a contender runs."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this process: vLLM's front end, asyncio, the record. Engine and consoles are separate processes."""
    late_s: list[float] = field(default_factory=list)
    """Delays of the event loop after a timer was due, seconds."""

    @property
    def queue_s(self) -> float:
        """Mean delay of the event loop, seconds."""
        return statistics.fmean(self.late_s) if self.late_s else 0.0


@asynccontextmanager
async def watched() -> AsyncIterator[Stopwatch]:
    """Measure the block: wall clock, this process's CPU time, and the delay of its event loop."""
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
    """Return milliseconds per line, averaged over all lines.

    `engine` and `kernel` are wall clock inside the engine's session and inside the console, without the delay of our
    event loop. That delay is `queue`, once for each of them. `splice` is the rest of a rollout. `host` is CPU time of
    this process, shared by all rollouts.
    """
    lines = [line for trajectory in played.trajectories for line in trajectory.lines]
    wall_s = sum(trajectory.wall_s for trajectory in played.trajectories)
    kernel_s = sum(line.execution.elapsed_s for line in lines if line.execution is not None)
    count, queue_s = len(lines), watch.queue_s
    # Each line waits for the event loop twice: after the engine, and after the console.
    parts = {
        "engine": played.engine_s / count - queue_s,
        "kernel": kernel_s / count - queue_s,
        "queue": 2 * queue_s,
        "splice": (wall_s - played.engine_s - kernel_s) / count,
        "host": watch.cpu_s / count,
    }
    return {f"{name}_ms": 1000 * value for name, value in parts.items()} | {"engine_share": played.engine_s / wall_s}
