"""Conformance suite of every sandbox: `run_suite(kind)` returns a table of `SandboxCheckResult`.

It checks fidelity, isolation seen from inside, limits, host functions, workspaces and latency. The checks of host
functions are in this file, for every sandbox that offers them; the modules of the package contain the other checks.
"""

import json
import statistics
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repl_rl.sandbox import SANDBOXES, open_sandbox
from repl_rl.sandbox.base import Sandbox, SandboxConfig, SupportsHostFunctions
from repl_rl.sandbox.conformance.isolation import (
    build_probes,
    check_foreign_terminal,
    find_shared_namespaces,
    open_host_secrets,
    read_console_namespaces,
    run_probe,
)
from repl_rl.sandbox.conformance.limits_and_workspaces import (
    CHECK_LIMITS,
    CHECKS,
    EMPTYISH,
    WORKSPACE_CHECKS,
    WorkspaceSandbox,
    run_check,
    run_workspace_check,
)
from repl_rl.sandbox.conformance.python_console_fidelity import (
    SCRIPT,
    Transcript,
    compare_with_reference,
    iterate_transcripts,
    join_statements,
    load_edge_transcripts,
    run_reference,
    select_reproducible,
    wrap_in_blocks,
)
from repl_rl.trajectory.trajectory import LineStatus

__all__ = [
    "SandboxCheckResult",
    "check_fidelity",
    "check_host_calls",
    "check_isolation",
    "check_limits",
    "check_workspaces",
    "load_doctest_transcripts",
    "load_edge_transcripts",
    "measure_latency",
    "run_suite",
]

_HARVESTED = """
    test_generators test_genexps test_listcomps test_setcomps test_deque test_unpack test_unpack_ex test_extcall
    test_syntax test_descrtut test_itertools test_metaclass test_cmd test_bool
"""
"""Modules in `test/` of the standard library whose doctests are used. Modules that are not installed are skipped."""
_HARVESTED_MODULES = """
    statistics heapq bisect random ast enum fractions textwrap types reprlib difflib collections/__init__ functools
    json/__init__ string decimal _pydecimal ipaddress pickletools
"""
_LATENCY_LINES = ("x = 1", "1 + 1", "print('a')", "1/0")
_LATENCY_REPEATS = 50
WORKSPACE_LIMITS = replace(CHECK_LIMITS, cpu_s=6.0)
"""Limits of the sandbox that `check_workspaces` gets. A workspace that never ends is rejected after `cpu_s`."""


@dataclass(frozen=True, slots=True)
class SandboxCheckResult:
    """One row of the table."""

    section: str
    name: str
    passed: bool
    detail: str = ""


def load_doctest_transcripts(limit: int | None = None) -> list[Transcript]:
    """Return doctests of the installed standard library, at most `limit` transcripts."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / "test" / f"{name}.py" for name in _HARVESTED.split()]
    paths += [library / f"{name}.py" for name in _HARVESTED_MODULES.split()]
    transcripts = list(iterate_transcripts(path for path in paths if path.exists()))
    return transcripts[:limit]


async def check_fidelity(
    sandbox: Sandbox, cases: Sequence[Transcript], section: str, command: Sequence[str] = ()
) -> list[SandboxCheckResult]:
    """Check that the cases print the same bytes as under the reference. Return one row, and one more per difference.

    `command`: see `run_reference`. Cases that the reference does not reproduce, or on which it fails, are left out
    and counted.
    """
    # Run the reference twice to find the cases that it does not reproduce.
    first, second = await run_reference(cases, command), await run_reference(cases, command)
    both = zip(cases, select_reproducible(first, second), strict=True)
    stable = [(case, texts) for case, texts in both if texts is not None]
    mismatches = await compare_with_reference(sandbox, [case for case, _ in stable], [texts for _, texts in stable])
    lines = sum(len(texts) for _, texts in stable)
    examples = sum(case.example_count for case, _ in stable)
    left_out = len(cases) - len(stable)
    detail = (
        f"{examples} examples, {lines} lines, {len(mismatches)} sessions differ, {left_out} not reproducible left out"
    )
    rows = [SandboxCheckResult("fidelity", section, not mismatches, detail)]
    rows += [
        SandboxCheckResult(
            "fidelity", f"{bad.name}: {bad.line[:60]!r}", False, f"expected {bad.expected!r}, got {bad.actual!r}"
        )
        for bad in mismatches
    ]
    return rows


async def check_isolation(sandbox: Sandbox) -> list[SandboxCheckResult]:
    """Run every probe from inside, and compare the namespaces of three consoles."""
    rows = []
    async with open_host_secrets() as outside:
        for probe in build_probes(outside):
            problem = await run_probe(sandbox, probe)
            rows.append(SandboxCheckResult("isolation", probe.name, not problem, problem))
    terminal = await check_foreign_terminal(sandbox)
    rows.append(SandboxCheckResult("isolation", "terminals of its own", not terminal, terminal))
    common = find_shared_namespaces(await read_console_namespaces(sandbox, 3))
    rows.append(SandboxCheckResult("isolation", "namespaces of its own", not common, ", ".join(common)))
    return rows


async def check_limits(sandbox: Sandbox, unlimited: Collection[str] = ()) -> list[SandboxCheckResult]:
    """Hit every limit on purpose, except those in `unlimited`. The sandbox must be opened with `CHECK_LIMITS`."""
    rows = []
    for check in [check for check in CHECKS if check.name not in unlimited]:
        problem = await run_check(sandbox, check)
        rows.append(SandboxCheckResult("limits", check.name, not problem, problem))
    return rows


async def check_host_calls(sandbox: Sandbox) -> list[SandboxCheckResult]:
    """Call functions of the host from lines."""
    rows = []
    for check in HOST_CHECKS:
        problem = await run_host_check(sandbox, check)
        rows.append(SandboxCheckResult("host functions", check.name, not problem, problem))
    return rows


async def check_workspaces(
    sandbox: Sandbox, *, isolates: bool, unlimited: Collection[str] = ()
) -> list[SandboxCheckResult]:
    """Check consoles that begin with a workspace: workspace checks, then the checks that empty consoles must pass.

    `isolates`: True if this sandbox guarantees isolation. `unlimited`: names of limit checks to skip, because the
    sandbox does not enforce these limits. The sandbox must be opened with `WORKSPACE_LIMITS`.
    """
    rows = []
    for name in WORKSPACE_CHECKS:
        problem = await run_workspace_check(sandbox, name)
        rows.append(SandboxCheckResult("workspace", name, not problem, problem))
    workspace_sandbox = WorkspaceSandbox(sandbox, EMPTYISH)
    inherited = await check_limits(workspace_sandbox, unlimited)
    inherited += await check_isolation(workspace_sandbox) if isolates else []
    return [*rows, *(replace(row, section=f"workspace, {row.section}") for row in inherited)]


async def measure_latency(sandbox: Sandbox) -> list[SandboxCheckResult]:
    """Measure the median round trip of a few lines, milliseconds. A row passes if every line has an expected status."""
    rows = []
    async with sandbox.session() as session:
        for line in _LATENCY_LINES:
            results = [await session.push(line) for _ in range(_LATENCY_REPEATS)]
            good = all(result.status in (LineStatus.OK, LineStatus.EXCEPTION) for result in results)
            median_ms = statistics.median(result.elapsed_s for result in results) * 1000
            rows.append(SandboxCheckResult("latency", line, good, f"{median_ms:.2f} ms"))
    return rows


async def run_suite(kind: SandboxConfig | str, *, doctests: int | None = 60) -> list[SandboxCheckResult]:
    """Run the whole suite against one sandbox. `doctests`: number of transcripts to replay; None means all.

    Raises:
        ConfigError, SandboxUnavailable: as in `open_sandbox`.
    """
    cases = load_doctest_transcripts(doctests)
    variants = [variant for case in cases for variant in (wrap_in_blocks(case), join_statements(case)) if variant.lines]
    config = SANDBOXES.resolve(kind)
    # Small limits, so that the checks hit them quickly.
    async with open_sandbox(config, limits=CHECK_LIMITS) as sandbox:
        checked = await check_isolation(sandbox) if config.isolates else []
        checked += await check_limits(sandbox, config.unenforced_limits)
        checked += await check_host_calls(sandbox)
        checked += await measure_latency(sandbox)
    async with open_sandbox(config, limits=WORKSPACE_LIMITS) as sandbox:
        checked += await check_workspaces(sandbox, isolates=config.isolates, unlimited=config.unenforced_limits)
    # Fidelity is checked with the default limits.
    async with open_sandbox(config) as sandbox:
        command = config.build_reference_command(SCRIPT)
        rows = await check_fidelity(sandbox, load_edge_transcripts(), "corner cases", command)
        rows += await check_fidelity(sandbox, cases, "doctests", command)
        rows += await check_fidelity(sandbox, variants, "doctests in blocks and joined", command)
    return [*rows, *checked]


# Host functions.


@dataclass(frozen=True, slots=True)
class HostCheck:
    """Check of host functions: the result of the last line must have `status`, and contain `expected_text`."""

    name: str
    lines: tuple[str, ...]
    status: LineStatus
    expected_text: str


HOST_CHECKS = (
    HostCheck("a call", ("add(1, 2)",), LineStatus.OK, "3\n"),
    HostCheck("an error of the host", ("add('x')",), LineStatus.EXCEPTION, "HostError: numbers, please\n"),
    HostCheck(
        "calls from threads",
        ("from concurrent.futures import ThreadPoolExecutor as Pool", "sum(Pool(2).map(add, range(8)))"),
        LineStatus.OK,
        "28\n",
    ),
    HostCheck("100 MB of arguments", ("add('x' * 10**8)",), LineStatus.EXCEPTION, "are allowed\n"),
    HostCheck(
        "a call from a child process",
        ("import os", "if os.fork() == 0: add(1)", "else: _ = os.wait()", ""),
        LineStatus.OK,
        "HostError: add() cannot be called from a child process",
    ),
)


class AddingHost:
    """Host that adds numbers."""

    functions = {"add": "add(*numbers)"}  # noqa: RUF012
    argument_bytes = 4096

    async def answer_call(self, call: bytes) -> bytes:
        """As `HostCallHandler.answer_call`."""
        numbers = json.loads(call)["args"]
        if not all(isinstance(number, int) for number in numbers):
            return b'{"error": "numbers, please"}'
        return json.dumps({"answer": sum(numbers)}).encode()


async def run_host_check(sandbox: Sandbox, check: HostCheck) -> str:
    """Return an empty string if the check passes, else the result of the last line."""
    async with sandbox.session() as session:
        if not isinstance(session, SupportsHostFunctions):
            return "its sessions have no `offer_functions`"
        session.offer_functions(AddingHost())
        for line in check.lines:
            result = await session.push(line)
        good = result.status is check.status and check.expected_text in result.text
        return "" if good else f"{result.status.value}: {result.text[-200:]!r}"
