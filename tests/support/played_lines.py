"""Rollouts of given lines."""

import asyncio
from dataclasses import replace

from repl_rl.evaluation import (
    TamperingSandbox,
)
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.scripted_rollouts import TASK, world


def play(lines: list[str], altered: bool = False) -> list[Trajectory]:
    """One rollout whose policy writes these lines, of which the last must end it; `altered`: with altered output."""
    rollouts = world(lines)
    if altered:
        rollouts = replace(rollouts, sandbox=TamperingSandbox(rollouts.sandbox))
    return asyncio.run(rollouts.collect([TASK]))
