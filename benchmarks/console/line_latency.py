"""Baseline of `bench sandbox`: plain `jupyter_client` with the stock ipykernel, used as documented.

`bench sandbox`: our consoles compared with `jupyter_client` and the stock ipykernel, in one run, interleaved.

Times per line are compared at the 10th percentile, because the stock kernel's history writes make its median unstable.
All other figures are compared by their medians. The console pool is not used: each console is forked on request.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from repl_rl.errors import SandboxUnavailable
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.base import Sandbox, SandboxSession
from repl_rl.utils.processes import list_descendants

_READY_S = 60.0
_HISTORY_OFF = ("--HistoryManager.enabled=False",)


@dataclass(frozen=True, slots=True)
class StockConsole:
    """Running stock kernel with its client."""

    manager: AsyncKernelManager
    client: AsyncKernelClient
    resources: AsyncExitStack
    """Resources to close: process, channels, sockets."""

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        provisioner = self.manager.provisioner
        assert isinstance(provisioner, LocalProvisioner)
        assert provisioner.process is not None
        return provisioner.process.pid

    async def line(self, code: str) -> float:
        """Run one line; return the seconds until it is done."""
        started = time.perf_counter()
        await self.client.execute_interactive(code, output_hook=lambda _: None)
        return time.perf_counter() - started

    async def close(self) -> None:
        """Kill the kernel and close its channels."""
        await self.resources.aclose()


async def open_stock(*, history: bool = True) -> StockConsole:
    """Start a kernel and wait until it is ready. With `history` it writes its history to disk, which is the default.

    Raises:
        RuntimeError: it died before it was ready.
        TimeoutError: it was not ready within a minute.
    """
    async with AsyncExitStack() as undo:
        # jupyter_client picks free TCP ports and releases them before the kernel binds them. Of several kernels that
        # start together, two may get the same port, and one client blocks forever. Unix sockets cannot collide.
        folder = Path(undo.enter_context(TemporaryDirectory(prefix="stock-")))
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
        undo.push_async_callback(manager.shutdown_kernel, now=True)
        options = [] if history else list(_HISTORY_OFF)
        with (folder / "said").open("wb") as said:
            await manager.start_kernel(extra_arguments=options, stdout=said, stderr=said)
        client = manager.client()
        assert isinstance(client, AsyncKernelClient)
        # From here the client must be stopped before the kernel is killed.
        client.start_channels()
        undo.callback(client.stop_channels)
        try:
            async with asyncio.timeout(_READY_S):
                await client.wait_for_ready()
        except RuntimeError as error:
            last_words = (folder / "said").read_text("utf-8", "replace")[-1000:].strip() or "it said nothing"
            raise RuntimeError(f"a stock kernel died at its birth: {last_words}") from error
        return StockConsole(manager, client, undo.pop_all())


_LINES = ("x = 1", "1 + 1", "print('a')")
_ERROR = "1/0"
_AT_ONCE = 16
_ROLLOUT_LINES = 10
_ROLLOUTS_AT_ONCE = 8

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class SandboxEffort:
    """Size of the measurement."""

    checkouts: int = 12
    """Consoles that each contender starts, one after the other."""
    lines: int = 150
    """Repeats of each line per contender."""
    many: int = 40
    """Lines per console with 16 concurrent consoles."""
    rollouts: int = 24
    """Rollouts (new console, 10 lines, kill), 8 of them concurrent; the stock kernel runs a quarter of the number."""


async def _line(session: SandboxSession, code: str) -> float:
    started = time.perf_counter()
    await session.push(code)
    return time.perf_counter() - started


@asynccontextmanager
async def _stock(*, history: bool = True) -> AsyncIterator[StockConsole]:
    console = await open_stock(history=history)
    try:
        yield console
    finally:
        await console.close()


def _p10(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def _summary(values: Sequence[float]) -> Json:
    return {"p10_ms": _p10(values) * 1000, "median_ms": statistics.median(values) * 1000, "n": len(values)}


async def _checkouts(ours: Sandbox, effort: SandboxEffort) -> dict[str, list[float]]:
    """Return seconds from the request for a console until its first line is done."""
    found: dict[str, list[float]] = {"ours": [], "stock": []}
    # Alternate the contenders, so that other load affects both.
    for _ in range(effort.checkouts):
        started = time.perf_counter()
        async with ours.session() as session:
            await session.push("1 + 1")
            found["ours"].append(time.perf_counter() - started)
        started = time.perf_counter()
        async with _stock() as console:
            await console.line("1 + 1")
            found["stock"].append(time.perf_counter() - started)
    return found


async def _lines(ours: Sandbox, docker: Sandbox | None, effort: SandboxEffort) -> dict[str, dict[str, list[float]]]:
    """Return seconds per line: {contender: {line: times}}."""
    found: dict[str, dict[str, list[float]]] = {}
    async with AsyncExitStack() as stack:
        ask = {"ours": await stack.enter_async_context(ours.session())}
        if docker is not None:
            ask["docker"] = await stack.enter_async_context(docker.session())
        stock = {
            "stock": await stack.enter_async_context(_stock()),
            "stock_history_off": await stack.enter_async_context(_stock(history=False)),
        }
        # Interleave the contenders line by line, so that other load on the machine affects all of them.
        for code in (*_LINES, _ERROR):
            for _ in range(effort.lines):
                for name, session in ask.items():
                    found.setdefault(name, {}).setdefault(code, []).append(await _line(session, code))
                for name, console in stock.items():
                    found.setdefault(name, {}).setdefault(code, []).append(await console.line(code))
    return found


async def _many(ours: Sandbox, effort: SandboxEffort) -> tuple[dict[str, float], dict[str, float]]:
    """Run 16 consoles at once; return lines per second, and memory (PSS, MiB) per console, by contender."""
    rate, memory = {}, {}
    async with AsyncExitStack() as stack:
        # Memory per console is the growth from before they start until each has run a line.
        empty = pss_mib()
        sessions = [await stack.enter_async_context(ours.session()) for _ in range(_AT_ONCE)]
        await asyncio.gather(*(_line(session, "1 + 1") for session in sessions))
        memory["ours"] = (pss_mib() - empty) / _AT_ONCE
        empty = pss_mib()
        stocks = await asyncio.gather(*(stack.enter_async_context(_stock()) for _ in range(_AT_ONCE)))
        await asyncio.gather(*(console.line("1 + 1") for console in stocks))
        memory["stock"] = (pss_mib() - empty) / _AT_ONCE

        async def ours_lines(session: SandboxSession) -> None:
            for number in range(effort.many):
                await session.push(f"print({number})")

        async def stock_lines(console: StockConsole) -> None:
            for number in range(effort.many // 4):
                await console.line(f"print({number})")

        # The stock kernel is slower, so it runs a quarter of the lines.
        rates: dict[str, list[float]] = {"ours": [], "stock": []}
        for _ in range(3):
            started = time.perf_counter()
            await asyncio.gather(*map(ours_lines, sessions))
            rates["ours"].append(_AT_ONCE * effort.many / (time.perf_counter() - started))
            started = time.perf_counter()
            await asyncio.gather(*map(stock_lines, stocks))
            rates["stock"].append(_AT_ONCE * (effort.many // 4) / (time.perf_counter() - started))
        rate = {name: statistics.median(values) for name, values in rates.items()}
    return rate, memory


async def _rollouts(ours: Sandbox, effort: SandboxEffort) -> dict[str, float]:
    """Return rollouts per second (new console, 10 lines, kill), by contender."""
    gate = asyncio.Semaphore(_ROLLOUTS_AT_ONCE)

    async def one_of_ours() -> None:
        async with gate, ours.session() as session:
            for number in range(_ROLLOUT_LINES):
                await session.push(f"print({number})")

    async def one_of_stock() -> None:
        async with gate, _stock() as console:
            for number in range(_ROLLOUT_LINES):
                await console.line(f"print({number})")

    rates: dict[str, list[float]] = {"ours": [], "stock": []}
    for _ in range(3):
        for name, one, count in (("ours", one_of_ours, effort.rollouts), ("stock", one_of_stock, effort.rollouts // 4)):
            started = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(count)))
            rates[name].append(count / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def pss_mib() -> float:
    """Return the proportional memory (PSS) of all processes below this one, MiB."""
    total = 0
    for pid in list_descendants(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024


def _line_ratios(found: dict[str, dict[str, list[float]]], against: str) -> dict[str, float]:
    ratio = {code: _p10(found[against][code]) / _p10(times) for code, times in found["ours"].items()}
    return {"line": min(ratio[code] for code in _LINES), "line_error": ratio[_ERROR]}


async def _docker(stack: AsyncExitStack) -> tuple[Sandbox | None, str]:
    try:
        return await stack.enter_async_context(open_sandbox("docker", warm=0)), ""
    except SandboxUnavailable as reason:
        return None, str(reason)


async def _measure(effort: SandboxEffort, *, docker: bool) -> Json:
    """Return all figures; see `bench_sandbox`."""
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(open_sandbox("local", warm=0))
        beside, why_not = await _docker(stack) if docker else (None, "not asked for")
        checkouts = await _checkouts(ours, effort)
        lines = await _lines(ours, beside, effort)
        rate, memory = await _many(ours, effort)
        rollouts = await _rollouts(ours, effort)
    # Every ratio is above 1 if ours is better.
    ratios = {
        "checkout": statistics.median(checkouts["stock"]) / statistics.median(checkouts["ours"]),
        **_line_ratios(lines, "stock"),
        "lines_16": rate["ours"] / rate["stock"],
        "rollouts": rollouts["ours"] / rollouts["stock"],
        "memory": memory["stock"] / memory["ours"],
    }
    if "docker" in lines:
        per_line = [_p10(lines["docker"][code]) / _p10(lines["ours"][code]) for code in _LINES]
        ratios["docker_line"] = max(per_line)
    return {
        "ratios": ratios,
        "ratios_history_off": _line_ratios(lines, "stock_history_off"),
        "checkout": {name: _summary(times) for name, times in checkouts.items()},
        "lines": {name: {code: _summary(times) for code, times in by.items()} for name, by in lines.items()},
        "lines_16_per_s": rate,
        "rollouts_per_s": rollouts,
        "memory_mib": memory,
        "docker": why_not or "measured",
        "isolation": "on",
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def bench_sandbox(effort: SandboxEffort | None = None, *, docker: bool = False) -> Json:
    """Measure, and return the content of `bench sandbox --json`.

    `ratios` compares ours with plain `jupyter_client` and the stock ipykernel; above 1 means that ours is better. Its
    keys are `checkout`, `line` (the worst of three lines without an error), `line_error`, `lines_16`, `rollouts` and
    `memory`. `docker_line` is docker's time per line over local's. The result also has the raw figures.

    Raises:
        SandboxUnavailable: this machine does not support `local`.
    """
    return asyncio.run(_measure(effort or SandboxEffort(), docker=docker))
