"""Timing of contenders."""

import time
from collections.abc import Mapping
from dataclasses import replace

from repl_rl.lab.forced import leased
from repl_rl.lab.ways import Stage, Way


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
