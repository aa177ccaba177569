"""`bench rollout`: all contenders in one run, interleaved, and a profile of the time per line."""

import asyncio
import os
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from repl_rl.engine import EngineOptions, Vllm
from repl_rl.engine.vllm_engine import open_vllm
from repl_rl.lab.bundled import bundled
from repl_rl.lab.forced import ForcedRenderer, Plan, leased
from repl_rl.lab.many import many
from repl_rl.lab.policies import SIZES, write_policy
from repl_rl.lab.profile import profile, watched
from repl_rl.lab.rates import rates
from repl_rl.lab.text_loop import text_loop
from repl_rl.lab.trl_loop import TrlLoop
from repl_rl.lab.ways import WAYS, Stage, Way, play
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import Sandbox
from repl_rl.utils.hardware import count_cores

Json = dict[str, object]
_STOCK = "stock "
KEYS = ("uninterrupted", "bound", "ours", "request_a_line", "lockstep", "text_loop", "trl")
"""Contenders, in the order of each repeat."""
STOCK_BLOCK = 128
"""Default block size of vLLM on CPU. Ours is smaller, which makes one request per line cheaper for every contender."""
STOCK_WAYS = ("request_a_line", "lockstep", "text_loop")
"""Contenders that are also measured on vLLM with its default block size, as without this package."""


@dataclass(frozen=True, slots=True)
class RolloutEffort:
    """Size of the measurement."""

    rollouts: int = 64
    """Concurrent rollouts (>= 1)."""
    lines: int = 16
    """Lines per rollout (>= 1)."""
    repeats: Mapping[str, int] = field(default_factory=lambda: {"small": 3, "medium": 1})
    """Repeats per contender, by size of the policy (>= 1); the JSON has medians."""


def bench_rollout(effort: RolloutEffort | None = None) -> Json:
    """Measure, and return the content of `bench rollout --json`.

    `small` and `medium` hold sampled tokens per second of each contender, null if it cannot run (`reasons` gives the
    reason). `ratios` holds the speed of ours over each. `stock` has the same for contenders that compute a line's
    prefix again, on an engine with vLLM's default block size.

    Raises:
        SandboxUnavailable: this machine does not support `local`.
        ConfigError: vLLM is not installed.
    """
    return asyncio.run(_measure(effort or RolloutEffort()))


async def _measure(effort: RolloutEffort) -> Json:
    report: Json = {}
    async with open_sandbox("local", warm=effort.rollouts) as sandbox:
        for name in effort.repeats:
            report[name] = await _size(name, effort, sandbox)
        report["bundled"] = await bundled(sandbox, effort.rollouts, max(effort.repeats.values()))
    plan = {"rollouts": effort.rollouts, "lines": effort.lines, "repeats": dict(effort.repeats)}
    report["many"] = await many()
    return report | {"plan": plan, "cpus": count_cores(), "load_average": os.getloadavg()[0]}


async def _size(name: str, effort: RolloutEffort, sandbox: Sandbox) -> Json:
    """Return all figures of one size of the policy."""
    plan = Plan(effort.rollouts, effort.lines)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        parameters = write_policy(SIZES[name], folder)
        opening = EngineOptions(folder, max_sessions=effort.rollouts)
        engine = await stack.enter_async_context(open_vllm(opening, Vllm()))
        ways = dict(WAYS)
        ways["text_loop"] = await stack.enter_async_context(text_loop(opening, Vllm()))
        ways["trl"] = TrlLoop(folder, plan)
        ways |= await _stock(stack, opening, Vllm(block_size=STOCK_BLOCK))
        stage, repeats = Stage(plan, engine, sandbox, ForcedRenderer(folder, plan)), effort.repeats[name]
        # Warm up every contender with one line per rollout.
        await rates(ways, replace(stage, plan=Plan(effort.rollouts, 1)), 1)
        raw = await rates(ways, stage, repeats)
        profiles = [await _profile(stage) for _ in range(repeats)]
    medians = {key: statistics.median(found) for key, found in raw.items()}
    # All ratios are ours over theirs, so above 1 means that ours is faster.
    ratios = {key: medians["ours"] / rate for key, rate in medians.items() if key != "ours"}
    stock = {key: _STOCK + key for key in STOCK_WAYS}
    return {
        **{key: medians[key] for key in KEYS},
        "reasons": {},
        "ratios": {key: ratios[key] for key in KEYS if key != "ours"},
        "stock": {key: medians[name] for key, name in stock.items()}
        | {"block_size": STOCK_BLOCK, "ratios": {key: ratios[name] for key, name in stock.items()}},
        "raw": raw,
        "profile": {part: statistics.median(found[part] for found in profiles) for part in profiles[0]},
        "parameters": parameters,
        "fallback": engine.fallback_reason,
    }


async def _stock(stack: AsyncExitStack, opening: EngineOptions, options: Vllm) -> dict[str, Way]:
    """Open the stock contenders, on separate engines."""
    engine = await stack.enter_async_context(open_vllm(opening, options))

    def on_stock(way: Way) -> Way:
        return lambda stage: way(replace(stage, engine=engine))

    loop = await stack.enter_async_context(text_loop(opening, options))
    return {_STOCK + key: on_stock(WAYS[key]) if key in WAYS else loop for key in STOCK_WAYS}


async def _profile(stage: Stage) -> dict[str, float]:
    """Return the parts of a line's time; `vllm_host_ms` is the host time of `bound`: vLLM's front end alone."""
    # `bound` samples the same chunks without consoles, so its host time is vLLM's.
    async with watched() as engine_alone:
        await WAYS["bound"](stage)
    async with leased(stage.sandbox, stage.plan.rollouts) as consoles:
        async with watched() as watch:
            played = await play(replace(stage, sandbox=consoles))
        parts = profile(played, watch)
    vllm_host_ms = 1000 * engine_alone.cpu_s / (stage.plan.rollouts * stage.plan.lines)
    return parts | {"vllm_host_ms": vllm_host_ms, "own_host_ms": parts["host_ms"] - vllm_host_ms}
