"""Fine-tuned starting policies of runs, from demonstrations of the tasks.

The *fenced* policy knows the fenced protocol, which the bundled one has never seen. Its demonstrations have the bundled
policy's shares of guesses and mistakes, so that it has as much to learn. The *failing* policy writes many lines that
fail, so that penalties have an effect. The *slipping* policy solves tasks of many lines (`long`), with slips that no
output shows. A *shown* model sees as many demonstrations of the console as of fences, by the same recipe.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.credit import long_problems as long
from benchmarks.credit.conditions import QUICKSTART, Way
from benchmarks.credit.settings import Settings
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox
from repl_rl.sft.demonstrations import (
    CLEAN,
    COLD,
    ECHO,
    WARM,
    DemonstrationMix,
    DemonstrationPlan,
    DemonstrationSpec,
    generate_demonstrations,
    plan_demonstration,
    play_demonstration,
)
from repl_rl.sft.demonstrations_from_doctests import DemonstrationCounts
from repl_rl.sft.finetune import build_labelled_example, run_finetuning
from repl_rl.sft.finetune_config import FinetuneConfig
from repl_rl.tasks import Problem, Split, draw_problem, make_task
from repl_rl.trajectory.trajectory import Trajectory

DEMONSTRATIONS_A_STEP = 16
"""Demonstrations per step, half a batch, so that each demonstration is seen about twice."""
FAILING = 0.4
"""Share of the failing policy's demonstrated lines that end in an error."""
MOST_FAILURES = 4
"""Maximum number of failures of one line before it is written correctly, so that a demonstration ends."""
_GUESSING = DemonstrationMix(guess=0.5, mistake=0.0)


def teach(settings: Settings, way: Way, base: Path, out: Path) -> None:
    """Fine-tune the policy in `base` into the starting policy of a way's runs, and save it in `out`."""
    if settings.start == "shown":
        teach_shown(base, out, settings.shown_steps, way, settings.families or QUICKSTART)
    elif way == "fenced":
        teach_fenced(base, out, settings.fenced_steps)
    elif settings.start == "failing":
        teach_failing(base, out, settings.failing_steps)
    else:
        teach_slipping(base, out, settings.slipping_steps)


def teach_fenced(base: Path, out: Path, steps: int) -> None:
    """Fine-tune the policy in `base` on `steps` (>= 2) batches of fenced demonstrations, and save it in `out`.

    Two thirds of the steps teach the protocol. The others have the shares of the bundled policy's last mix, in which
    mistakes are demonstrated and learned too.
    """
    first, last = out.with_name(out.name + "-clean"), max(1, steps // 3)
    _learn_fenced(base, first, CLEAN, FinetuneConfig(steps=steps - last, learning_rate=2e-3), seed=1)
    _learn_fenced(first, out, COLD, FinetuneConfig(steps=last, learning_rate=1e-3), seed=2)


def teach_failing(base: Path, out: Path, steps: int) -> None:
    """Fine-tune the policy in `base` on `steps` (>= 1) batches of demonstrations that fail often; save it in `out`."""
    renderer = Renderer.from_folder(base)
    shown = asyncio.run(_failing(renderer, steps * DEMONSTRATIONS_A_STEP, seed=3))
    _learn(base, renderer, shown, out, FinetuneConfig(steps=steps, learning_rate=1e-3), seed=3)


def teach_slipping(base: Path, out: Path, steps: int) -> None:
    """Fine-tune the policy in `base` on `steps` (>= 3) batches of tasks of many lines, and save it in `out`.

    Two thirds of the steps show them without a slip, the others with slips.
    """
    first, last = out.with_name(out.name + "-clean"), max(1, steps // 3)
    renderer = Renderer.from_folder(base)
    clean = asyncio.run(_long(renderer, (steps - last) * DEMONSTRATIONS_A_STEP, slips=False, seed=4))
    _learn(base, renderer, clean, first, FinetuneConfig(steps=steps - last, learning_rate=2e-3), seed=4)
    slips = asyncio.run(_long(renderer, last * DEMONSTRATIONS_A_STEP, slips=True, seed=5))
    _learn(first, renderer, slips, out, FinetuneConfig(steps=last, learning_rate=1e-3), seed=5)


def teach_shown(base: Path, out: Path, steps: int, way: Way, families: tuple[str, ...]) -> None:
    """Show a model the console, or fences, in `steps` (>= 3) batches of demonstrations; save it in `out`.

    Two thirds of the demonstrations teach the way itself, errors and recoveries included. The others mostly guess, so
    that there is something to learn. Both ways have equally many demonstrations, of the same families, in the same
    shares.
    """
    renderer, count = Renderer.from_folder(base), steps * DEMONSTRATIONS_A_STEP
    protocol = "fenced" if way == "fenced" else "line"
    last = count // 3
    warm = asyncio.run(_shown(renderer, DemonstrationSpec(families, WARM, count - last, seed=6, protocol=protocol)))
    cold = asyncio.run(_shown(renderer, DemonstrationSpec(families, COLD, last, seed=7, protocol=protocol)))
    config = FinetuneConfig(steps, DEMONSTRATIONS_A_STEP, learning_rate=2e-4, warmup_steps=2)
    _learn(base, renderer, [*warm, *cold], out, config, seed=6)


def failing_plan(drawn: Problem, rng: random.Random) -> DemonstrationPlan:
    """Return a plan that is a guess or a correct demonstration, half of the time each, with failures before its lines.

    Each failure has probability `FAILING`. Failures before an answer that copies an output are placed before the line
    that prints it.
    """
    lines: list[str] = []
    # `at` is the line before which the next failures are inserted.
    at = 0
    for line in plan_demonstration(drawn, _GUESSING, rng).lines:
        lines.append(line)
        if ECHO not in line and not line.startswith(" "):
            at = len(lines) - 1
        failures: list[str] = []
        while len(failures) < MOST_FAILURES and rng.random() < FAILING:
            failures.append(_failure(lines[at], rng))
        lines[at:at] = failures
        at += len(failures)
    return DemonstrationPlan(tuple(lines))


def _failure(line: str, rng: random.Random) -> str:
    """Return a line in error, as a small slip in this one would give."""
    text = line.rstrip("\n")
    return rng.choice((f"{text})\n", "result\n", f"result = value + {rng.randint(1, 9)}\n"))


async def _failing(renderer: Renderer, count: int, seed: int) -> list[Trajectory]:
    families = QUICKSTART
    course = DemonstrationSpec(families, _GUESSING, count, seed)
    # Without isolation, because these lines come from our own plans.
    rng, sandbox = random.Random(f"{seed}/failing"), InProcessSandbox()
    shown: list[Trajectory] = []
    for number in range(count):
        family = families[number % len(families)]
        drawn = draw_problem(family, rng, Split.TRAIN)
        trajectory = await play_demonstration(
            make_task(family, drawn), failing_plan(drawn, rng), course, sandbox, renderer
        )
        shown += [trajectory] if trajectory is not None else []
    return shown


async def _long(renderer: Renderer, count: int, slips: bool, seed: int) -> list[Trajectory]:
    course = DemonstrationSpec((long.FAMILY,), CLEAN, count, seed)
    rng, sandbox = random.Random(f"{seed}/long"), InProcessSandbox()
    shown: list[Trajectory] = []
    for _ in range(count):
        one = long.sketched(rng, Split.TRAIN)
        planned = long.slipping_plan(one, rng) if slips else long.clean_plan(one)
        trajectory = await play_demonstration(make_task(long.FAMILY, one), planned, course, sandbox, renderer)
        shown += [trajectory] if trajectory is not None else []
    return shown


def _learn_fenced(base: Path, out: Path, mix: DemonstrationMix, config: FinetuneConfig, seed: int) -> None:
    renderer = Renderer.from_folder(base)
    count = config.steps * DEMONSTRATIONS_A_STEP
    shown = asyncio.run(_shown(renderer, DemonstrationSpec(QUICKSTART, mix, count, seed, protocol="fenced")))
    _learn(base, renderer, shown, out, config, seed)


def _learn(
    base: Path, renderer: Renderer, shown: Sequence[Trajectory], out: Path, config: FinetuneConfig, seed: int
) -> None:
    examples = [build_labelled_example(trajectory, learn_errors=True) for trajectory in shown]
    run_finetuning(base, renderer, examples, out, config, seed)


async def _shown(renderer: Renderer, course: DemonstrationSpec) -> list[Trajectory]:
    return [
        trajectory
        async for trajectory in generate_demonstrations(course, InProcessSandbox(), renderer, DemonstrationCounts())
    ]
