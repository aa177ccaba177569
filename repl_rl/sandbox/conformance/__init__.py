"""Conformance suite of every sandbox: fidelity, isolation seen from inside, limits, host functions, latency.

`run(kind)` returns a table.
"""

import statistics
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox import SANDBOXES, open_sandbox
from repl_rl.sandbox.base import Sandbox, SandboxKind
from repl_rl.sandbox.conformance.harvest import Transcript, edge_transcripts, in_blocks, joined, transcripts
from repl_rl.sandbox.conformance.host import HOST_CHECKS, run_host_check
from repl_rl.sandbox.conformance.isolation import foreign_terminal, probes, run_probe, shared, spaces, world
from repl_rl.sandbox.conformance.limits import CHECK_LIMITS, CHECKS, run_check
from repl_rl.sandbox.conformance.reference import SCRIPT, compare, reference_texts, reproduced
from repl_rl.sandbox.conformance.workspaces import EMPTYISH, WORKSPACE_CHECKS, Begun, run_workspace_check

__all__ = [
    "Row",
    "doctest_transcripts",
    "edge_transcripts",
    "fidelity",
    "host_calls",
    "isolation",
    "latency",
    "limits",
    "run",
    "workspaces",
]

_HARVESTED = """
    test_generators test_genexps test_listcomps test_setcomps test_deque test_unpack test_unpack_ex test_extcall
    test_syntax test_descrtut test_itertools test_metaclass test_cmd test_bool
"""
"""Files of `test/` in the standard library. Those that are not installed are skipped."""
_HARVESTED_MODULES = """
    statistics heapq bisect random ast enum fractions textwrap types reprlib difflib collections/__init__ functools
    json/__init__ string decimal _pydecimal ipaddress pickletools
"""
_LATENCY_LINES = ("x = 1", "1 + 1", "print('a')", "1/0")
_LATENCY_REPEATS = 50
WORKSPACE_LIMITS = replace(CHECK_LIMITS, cpu_s=6.0)
"""Limits of the sandbox that `workspaces` checks. A workspace that never ends is rejected after `cpu_s`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    section: str
    name: str
    passed: bool
    detail: str = ""


def doctest_transcripts(limit: int | None = None) -> list[Transcript]:
    """Return doctests of the installed standard library, at most `limit` transcripts."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / "test" / f"{name}.py" for name in _HARVESTED.split()]
    paths += [library / f"{name}.py" for name in _HARVESTED_MODULES.split()]
    found = list(transcripts(path for path in paths if path.exists()))
    return found[:limit]


async def fidelity(
    sandbox: Sandbox, cases: Sequence[Transcript], section: str, command: Sequence[str] = ()
) -> list[Row]:
    """Check that the cases print the same bytes as under the reference. Return one row, and one more per difference.

    `command`: see `reference_texts`. Cases that the reference does not reproduce, or on which it fails, are left out
    and counted.
    """
    # Run the reference twice to find the cases that it does not reproduce.
    first, second = await reference_texts(cases, command), await reference_texts(cases, command)
    both = zip(cases, reproduced(first, second), strict=True)
    stable = [(case, texts) for case, texts in both if texts is not None]
    wrong = await compare(sandbox, [case for case, _ in stable], [texts for _, texts in stable])
    lines = sum(len(texts) for _, texts in stable)
    examples = sum(case.examples for case, _ in stable)
    left_out = len(cases) - len(stable)
    detail = f"{examples} examples, {lines} lines, {len(wrong)} sessions differ, {left_out} not reproducible left out"
    rows = [Row("fidelity", section, not wrong, detail)]
    rows += [
        Row("fidelity", f"{bad.name}: {bad.line[:60]!r}", False, f"expected {bad.expected!r}, got {bad.got!r}")
        for bad in wrong
    ]
    return rows


async def isolation(sandbox: Sandbox) -> list[Row]:
    """Run every probe from inside, and compare the namespaces of three consoles."""
    rows = []
    async with world() as outside:
        for probe in probes(outside):
            problem = await run_probe(sandbox, probe)
            rows.append(Row("isolation", probe.name, not problem, problem))
    terminal = await foreign_terminal(sandbox)
    rows.append(Row("isolation", "terminals of its own", not terminal, terminal))
    common = shared(await spaces(sandbox, 3))
    rows.append(Row("isolation", "namespaces of its own", not common, ", ".join(common)))
    return rows


async def limits(sandbox: Sandbox, unlimited: Collection[str] = ()) -> list[Row]:
    """Hit every limit on purpose, except those in `unlimited`. The sandbox must be opened with `CHECK_LIMITS`."""
    rows = []
    for check in [check for check in CHECKS if check.name not in unlimited]:
        problem = await run_check(sandbox, check)
        rows.append(Row("limits", check.name, not problem, problem))
    return rows


async def host_calls(sandbox: Sandbox) -> list[Row]:
    """Call functions of the host from lines."""
    rows = []
    for check in HOST_CHECKS:
        problem = await run_host_check(sandbox, check)
        rows.append(Row("host functions", check.name, not problem, problem))
    return rows


async def workspaces(sandbox: Sandbox, *, isolates: bool, unlimited: Collection[str] = ()) -> list[Row]:
    """Check consoles that begin with a workspace: their own guarantees, and all guarantees of other consoles.

    `isolates`: isolation is a guarantee of this sandbox; `unlimited`: limits that are not. The sandbox must be opened
    with `WORKSPACE_LIMITS`.
    """
    rows = []
    for name in WORKSPACE_CHECKS:
        problem = await run_workspace_check(sandbox, name)
        rows.append(Row("workspace", name, not problem, problem))
    begun = Begun(sandbox, EMPTYISH)
    inherited = await limits(begun, unlimited)
    inherited += await isolation(begun) if isolates else []
    return [*rows, *(replace(row, section=f"workspace, {row.section}") for row in inherited)]


async def latency(sandbox: Sandbox) -> list[Row]:
    """Measure the median round trip of a few lines, milliseconds. A row passes if every line has an expected status."""
    rows = []
    async with sandbox.session() as session:
        for line in _LATENCY_LINES:
            results = [await session.push(line) for _ in range(_LATENCY_REPEATS)]
            good = all(result.status in (LineStatus.OK, LineStatus.EXCEPTION) for result in results)
            median_ms = statistics.median(result.elapsed_s for result in results) * 1000
            rows.append(Row("latency", line, good, f"{median_ms:.2f} ms"))
    return rows


async def run(kind: SandboxKind | str, *, doctests: int | None = 60) -> list[Row]:
    """Run the whole suite against one sandbox. `doctests`: number of transcripts to replay; None means all.

    Raises:
        ConfigError, SandboxUnavailable: as in `open_sandbox`.
    """
    cases = doctest_transcripts(doctests)
    variants = [variant for case in cases for variant in (in_blocks(case), joined(case)) if variant.lines]
    chosen = SANDBOXES.chosen(kind)
    # Small limits, so that the checks hit them quickly.
    async with open_sandbox(chosen, limits=CHECK_LIMITS) as sandbox:
        checked = await isolation(sandbox) if chosen.isolates else []
        checked += await limits(sandbox, chosen.unlimited)
        checked += await host_calls(sandbox)
        checked += await latency(sandbox)
    async with open_sandbox(chosen, limits=WORKSPACE_LIMITS) as sandbox:
        checked += await workspaces(sandbox, isolates=chosen.isolates, unlimited=chosen.unlimited)
    # Fidelity is checked with the default limits.
    async with open_sandbox(chosen) as sandbox:
        command = chosen.reference(SCRIPT)
        rows = await fidelity(sandbox, edge_transcripts(), "corner cases", command)
        rows += await fidelity(sandbox, cases, "doctests", command)
        rows += await fidelity(sandbox, variants, "doctests in blocks and joined", command)
    return [*rows, *checked]
