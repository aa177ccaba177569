"""Whether sampling ahead pays where lines take their time in the console."""

import statistics
from dataclasses import replace

from repl_rl.lab.rates import rates
from repl_rl.lab.ways import WAYS, Stage

ROWS: tuple[tuple[float, int | None], ...] = ((0.02, 4), (0.02, 16), (0.02, None), (0.2, 16), (0.2, None))
"""Seconds that a line takes, and rollouts at once; None: as many as elsewhere in the bench.

A few leave the engine waiting while a line runs; with many, the others fill that time.
"""
FEW_REPEATS = 3
"""A few rollouts are over soon and gain a few per cent: as many times the repeats as for all of them."""


async def slow_lines(stage: Stage, repeats: int) -> list[dict[str, float]]:
    """Sampled tokens a second of ours with sampling ahead off and on, a row for each of `ROWS` that fits `stage`.

    Rollouts have as many lines as those of `stage`: with few lines the one that prints most often decides.
    """
    rows = []
    for line_s, few in ROWS:
        if few is None or few < stage.plan.rollouts:
            plan = replace(stage.plan, rollouts=few or stage.plan.rollouts, line_s=line_s)
            there = replace(stage, plan=plan, renderer=stage.renderer.planned(plan))
            rows.append(await _row(there, repeats * FEW_REPEATS if few else repeats))
    return rows


async def _row(stage: Stage, repeats: int) -> dict[str, float]:
    found = await rates({key: WAYS[key] for key in ("ours", "optimistic")}, stage, repeats)
    medians = {key: statistics.median(values) for key, values in found.items()}
    return medians | {"line_s": stage.plan.line_s, "rollouts": stage.plan.rollouts}
