"""A sandbox prints, byte for byte, what `code.InteractiveConsole` of its own Python prints."""

import asyncio
from collections.abc import Sequence

import pytest

from repl_rl.sandbox import Sandbox, open_sandbox
from repl_rl.sandbox.conformance import (
    SandboxCheckResult,
    check_fidelity,
    load_doctest_transcripts,
    load_edge_transcripts,
)
from repl_rl.sandbox.conformance.python_console_fidelity import (
    Mismatch,
    Transcript,
    compare_with_reference,
    join_statements,
    wrap_in_blocks,
)

EXAMPLES = 900
"""As many as the standard library of Debian has, which comes without its own tests."""


def _check(cases: Sequence[Transcript]) -> SandboxCheckResult:
    async def main() -> list[SandboxCheckResult]:
        async with open_sandbox("local") as sandbox:
            return await check_fidelity(sandbox, cases, "cases")

    rows = asyncio.run(main())
    assert all(row.passed for row in rows), "\n".join(f"{row.name}: {row.detail}" for row in rows if not row.passed)
    return rows[0]


def _enough(cases: Sequence[Transcript], examples: int) -> list[Transcript]:
    chosen: list[Transcript] = []
    for case in cases:
        if sum(each.example_count for each in chosen) >= examples:
            break
        chosen.append(case)
    return chosen


def test_corner_cases_print_what_the_reference_prints() -> None:
    _check(load_edge_transcripts())


def test_hundreds_of_doctests_print_what_the_reference_prints() -> None:
    cases = _enough(load_doctest_transcripts(), EXAMPLES + 100)
    assert int(_check(cases).detail.split()[0]) >= EXAMPLES


def test_the_same_lines_in_blocks_and_joined_print_what_the_reference_prints() -> None:
    cases = _enough(load_doctest_transcripts(), EXAMPLES + 100)
    _check([variant for case in cases for variant in (wrap_in_blocks(case), join_statements(case)) if variant.lines])


def test_a_case_on_which_the_reference_itself_fails_is_left_out_and_counted() -> None:
    fails = Transcript("hookless", ("import sys", "del sys.excepthook", "1/0"), 3)
    row = _check([fails, Transcript("plain", ("1",), 1)])
    assert row.detail == "1 examples, 1 lines, 0 sessions differ, 1 not reproducible left out"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_harvested_doctest_prints_what_the_reference_prints() -> None:
    cases = load_doctest_transcripts()
    _check(cases)
    _check([variant for case in cases for variant in (wrap_in_blocks(case), join_statements(case)) if variant.lines])


def test_a_console_that_prints_something_else_is_found_out() -> None:
    async def main(sandbox: Sandbox) -> list[Mismatch]:
        case = Transcript("case", ("1", "2"), 2)
        return await compare_with_reference(sandbox, [case], [["1\n", "two\n"]])

    async def opened() -> list[Mismatch]:
        async with open_sandbox("unsafe", warm=0) as sandbox:
            return await main(sandbox)

    assert [(bad.line, bad.expected, bad.actual) for bad in asyncio.run(opened())] == [("2", "two\n", "2\n")]
