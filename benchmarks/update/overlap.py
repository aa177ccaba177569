"""Measure the speed-up by rollouts ahead of the update, and publish it in benchmarks/results/update.md.

    python -m benchmarks.update.overlap [--engine vllm] [--size medium] [--steps 24] [--rounds 4] [--ahead 1] \\
        [--concurrency 4]

A random policy is trained in legs, alternately with `trainer.max_staleness_steps` and without. The first steps of a leg
are not counted.
The trainer and the engine have a core each. Give it a quiet machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.generated_blocks import RESULTS, Block
from benchmarks.random_policies import SIZES, write_policy
from repl_rl.engine import EngineConfig, Transformers, Vllm
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import train
from repl_rl.trajectory.trajectory import Trajectory

PAGE = Block(RESULTS / "update.md", "update/overlap")
FIGURES = RESULTS / "update_overlap.json"
_WARM = 4
"""Steps of a leg that are not counted: something starts in them, and the lead fills up."""
_TOLD = {
    "step_s": "a step, seconds",
    "rollout_s": "rollouts waited for, seconds",
    "sync_s": "weights handed over, seconds",
    "update_s": "update, seconds",
    "trainer_idle": "share of a step in which the trainer waits",
    "sampler_idle": "share of a step in which nothing is sampled",
}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    engine: str = "vllm"
    size: str = "medium"
    steps: int = 24
    """Of a leg, counted."""
    rounds: int = 4
    ahead: int = 1
    prompts: int = 4
    group: int = 4
    lines: int = 8
    concurrency: int = 4
    """Concurrent rollouts: with so few of them rollouts and update take equally long, a core each."""


@dataclass(slots=True)
class Leg:
    """What a training told, step by step."""

    ended_s: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def step(self, record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        """A step has ended."""
        self.ended_s.append(time.perf_counter())
        self.metrics.append(record.metrics)

    @property
    def step_s(self) -> float:
        """Seconds a step, of those that count."""
        counted = self.ended_s[_WARM - 1 :]
        return (counted[-1] - counted[0]) / (len(counted) - 1)

    def mean(self, name: str) -> float:
        """Of a figure, over the steps that count."""
        return statistics.fmean(row.get(name, 0.0) for row in self.metrics[_WARM:])


def leg(effort: Effort, policy: Path, out: Path, ahead: int) -> Leg:
    """Train for a while."""
    kind: EngineConfig = Vllm(cpu_threads=1) if effort.engine == "vllm" else Transformers()
    limits = RolloutLimits(max_lines=effort.lines)
    world = RolloutConfig(model=str(policy), engine=kind, rollout=limits, concurrency=effort.concurrency)
    config = TrainerConfig(
        steps=effort.steps + _WARM, prompts_per_step=effort.prompts, group_size=effort.group, warmup_steps=0,
        lr_scheduler="constant", learning_rate=1e-5, max_staleness_steps=ahead,
    )  # fmt: skip
    told = Leg()
    train(world, config, out=out, train_tasks=256, on_step=told.step, checkpoint=None)
    return told


def measure(effort: Effort) -> dict[str, object]:
    """Seconds a step of each leg, and what sampler and trainer did in it."""
    torch.set_num_threads(1)
    figures: dict[str, list[dict[str, float]]] = {"turns": [], "ahead": []}
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        policy.mkdir()
        parameters = write_policy(SIZES[effort.size], policy)
        for n in range(effort.rounds):
            for way in ("turns", "ahead") if n % 2 else ("ahead", "turns"):
                told = leg(effort, policy, Path(folder) / f"{way}{n}", effort.ahead if way == "ahead" else 0)
                figures[way].append({name: told.mean(name) for name in _TOLD} | {"step_s": told.step_s})
    setting = {name: getattr(effort, name) for name in Effort.__dataclass_fields__}
    return {**setting, **figures, "parameters": parameters, "cpus": os.cpu_count(), "load_average": os.getloadavg()[0]}


def _median(legs: Sequence[Mapping[str, float]], name: str) -> str:
    values = [leg[name] for leg in legs]
    return f"{statistics.median(values):.2f}" if any(values) else ""


def block(found: Mapping[str, object]) -> str:
    """Return the generated block."""
    turns, ahead = found["turns"], found["ahead"]
    assert isinstance(turns, list)
    assert isinstance(ahead, list)
    ratios = [one["step_s"] / other["step_s"] for one, other in zip(turns, ahead, strict=True)]
    cores, load = found["cpus"], float(str(found["load_average"]))
    text = f"A policy of {float(str(found['parameters'])) / 1e6:.0f} M parameters, engine {found['engine']}, steps of "
    text += f"{found['prompts']} groups of {found['group']} rollouts of at most {found['lines']} lines, "
    text += f"{found['concurrency']} of them concurrent, on {cores} cores "
    text += (
        f"(load average {load:.1f}); {len(ratios)} rounds of two legs of {found['steps']} steps. Medians of legs:\n\n"
    )
    text += "| | sequential | ahead |\n|---|---|---|\n"
    for name, label in _TOLD.items():
        text += f"| {label} | {_median(turns, name)} | {_median(ahead, name)} |\n"
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    return f"{text}\nSteps a second, ahead against sequential: {middle:.2f} ({least:.2f} to {most:.2f}).\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update.overlap")
    standard = Effort()
    for name in Effort.__dataclass_fields__:
        value = getattr(standard, name)
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, help="file for the figures; then nothing is published")
    given = vars(parser.parse_args(argv))
    file = given.pop("json")
    found = json.dumps(measure(Effort(**given)), indent=2) + "\n"
    (file or FIGURES).write_text(found)
    if file is None:
        PAGE.write(block(json.loads(found)))


if __name__ == "__main__":
    main()
