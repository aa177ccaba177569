"""Measure what a line costs in a console behind an actor beside one of this process, and publish it in docs/scaling.md.

    python -m benchmarks.scaling.console_nodes

Both kinds of console are on this machine, of the same sandbox `local`, and take turns; no network lies between, so a
real one comes on top. The line is `x = 1`: what remains is the way to the console and back.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from benchmarks.generated_blocks import ROOT, Block
from repl_rl.sandbox import Sandbox, SandboxSession, open_sandbox

PAGE = Block(ROOT / "docs" / "scaling.md", "scaling/console_nodes")
FIGURES = ROOT / "benchmarks" / "results" / "nodes.json"
_LINE = "x = 1"
_KINDS: Mapping[str, str] = {"here": "local", "away": "nodes"}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    lines: int = 100
    """One after the other, each round."""
    consoles: int = 32
    """At once."""
    each: int = 30
    """Lines of each of these, each round."""
    rounds: int = 15


async def _one(session: SandboxSession, lines: int) -> list[float]:
    """Milliseconds of each line, one after the other."""
    times = []
    for _ in range(lines):
        started = time.perf_counter()
        await session.push(_LINE)
        times.append(1000 * (time.perf_counter() - started))
    return times


async def _many(sessions: list[SandboxSession], each: int) -> tuple[float, float]:
    """Lines a second of all consoles at once, and milliseconds of this process's CPU a line."""
    started, cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_one(session, each) for session in sessions))
    lines = each * len(sessions)
    return lines / (time.perf_counter() - started), 1000 * (time.process_time() - cpu_s) / lines


async def _measure(effort: Effort) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in _KINDS}
    rates: dict[str, list[float]] = {name: [] for name in _KINDS}
    cpu_ms: dict[str, list[float]] = {name: [] for name in _KINDS}
    async with AsyncExitStack() as stack:
        consoles: dict[str, list[SandboxSession]] = {}
        for name, kind in _KINDS.items():
            sandbox: Sandbox = await stack.enter_async_context(open_sandbox(kind, warm=0))
            leased = [await stack.enter_async_context(sandbox.session()) for _ in range(effort.consoles)]
            consoles[name] = leased
            await _many(leased, 2)
        for _ in range(effort.rounds):
            for name, sessions in consoles.items():
                times[name] += await _one(sessions[0], effort.lines)
                rate, cost_ms = await _many(sessions, effort.each)
                rates[name].append(rate)
                cpu_ms[name].append(cost_ms)
    return {
        **{f"{name}_ms": statistics.median(values) for name, values in times.items()},
        **{f"{name}_p95_ms": statistics.quantiles(values, n=20)[-1] for name, values in times.items()},
        **{f"{name}_lines_per_s": statistics.median(values) for name, values in rates.items()},
        **{f"{name}_cpu_ms": statistics.median(values) for name, values in cpu_ms.items()},
        "more_ms": statistics.median(times["away"]) - statistics.median(times["here"]),
        "more_cpu_ms": statistics.median(cpu_ms["away"]) - statistics.median(cpu_ms["here"]),
        "consoles": effort.consoles,
        "rounds": effort.rounds,
        "cpus": os.cpu_count() or 0,
        "load_average": os.getloadavg()[0],
    }


def measure(effort: Effort | None = None) -> dict[str, float]:
    """All figures: `here_` of a console of this process, `away_` of one behind an actor, `more_` the difference."""
    return asyncio.run(_measure(effort or Effort()))


def block(found: Mapping[str, float]) -> str:
    """The generated block of docs/scaling.md."""
    text = f"On {found['cpus']:.0f} cores (load average {found['load_average']:.1f}), the line `{_LINE}`, medians of "
    text += f"{found['rounds']:.0f} rounds:\n\n"
    text += f"| | ms a line, one console | its 95th percentile | lines a second, {found['consoles']:.0f} consoles "
    text += "| CPU of the process that plays, ms a line |\n|---|---|---|---|---|\n"
    for name, label in (("here", "in process, `local`"), ("away", "behind an actor, `nodes`")):
        text += f"| {label} | {found[f'{name}_ms']:.2f} | {found[f'{name}_p95_ms']:.2f} "
        text += f"| {found[f'{name}_lines_per_s']:,.0f} | {found[f'{name}_cpu_ms']:.2f} |\n"
    text += f"\nA line waits {found['more_ms']:.2f} ms longer, and costs the machine of the engine "
    text += f"{found['more_cpu_ms']:.2f} ms of CPU more. So consoles apart pay where that machine's cores are what is\n"
    text += (
        f"short, and a line computes for more than {found['more_cpu_ms']:.1f} ms on the mean: below, the call takes "
    )
    text += "more of its cores than the line did.\n"
    return text


def main() -> None:
    """Measure and publish."""
    FIGURES.write_text(json.dumps(measure(), indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main()
