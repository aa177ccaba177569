"""The clock of the bench."""

import time
from collections.abc import Mapping
from dataclasses import replace

from repl_rl.lab.forced import leased
from repl_rl.lab.ways import Stage, Way


async def rates(ways: Mapping[str, Way], stage: Stage, repeats: int) -> dict[str, list[float]]:
    """Sampled tokens a second of each way, each repeat; one way after the other in each repeat."""
    measured: dict[str, list[float]] = {key: [] for key in ways}
    for _ in range(repeats):
        for key, found in measured.items():
            async with leased(stage.sandbox, stage.plan.rollouts) as consoles:
                started = time.perf_counter()
                sampled = await ways[key](replace(stage, sandbox=consoles))
                found.append(sampled / (time.perf_counter() - started))
    return measured
