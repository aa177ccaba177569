"""Measure what playing in an actor costs beside playing in this process, and publish it in docs/scaling.md.

    python -m benchmarks.scaling.actor_overhead

Both play the same tasks on this machine, by turns: lines a second with an engine that costs nothing (what remains is
consoles, splicing, and the way of whole rollouts to their owner), and sampled tokens a second with vLLM.
"""

import json
import os
import pickle
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

from benchmarks.generated_blocks import ROOT, Block
from benchmarks.scripted_writer import Writer
from repl_rl.engine import ENGINES
from repl_rl.ray.config import RayOptions
from repl_rl.ray.remote_rollouts import RolloutWorkers
from repl_rl.ray.worker_cluster import open_ray_cluster
from repl_rl.rollout import RolloutClient, Rollouts, SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.tasks import Split, Task
from repl_rl.trainer.local_or_ray_rollouts import build_worker_plan
from repl_rl.trajectory.trajectory import Trajectory

PAGE = Block(ROOT / "docs" / "scaling.md", "scaling/actor_overhead")
FIGURES = ROOT / "benchmarks" / "results" / "actor.json"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    tasks: int = 64
    group: int = 8
    """Rollouts of each task."""
    concurrency: int = 64
    rounds: int = 9
    """At least 2."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is counted with an engine."""

    label: str
    count: Callable[[Trajectory], int]


KINDS: Mapping[str, _Kind] = {
    Writer.kind: _Kind("lines a second, an engine that costs nothing", lambda played: len(played.lines)),
    "vllm": _Kind("sampled tokens a second, vLLM", lambda played: played.sampled_tokens),
}


@asynccontextmanager
async def open_worker_rollouts(world: RolloutConfig, node: int) -> AsyncIterator[Rollouts]:
    """The world on a node, which has not heard of the engine that costs nothing."""
    ENGINES.register(Writer)
    async with world.open_rollouts(0, node) as rollouts:
        yield rollouts


@contextmanager
def _both(engine: str, effort: Effort, tasks: Sequence[Task]) -> Iterator[Mapping[str, RolloutClient]]:
    """This process, and a fleet of one node, with the same world."""
    world, by_id = (
        RolloutConfig(engine=engine, sandbox="local", concurrency=effort.concurrency),
        {t.id: t for t in tasks},
    )
    choice = RayOptions("", 1, 0, False, 300.0)
    plan = build_worker_plan(world, choice)
    plan = replace(plan, setup=replace(plan.setup, opener=pickle.dumps(partial(open_worker_rollouts, world))))
    with ExitStack() as stack:
        here = stack.enter_context(SyncRollouts(world.open_rollouts, by_id))
        cluster = stack.enter_context(open_ray_cluster(choice)).cluster
        yield {"here": here, "away": stack.enter_context(RolloutWorkers(nullcontext(cluster), plan, by_id))}


def _rate(fleet: RolloutClient, tasks: Sequence[Task], count: Callable[[Trajectory], int]) -> float:
    """A second."""
    began_s = time.perf_counter()
    played = fleet.sample(tasks)
    return sum(map(count, played)) / (time.perf_counter() - began_s)


def measure(effort: Effort | None = None, engines: Sequence[str] = tuple(KINDS)) -> dict[str, object]:
    """By engine: `here` and `away`, medians a second; the median of their rounds' ratios, and its quartiles."""
    effort = effort or Effort()
    ENGINES.register(Writer)
    report: dict[str, object] = asdict(effort)
    tasks = RolloutConfig().draw_tasks(Split.TRAIN, effort.tasks)
    played = [task for task in tasks for _ in range(effort.group)]
    for engine in engines:
        rates: dict[str, list[float]] = {"here": [], "away": []}
        with _both(engine, effort, tasks) as fleets:
            for number in range(effort.rounds + 1):
                for name in list(rates)[:: 1 if number % 2 else -1]:
                    rates[name].append(_rate(fleets[name], played, KINDS[engine].count))
        measured = {name: values[1:] for name, values in rates.items()}  # the first round is cold
        ratios = [away / here for here, away in zip(measured["here"], measured["away"], strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        medians = {name: statistics.median(values) for name, values in measured.items()}
        report[engine] = {**medians, "ratio": middle, "lower": lower, "upper": upper}
    return report | {"cpus": os.cpu_count() or 0, "load_average": os.getloadavg()[0]}


def block(found: Mapping[str, object]) -> str:
    """The generated block of docs/scaling.md."""
    text = f"On {found['cpus']} cores (load average {found['load_average']:.1f}), {found['tasks']} tasks of "
    text += f"{found['group']} rollouts, {found['concurrency']} at once, medians of {found['rounds']} rounds "
    text += "by turns:\n\n"
    text += "| | in process | in an actor | ratio (quartiles) |\n|---|---|---|---|\n"
    for engine, kind in KINDS.items():
        row = found[engine]
        assert isinstance(row, Mapping)
        text += f"| {kind.label} | {row['here']:,.0f} | {row['away']:,.0f} "
        text += f"| {row['ratio']:.2f} ({row['lower']:.2f} to {row['upper']:.2f}) |\n"
    return text


def main() -> None:
    """Measure and publish."""
    FIGURES.write_text(json.dumps(measure(), indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    # A node looks for `open_worker_rollouts` under the name of this file, not of the program.
    from benchmarks.scaling.actor_overhead import main as run

    run()
