"""Demonstrations for tests of fine-tuning."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from repl_rl.rollout.token_renderer import Renderer
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.scripted_rollouts import TASK, world

POLICY = Path(__file__).parents[2] / "repl_rl" / "policies" / "quickstart"
RENDERER = Renderer.from_folder(POLICY)


def play(lines: Sequence[str], task_id: str = "t1") -> Trajectory:
    (t,) = asyncio.run(world(lines, renderer=RENDERER).collect([replace(TASK, id=task_id)]))
    return t


RIGHT = play(["x = 6 * 7\n", "x\n", "submit_final_answer(42)\n"])
RECOVERED = play(["y\n", "6 * 7\n", "submit_final_answer(42)\n"])
