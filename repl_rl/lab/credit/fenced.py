"""Teaches the bundled policy the fenced protocol, which it has never seen, by demonstrations of its own tasks.

The demonstrations have the bundled policy's own shares of guesses and mistakes, so that there is as much to learn.
"""

import asyncio
from pathlib import Path

from repl_rl.coldstart.demonstrations import CLEAN, COLD, Mix
from repl_rl.coldstart.finetune import finetune, labelled
from repl_rl.coldstart.played import Course, demonstrations
from repl_rl.coldstart.selection import FinetuneConfig
from repl_rl.coldstart.verified import Tally
from repl_rl.lab.credit.settings import TASKS
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.renderer import Renderer
from repl_rl.sandbox import InProcessSandbox
from repl_rl.tasks import BUILTIN

DEMONSTRATIONS_A_STEP = 16
"""Half a batch: each demonstration is seen about twice."""


def teach(base: Path, out: Path, steps: int) -> None:
    """Fine-tune the policy in `base` on `steps` (>= 2) batches of demonstrations, and save it in `out`.

    Two thirds of the steps teach the protocol, and the others the shares of the bundled policy's own last mix, in which
    mistakes are demonstrated and learned too.
    """
    first, last = out.with_name(out.name + "-clean"), max(1, steps // 3)
    _learn(base, first, CLEAN, FinetuneConfig(steps=steps - last, learning_rate=2e-3), seed=1)
    _learn(first, out, COLD, FinetuneConfig(steps=last, learning_rate=1e-3), seed=2)


def _learn(base: Path, out: Path, mix: Mix, config: FinetuneConfig, seed: int) -> None:
    renderer = Renderer.from_folder(base)
    played = asyncio.run(_played(renderer, mix, config.steps * DEMONSTRATIONS_A_STEP, seed))
    examples = [labelled(trajectory, learn_errors=True) for trajectory in played]
    finetune(base, renderer, examples, out, config, seed)


async def _played(renderer: Renderer, mix: Mix, count: int, seed: int) -> list[Trajectory]:
    course = Course(BUILTIN[TASKS.removeprefix("builtin:")], mix, count, seed, protocol="fenced")
    return [trajectory async for trajectory in demonstrations(course, InProcessSandbox(), renderer, Tally())]
