"""Measure a call of a host function, and write the figures into docs/host_functions.md.

    python -m benchmarks.console.host_functions

A line calls a function many times; what a call takes is the line's time without that of an empty loop, divided. The
console is `local`, fresh, and nothing else of ours runs.
"""

import asyncio
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.generated_blocks import ROOT, Block
from repl_rl import HostFunction, HostLimits, Limits, host_function, open_sandbox
from repl_rl.rollout.host_functions import HostCallSession
from repl_rl.sandbox.base import Sandbox, SupportsHostFunctions

PAGE = Block(ROOT / "docs" / "host_functions.md", "console/host_functions")
FIGURES = ROOT / "benchmarks" / "results" / "host_functions.json"
CALLS, REPEATS, AT_ONCE = 200, 7, 16
MOST = HostLimits(max_calls=CALLS * (REPEATS + 1), max_concurrent_total=AT_ONCE)


async def quick(text: str) -> str:
    """Give a text back.

    Args:
        text: What is given back.
    """
    return text


def slow(text: str) -> str:
    """Give a text back, from a thread of the host.

    Args:
        text: What is given back.
    """
    return text


async def line_ms(sandbox: Sandbox, function: HostFunction, argument: str) -> list[float]:
    """Milliseconds of a call, an entry a line of `CALLS` calls."""
    async with sandbox.session() as session:
        assert isinstance(session, SupportsHostFunctions)
        session.offer_functions(HostCallSession([function]))
        await session.push(f"x = {argument}")
        found = []
        for _ in range(REPEATS):
            empty = await session.push(f"_ = [None for _ in range({CALLS})]")
            full = await session.push(f"_ = [{function.name}(x) for _ in range({CALLS})]")
            assert full.text == "", full
            found.append((full.elapsed_s - empty.elapsed_s) / CALLS * 1000)
    return found


async def measured() -> dict[str, float]:
    """Medians, milliseconds a call."""
    limits = HostLimits(
        max_calls=MOST.max_calls, max_concurrent_total=AT_ONCE, max_argument_bytes=1 << 20, max_answer_bytes=1 << 20
    )
    fast, threaded = host_function(quick, limits), host_function(slow, limits)
    patient = Limits(line_timeout_s=120.0, cpu_s=600.0)
    async with open_sandbox("local", limits=patient, warm=0) as sandbox:
        alone = await line_ms(sandbox, fast, "'x'")
        in_thread = await line_ms(sandbox, threaded, "'x'")
        large = await line_ms(sandbox, fast, "'x' * 100_000")
        together = await asyncio.gather(*(line_ms(sandbox, fast, "'x'") for _ in range(AT_ONCE)))
    return {
        "alone": statistics.median(alone),
        "in_thread": statistics.median(in_thread),
        "large": statistics.median(large),
        "together": statistics.median(ms for each in together for ms in each) / AT_ONCE,
    }


def text(figures: dict[str, float]) -> str:
    """The generated block."""
    rows: list[tuple[str, Callable[[dict[str, float]], float]]] = [
        ("an async function, a short text", lambda f: f["alone"]),
        ("a plain function, in a thread of its own", lambda f: f["in_thread"]),
        ("an async function, 100,000 characters there and back", lambda f: f["large"]),
        (f"an async function, {AT_ONCE} consoles at once, a call of all", lambda f: f["together"]),
    ]
    head = f"On {figures['cores']:.0f} cores, load average {figures['load']:.1f} at the end:\n\n"
    table = "".join(f"| {name} | {of(figures):.2f} |\n" for name, of in rows)
    return f"{head}| a call | ms |\n|---|---|\n{table}"


def main(out: Path = FIGURES) -> None:
    figures = asyncio.run(measured())
    figures |= {"cores": float(len(os.sched_getaffinity(0))), "load": os.getloadavg()[0]}
    out.write_text(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1) + "\n")
    PAGE.write(text(figures))


if __name__ == "__main__":
    main()
