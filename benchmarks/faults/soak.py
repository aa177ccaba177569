"""Play thousands of rollouts, and record growth and leftovers: docs/survival.md and results/survival.md.

    python -m benchmarks.faults.soak [--engine vllm] [--sandbox local] [--rollouts 10000]
    python -m benchmarks.faults.soak --engine scripted --sandbox docker

Rollouts are played in portions. After each, memory of this process and of all below it, open descriptors and processes
are noted; the first quarter is left out of the slope: caches fill. At the end everything is closed and looked for.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from benchmarks.generated_blocks import RESULTS, ROOT, Block
from benchmarks.scripted_writer import Writer
from repl_rl.engine import ENGINES
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.tasks import Split

PAGE = Block(RESULTS / "survival.md", "faults/soak")
SUMMARY = Block(ROOT / "docs" / "survival.md", "faults/soak")
FIGURES = RESULTS / "survival_soak.json"
SHARED = Path("/dev/shm")
_QUANTILE = 2.131
"""Of Student's t, 97.5 %, with 15 degrees of freedom: slightly wide for more."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is played, and where."""

    engine: str = "vllm"
    sandbox: str = "local"
    rollouts: int = 10_000
    portions: int = 40
    """At least 8."""
    concurrency: int = 64


@dataclass(frozen=True, slots=True)
class Look:
    """What there is after so many rollouts."""

    rollouts: int
    own_mib: float
    """Resident memory of this process."""
    below_mib: float
    """Of all processes below it."""
    descriptors: int
    processes: int
    containers: int
    shared: int
    """Files in shared memory."""


def containers() -> int:
    """Containers of the daemon that run; 0 without one."""
    try:
        done = subprocess.run(["docker", "ps", "--quiet"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(done.stdout.split())


def look(rollouts: int) -> Look:
    """What there is now."""
    gc.collect()
    own = psutil.Process()
    below = own.children(recursive=True)
    resident = sum(_resident(process) for process in below)
    shared = sum(1 for _ in SHARED.rglob("*")) if SHARED.is_dir() else 0
    mib = 1 << 20
    return Look(rollouts, own.memory_info().rss / mib, resident / mib, own.num_fds(), len(below), containers(), shared)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def named() -> dict[str, str]:
    """What is there now beside this process: a process below it by its arguments, a descriptor by what it leads to."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[f"process {process.pid}"] = " ".join(process.cmdline()[1:])
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[f"descriptor {descriptor}"] = os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0]
    return found


def slope(looks: Sequence[Look], name: str) -> tuple[float, float]:
    """Growth of a figure per 1,000 rollouts after the first quarter, and half its 95 % interval."""
    kept = looks[len(looks) // 4 :]
    xs, ys = [one.rollouts / 1000 for one in kept], [float(getattr(one, name)) for one in kept]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    grows = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - grows * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    return grows, _QUANTILE * math.sqrt(rest / max(1, len(xs) - 2) / spread)


def quarters(values: Sequence[float]) -> list[float]:
    """By how much a figure grew in each quarter of its looks (at least 8): what settles grows less and less."""
    ends = [0, *(len(values) * quarter // 4 - 1 for quarter in (1, 2, 3, 4))]
    return [values[end] - values[start] for start, end in pairwise(ends)]


def played(effort: Effort) -> Iterator[Look]:
    """A look after each portion."""
    if effort.engine == Writer.kind:
        ENGINES.register(Writer)
    world = RolloutConfig(engine=effort.engine, sandbox=effort.sandbox, concurrency=effort.concurrency)
    tasks = world.draw_tasks(Split.TRAIN, 256)
    size, done = effort.rollouts // effort.portions, 0
    with SyncRollouts(world.open_rollouts, {task.id: task for task in tasks}) as source:
        for _ in range(effort.portions):
            source.sample([tasks[(done + n) % len(tasks)] for n in range(size)])
            done += size
            yield look(done)


def measure(effort: Effort) -> dict[str, object]:
    """Looks before, while and after; slopes; and what is left."""
    gc.collect()
    resource_tracker.ensure_running()  # Python's own, one a process for as long as it lives: no rollout leaves it
    there, before, began = named(), look(0), time.perf_counter()
    looks = list(played(effort))
    elapsed_s, after = time.perf_counter() - began, look(effort.rollouts)
    grown = ("own_mib", "below_mib", "descriptors", "processes", "containers", "shared")
    return {
        **asdict(effort),
        "elapsed_s": round(elapsed_s, 1),
        "slopes": {name: slope(looks, name) for name in grown},
        "left": {name: getattr(after, name) - getattr(before, name) for name in grown[2:]},
        "left_named": sorted(what for name, what in named().items() if name not in there),
        "looks": [asdict(one) for one in looks],
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def block(reports: Sequence[Mapping[str, object]]) -> str:
    """Return the generated block of the results, one row per soak."""
    names = {"own_mib": "memory, MiB", "below_mib": "memory of child processes, MiB", "descriptors": "descriptors"}
    left = ("descriptors", "processes", "containers", "shared")
    text = "| engine, sandbox, rollouts | " + " | ".join(f"{name} per 1,000" for name in names.values())
    text += " | left: " + ", ".join(left) + " |\n|" + "---|" * (len(names) + 2) + "\n"
    for report in reports:
        slopes, remains = report["slopes"], report["left"]
        assert isinstance(slopes, Mapping)
        assert isinstance(remains, Mapping)
        text += f"| {report['engine']}, {report['sandbox']}, {report['rollouts']} | "
        text += " | ".join("{:+.2f} ± {:.2f}".format(*slopes[name]) for name in names)
        text += " | " + ", ".join(str(remains[name]) for name in left) + " |\n"
    for report in reports:
        looks = report["looks"]
        assert isinstance(looks, list)
        grown = ", ".join(f"{mib:.2f}" for mib in quarters([float(one["own_mib"]) for one in looks]))
        text += f"\nGrowth of the main process per quarter, {report['engine']} on {report['sandbox']}: {grown} MiB.\n"
        whats = report.get("left_named")
        if isinstance(whats, list) and whats:
            text += f"\nLeft by {report['engine']} on {report['sandbox']} until the process ends: "
            text += ", ".join(f"`{what}`" for what in whats) + ".\n"
    return text


def summary(reports: Sequence[Mapping[str, object]]) -> str:
    """Return the generated block of docs/survival.md."""
    text = "| engine, sandbox, rollouts | memory, MiB per 1,000 | left open |\n|---|---|---|\n"
    for report in reports:
        slopes, remains = report["slopes"], report["left"]
        assert isinstance(slopes, Mapping)
        assert isinstance(remains, Mapping)
        grown = "{:+.2f} ± {:.2f}".format(*slopes["own_mib"])
        where = f"{report['engine']}, {report['sandbox']}, {report['rollouts']}"
        text += f"| {where} | {grown} | {sum(remains.values())} |\n"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and publish: a soak of the same engine and sandbox takes the place of an older one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.soak")
    standard = Effort()
    for name in Effort.__dataclass_fields__:
        value = getattr(standard, name)
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, help="file for the figures; then nothing is published")
    given = vars(parser.parse_args(argv))
    file = given.pop("json")
    report = measure(Effort(**given))
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n")
        return
    older = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    where = ("engine", "sandbox")
    reports = [one for one in older if [one[key] for key in where] != [report[key] for key in where]] + [report]
    FIGURES.write_text(json.dumps(reports, indent=2) + "\n")
    kept = json.loads(FIGURES.read_text())
    PAGE.write(block(kept))
    SUMMARY.write(summary(kept))


if __name__ == "__main__":
    main()
