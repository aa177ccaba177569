"""Whether sampling ahead pays where lines take their time in the console."""

import statistics
from dataclasses import replace

from repl_rl.bench.rates import rates
from repl_rl.bench.ways import WAYS, Stage

LINE_S = (0.02, 0.2)
"""Seconds that a line takes."""
FEW = 16
"""Rollouts at once that leave the engine waiting; with many, others fill the time of a line."""


async def slow_lines(stage: Stage, repeats: int) -> list[dict[str, float]]:
    """Sampled tokens a second of ours with sampling ahead off and on: a row for each length of a line and few or all.

    Rollouts have as many lines as those of `stage`: with few lines the one that prints most often decides.
    """
    rows = []
    for line_s in LINE_S:
        for count in sorted({min(FEW, stage.plan.rollouts), stage.plan.rollouts}):
            plan = replace(stage.plan, rollouts=count, line_s=line_s)
            rows.append(await _row(replace(stage, plan=plan, renderer=stage.renderer.planned(plan)), repeats))
    return rows


async def _row(stage: Stage, repeats: int) -> dict[str, float]:
    found = await rates({key: WAYS[key] for key in ("ours", "optimistic")}, stage, repeats)
    medians = {key: statistics.median(values) for key, values in found.items()}
    return medians | {"line_s": stage.plan.line_s, "rollouts": stage.plan.rollouts}
