"""Train the quickstart undisturbed and interrupted, alternately: docs/survival.md and results/survival.md.

    python -m benchmarks.faults.interrupted [--runs 5] [--strikes 3] [--steps 100] [--seed 0]

Each interrupted training is stopped at random moments, by SIGTERM and SIGKILL in turns, and gone on with by the same
command. Training and evaluation are those of `make train`; vLLM draws other rollouts in each run.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from benchmarks.generated_blocks import RESULTS, ROOT, Block, Report

PAGE = Block(RESULTS / "survival.md", "faults/interrupted")
SUMMARY = Block(ROOT / "docs" / "survival.md", "faults/interrupted")
FIGURES = RESULTS / "survival_interrupted.json"
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
_LEFT_S = 10.0
"""How long processes of a killed run may take to end."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    runs: int = 5
    """Of each kind."""
    strikes: int = 3
    """In each interrupted run."""
    steps: int = 100
    seed: int = 0
    """Draws the moments; the trainings have the seeds 0, 1 and so on, the same for both kinds."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of one training."""

    seed: int
    struck: tuple[str, ...]
    """The signals that it was stopped with, in order."""
    resumed_at: tuple[int, ...]
    """The steps of the states that it went on from."""
    solve_rate: float
    greedy: float
    gap_max: float
    """Largest gap of one log probability between sampler and trainer, nats, over all steps."""
    resumed_gap_max: float
    """The same over the first steps after it went on; 0 where it was not stopped."""
    left: int
    """Processes that outlived their run by ten seconds."""


def begun(out: Path, seed: int, steps: int) -> subprocess.Popen[bytes]:
    """The training's command, which begins or goes on."""
    words = ["train", "--resume", "--out", str(out), "--seed", str(seed), "--trainer.steps", str(steps)]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-m", "repl_rl.cli", *words], cwd=ROOT, stdout=quiet, stderr=quiet)


def stopped_after(process: subprocess.Popen[bytes], metrics: Path, step: int, delay_s: float, with_: int) -> int:
    """Send the signal so many seconds after the row of a step. Returns how many processes outlive it.

    Raises:
        RuntimeError: the training ended before.
    """
    while not (metrics.is_file() and len(metrics.read_bytes().splitlines()) >= step):
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with {process.returncode} before step {step}")
        time.sleep(0.05)
    time.sleep(delay_s)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(with_)
    process.wait()
    return len(psutil.wait_procs(family, timeout=_LEFT_S)[1])


def trained(effort: Effort, seed: int, strikes: int, draws: random.Random) -> Told:
    """Train once, stopped and gone on with so many times."""
    left, struck = 0, [SIGNALS[(seed + n) % len(SIGNALS)] for n in range(strikes)]
    moments = sorted(draws.sample(range(1, effort.steps), strikes))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart"
        for moment, with_ in zip(moments, struck, strict=True):
            process = begun(Path(folder), seed, effort.steps)
            left += stopped_after(process, run / "metrics.jsonl", moment, draws.uniform(0, 2), with_)
        if code := begun(Path(folder), seed, effort.steps).wait():
            raise RuntimeError(f"the training ended with exit code {code}")
        summary = json.loads((run / "summary.json").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(1, effort.steps + 1)):
        raise RuntimeError(f"its rows are of the steps {[row['step'] for row in rows]}")
    resumed_at = tuple(summary.get("resumed_at_steps", ()))
    gaps = [row["logprob_gap_max"] for row in rows]
    again = max((gaps[step] for step in resumed_at if step < effort.steps), default=0.0)
    names = tuple(with_.name for with_ in struck)
    return Told(seed, names, resumed_at, summary["solve_rate_last"], summary["greedy_last"], max(gaps), again, left)


def chance(some: Sequence[float], others: Sequence[float]) -> float:
    """How often two groups of one kind would differ by at least as much: an exact permutation test of their means."""
    pooled, size = [*some, *others], len(some)
    seen = abs(statistics.mean(some) - statistics.mean(others))
    total = sum(pooled)
    differences = [
        abs(sum(chosen) / size - (total - sum(chosen)) / (len(pooled) - size))
        for chosen in itertools.combinations(pooled, size)
    ]
    return sum(difference >= seen - 1e-12 for difference in differences) / len(differences)


def measure(effort: Effort) -> dict[str, object]:
    """Undisturbed and interrupted runs by turns."""
    draws = random.Random(effort.seed)
    told = []
    for n in range(effort.runs):
        for strikes in (0, effort.strikes) if n % 2 else (effort.strikes, 0):
            told.append(asdict(trained(effort, n, strikes, draws)))
            print(json.dumps(told[-1]), flush=True)
    return {**asdict(effort), "told": told, "cpus": os.cpu_count()}


def block(found: Mapping[str, object]) -> str:
    """Return the generated block of the results."""
    kinds = _split(found)
    text = "| | solved, temperature 1, of each run | mean | solved, greedy, mean | largest gap, nats |\n"
    text += "|---|---|---|---|---|\n"
    for kind, ones in kinds.items():
        rates = ", ".join(f"{rate:.1%}" for rate in sorted(one["solve_rate"] for one in ones))
        means = [statistics.mean(one[name] for one in ones) for name in ("solve_rate", "greedy")]
        gap = max(one["gap_max"] for one in ones)
        text += f"| {kind} | {rates} | {means[0]:.1%} | {means[1]:.1%} | {gap:.1e} |\n"
    hit = kinds["interrupted"]
    count = {each.name: sum(one["struck"].count(each.name) for one in hit) for each in SIGNALS}
    lasting = chance(*([one["solve_rate"] for one in ones] for ones in kinds.values()))
    text += (
        f"\nStopped {sum(count.values())} times ({', '.join(f'{name} {n}' for name, n in count.items())}); largest gap "
    )
    text += (
        f"in the first\nsteps after a resume: {max(one['resumed_gap_max'] for one in hit):.1e} nats; processes left: "
    )
    text += f"{sum(one['left'] for one in hit)}. Two groups of one kind differ by at least as much in\n"
    return f"{text}{lasting:.0%} of cases (permutation test of the means at temperature 1).\n"


def summary(found: Mapping[str, object]) -> str:
    """Return the generated block of docs/survival.md."""
    kinds = _split(found)
    rates = {kind: [one["solve_rate"] for one in ones] for kind, ones in kinds.items()}
    means = [f"{statistics.mean(values):.1%} in {len(values)} {kind} runs" for kind, values in rates.items()]
    return (
        f"Solved at temperature 1: {' and '.join(means)}. Two groups of one kind differ by\n"
        f"at least as much in {chance(*rates.values()):.0%} of cases.\n"
    )


def _split(found: Mapping[str, object]) -> dict[str, list[Report]]:
    """Return the undisturbed and the interrupted runs."""
    told = found["told"]
    assert isinstance(told, list)
    return {
        "undisturbed": [one for one in told if not one["struck"]],
        "interrupted": [one for one in told if one["struck"]],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.interrupted")
    standard = Effort()
    for name in Effort.__dataclass_fields__:
        parser.add_argument(f"--{name}", type=int, default=getattr(standard, name))
    parser.add_argument("--json", type=Path, help="file for the figures; then nothing is published")
    given = vars(parser.parse_args(argv))
    file = given.pop("json")
    found = json.dumps(measure(replace(standard, **given)), indent=2) + "\n"
    (file or FIGURES).write_text(found)
    if file is None:
        PAGE.write(block(json.loads(found)))
        SUMMARY.write(summary(json.loads(found)))


if __name__ == "__main__":
    main()
