"""Measure the cost of checkpoints, and the start of a resumed run: docs/survival.md and results/survival.md.

    python -m benchmarks.faults.checkpoint_cost [--engine transformers] [--leg-s 300] [--rounds 4] \\
        [--starts 5] [--seconds 60]

A policy of 25 M parameters is trained in legs, by turns with states and without; each leg lasts LEG_S seconds after its
first step. Then processes are started by turns, which train from the beginning or go on, until the first rollout
begins. Give it a quiet machine.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from benchmarks.random_policies import SIZES, write_policy
from repl_rl.rollout import ReplSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.checkpoint_schedule import CheckpointSchedule
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import train
from repl_rl.trajectory.trajectory import Trajectory
from repl_rl.utils.stop_signals import handle_stop_signals

PAGE = Block(RESULTS / "survival.md", "faults/checkpoint_cost")
SUMMARY = Block(ROOT / "docs" / "survival.md", "faults/checkpoint_cost")
FIGURES = RESULTS / "survival_states.json"
FIRST = "REPL_RL_FIRST_ROLLOUT"
"""Variable that names the file which the first rollout of a process leaves the time in, before it stops the process."""
TRAINED = TrainerConfig(steps=1_000_000, prompts_per_step=4, group_size=4, warmup_steps=0, lr_scheduler="constant")
_TASKS = 256


class First(ReplSampler):
    """As usual; but the first rollout of a process that is asked for it says when it began, and ends the process."""

    async def rollout(self, episode: Episode) -> None:
        """See `RolloutSampler.rollout`."""
        _mark()
        await super().rollout(episode)


def _mark() -> None:
    mark = os.environ.get(FIRST)
    if mark and not Path(mark).exists():
        Path(mark).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    engine: str = "transformers"
    size: str = "medium"
    leg_s: float = 300.0
    rounds: int = 4
    starts: int = 5
    seconds: float = 60.0
    """As `--checkpoint.every-s`."""


class _Over(Exception):
    """Ends a leg."""


@dataclass(slots=True)
class Leg:
    """Counts the steps of a leg until its time is over."""

    limit_s: float
    states: Path
    began_s: float = 0.0
    steps: int = 0
    elapsed_s: float = 0.0
    saved: set[str] = field(default_factory=set)

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        """A step has ended; the first one is not counted: it starts what is slow to start."""
        now_s = time.perf_counter()
        self.saved |= {place.name for place in self.states.glob("[0-9]*")}
        if record.step == 1:
            self.began_s = now_s
            return
        self.steps, self.elapsed_s = record.step - 1, now_s - self.began_s
        if self.elapsed_s >= self.limit_s:
            raise _Over


def world(effort: Effort, policy: Path) -> RolloutConfig:
    """What is trained."""
    return RolloutConfig(
        model=str(policy),
        engine=effort.engine,
        sampler="benchmarks.faults.checkpoint_cost:First",
        concurrency=16,
        sandbox="local",
    )


def leg(effort: Effort, policy: Path, out: Path, kept: bool, limit_s: float) -> Leg:
    """Train for a while, with states or without."""
    counted = Leg(limit_s, out / "states")
    saving = CheckpointSchedule(every_s=effort.seconds) if kept else None
    with suppress(_Over):
        train(world(effort, policy), TRAINED, out=out, train_tasks=_TASKS, on_step=counted.step, checkpoint=saving)
    return counted


def started_s(effort: Effort, policy: Path, out: Path, resume: bool) -> float:
    """Seconds from the start of a process to its first rollout."""
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "first"
        asked = json.dumps({"engine": effort.engine, "policy": str(policy), "out": str(out), "resume": resume})
        began = time.time()
        subprocess.run(
            [sys.executable, "-m", "benchmarks.faults.checkpoint_cost", "--child", asked],
            env=os.environ | {FIRST: str(mark)}, cwd=ROOT, check=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return float(mark.read_text()) - began


def child(asked: Mapping[str, str | bool]) -> None:
    """Train until the first rollout ends the process."""
    effort = Effort(engine=str(asked["engine"]))
    with suppress(KeyboardInterrupt), handle_stop_signals():
        policy, out = Path(str(asked["policy"])), Path(str(asked["out"]))
        train(world(effort, policy), TRAINED, out=out, train_tasks=_TASKS, resume=bool(asked["resume"]))


def measure(effort: Effort) -> dict[str, object]:
    """Seconds a step of each leg, and seconds to the first rollout of each start."""
    step_s: dict[str, list[float]] = {"on": [], "off": []}
    start_s: dict[str, list[float]] = {"fresh": [], "resumed": []}
    saved = 0
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        policy.mkdir()
        parameters = write_policy(SIZES[effort.size], policy)
        for n in range(effort.rounds):
            for way in ("on", "off") if n % 2 else ("off", "on"):
                counted = leg(effort, policy, Path(folder) / f"{way}{n}", way == "on", effort.leg_s)
                step_s[way].append(counted.elapsed_s / counted.steps)
                saved += len(counted.saved)
        run = Path(folder) / "run"
        leg(effort, policy, run, kept=True, limit_s=0.0)
        for n in range(effort.starts):
            for way in ("fresh", "resumed") if n % 2 else ("resumed", "fresh"):
                out = run if way == "resumed" else Path(folder) / f"fresh{n}"
                start_s[way].append(started_s(effort, policy, out, way == "resumed"))
    return {
        "engine": effort.engine,
        "parameters": parameters,
        "leg_s": effort.leg_s,
        "seconds": effort.seconds,
        "states": saved,
        "step_s": step_s,
        "start_s": start_s,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def block(found: Mapping[str, object]) -> str:
    """Return the generated block of the results."""
    step_s, start_s = found["step_s"], found["start_s"]
    assert isinstance(step_s, Mapping)
    assert isinstance(start_s, Mapping)
    ratios = [on / off for on, off in zip(step_s["on"], step_s["off"], strict=True)]
    text = f"A policy of {float(str(found['parameters'])) / 1e6:.0f} M parameters, engine {found['engine']}, on "
    text += (
        f"{found['cpus']} cores (load average {float(str(found['load_average'])):.1f}); {len(ratios)} rounds of two "
    )
    text += (
        f"legs of {float(str(found['leg_s'])):.0f} s, a checkpoint every {float(str(found['seconds'])):.0f} s or step, "
    )
    text += f"{found['states']} checkpoints:\n\n| | with checkpoints | without | ratio |\n|---|---|---|---|\n"
    text += f"| seconds per step, median of legs | {statistics.median(step_s['on']):.2f} | "
    text += f"{statistics.median(step_s['off']):.2f} | {statistics.median(ratios):.3f} "
    text += f"({min(ratios):.3f} to {max(ratios):.3f}) |\n\n"
    text += f"Seconds from the start of a process to its first rollout, medians of {len(start_s['fresh'])}: "
    fresh, resumed = statistics.median(start_s["fresh"]), statistics.median(start_s["resumed"])
    return f"{text}{fresh:.1f} for\na new run, {resumed:.1f} for a resumed one (ratio {resumed / fresh:.2f}).\n"


def summary(found: Mapping[str, object]) -> str:
    """Return the generated block of docs/survival.md."""
    step_s, start_s = found["step_s"], found["start_s"]
    assert isinstance(step_s, Mapping)
    assert isinstance(start_s, Mapping)
    ratios = [on / off for on, off in zip(step_s["on"], step_s["off"], strict=True)]
    fresh, resumed = (statistics.median(start_s[kind]) for kind in ("fresh", "resumed"))
    return (
        f"A step with checkpoints takes {statistics.median(ratios):.2f} times as long ({min(ratios):.2f} to "
        f"{max(ratios):.2f} over rounds).\nThe first rollout begins after {fresh:.1f} s in a new run and {resumed:.1f} "
        "s in a resumed one.\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.checkpoint_cost")
    standard = Effort()
    for name in Effort.__dataclass_fields__:
        value = getattr(standard, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, help="file for the figures; then nothing is published")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))
    asked, file = given.pop("child"), given.pop("json")
    if asked is not None:
        child(json.loads(asked))
        return
    found = json.dumps(measure(Effort(**given)), indent=2) + "\n"
    (file or FIGURES).write_text(found)
    if file is None:
        PAGE.write(block(json.loads(found)))
        SUMMARY.write(summary(json.loads(found)))


if __name__ == "__main__":
    main()
