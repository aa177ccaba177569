"""Measure what consoles with a workspace cost beside empty ones, and put the figures into docs/workspace.md.

    python -m benchmarks.console.workspaces

64 consoles of the `local` sandbox are asked for at once, and each runs one line; all live until the last one has. Ways
take turns. No console is kept ready, so each is forked when it is asked for.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from benchmarks.console.line_latency import pss_mib
from benchmarks.generated_blocks import ROOT, Block
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import Sandbox, SandboxSession, open_console
from repl_rl.tasks import Workspace

PAGE = Block(ROOT / "docs" / "workspace.md", "console/workspaces")
FIGURES = ROOT / "benchmarks" / "results" / "workspace.json"
AMOUNTS = [n * 7 % 1000 / 4 for n in range(32_000)]
TABLE = [[n, f"customer {n:06}", amount] for n, amount in enumerate(AMOUNTS)]
LARGE = Workspace(
    values={"rows": TABLE},
    files={"data/notes.txt": b"one line of a file\n" * 1000},
    lines=("by_name = {name: amount for _, name, amount in rows}",),
    preload=("numpy",),
)
"""A table of one megabyte, a file, an index over the table, and a package."""
_TYPED = ("import json, numpy", f"rows = json.loads({json.dumps(TABLE)!r})", *LARGE.lines)
"""What a rollout would have to run without: the same table and package, line by line."""

Lease = Callable[[], AbstractAsyncContextManager[SandboxSession]]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    consoles: int = 64
    repeats: int = 5
    typed: int = 16
    """Consoles that are given the set-up as lines: each takes as long as the workspace takes once."""


async def _at_once(lease: Lease, count: int, lines: Sequence[str]) -> tuple[float, float]:
    """Seconds until `count` consoles have each run `lines`, and memory that they take (PSS, MiB)."""
    together = asyncio.Barrier(count + 1)

    async def one() -> None:
        async with lease() as console:
            for line in lines:
                await console.push(line)
            await together.wait()
            await together.wait()

    before = pss_mib()
    started = time.perf_counter()
    running = [asyncio.create_task(one()) for _ in range(count)]
    await together.wait()
    elapsed_s, taken = time.perf_counter() - started, pss_mib() - before
    await together.wait()
    await asyncio.gather(*running)
    return elapsed_s, taken


async def _made_s(sandbox: Sandbox, repeat: int) -> float:
    """Seconds until the first console of a workspace that was never asked for has run a line."""
    fresh = Workspace({**LARGE.values, "repeat": repeat}, LARGE.files, LARGE.lines, LARGE.preload)
    started = time.perf_counter()
    async with open_console(sandbox, fresh) as console:
        await console.push("1 + 1")
    return time.perf_counter() - started


async def _measure(effort: Effort) -> dict[str, float]:
    times: dict[str, list[float]] = {"empty": [], "workspace": [], "typed": [], "made": []}
    memory: dict[str, list[float]] = {"empty": [], "workspace": []}
    async with open_sandbox("local", warm=0) as sandbox:
        async with open_console(sandbox, LARGE):  # made before the clock starts
            pass
        for repeat in range(effort.repeats):
            for name, lease in (("empty", sandbox.session), ("workspace", lambda: open_console(sandbox, LARGE))):
                elapsed_s, taken = await _at_once(lease, effort.consoles, ("1 + 1",))
                times[name].append(elapsed_s / effort.consoles)
                memory[name].append(taken / effort.consoles)
            elapsed_s, _ = await _at_once(sandbox.session, effort.typed, _TYPED)
            times["typed"].append(elapsed_s / effort.typed)
            times["made"].append(await _made_s(sandbox, repeat))
    figures = {f"{name}_ms": statistics.median(values) * 1000 for name, values in times.items()}
    figures |= {f"{name}_mib": statistics.median(values) for name, values in memory.items()}
    return {
        **figures,
        "ratio": statistics.median(w / e for w, e in zip(times["workspace"], times["empty"], strict=True)),
        "consoles": effort.consoles,
        "repeats": effort.repeats,
        "bytes": len(LARGE.content),
        "cpus": os.cpu_count() or 0,
        "load_average": os.getloadavg()[0],
    }


def measure(effort: Effort | None = None) -> dict[str, float]:
    """All figures: `_ms` are milliseconds a console, `_mib` its proportional memory, `ratio` workspace over empty."""
    return asyncio.run(_measure(effort or Effort()))


def block(found: Mapping[str, float]) -> str:
    """The generated block of docs/workspace.md."""
    text = f"{found['consoles']:.0f} consoles at once on {found['cpus']:.0f} cores (load average "
    text += f"{found['load_average']:.1f}), a workspace of {found['bytes'] / 1e6:.1f} MB, medians of "
    text += f"{found['repeats']:.0f} repeats:\n\n"
    text += "| a console, until its first line is done | ms | MiB, proportional |\n|---|---|---|\n"
    text += f"| empty | {found['empty_ms']:.1f} | {found['empty_mib']:.1f} |\n"
    text += f"| with the workspace | {found['workspace_ms']:.1f} | {found['workspace_mib']:.1f} |\n"
    text += f"| empty, given the same table and package as lines | {found['typed_ms']:.1f} | |\n\n"
    text += f"That is {found['ratio']:.2f} times an empty one. Once a workspace, the first console waits "
    text += f"{found['made_ms']:.0f} ms while it is made.\n"
    return text


def main() -> None:
    """Measure and publish."""
    FIGURES.write_text(json.dumps(measure(), indent=2) + "\n")
    PAGE.write(block(json.loads(FIGURES.read_text())))


if __name__ == "__main__":
    main()
