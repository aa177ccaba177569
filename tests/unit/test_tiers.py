"""The tiers of tests: each file is in one, unit tests stay light, and the quarantine holds what it says."""

import ast
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from tests.support.quarantine import FlakyTest, load_quarantine

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
TIERS = ("unit", "integration", "e2e")
FILES = sorted(TESTS.rglob("test_*.py"))


def tier(path: Path) -> str:
    """Return the folder below `tests/` that a file is in."""
    return path.relative_to(TESTS).parts[0]


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the syntax of a file, read once for all tests."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, wherever it does so."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_each_test_file_is_in_a_package_of_one_tier() -> None:
    assert [path for path in FILES if tier(path) not in TIERS] == []
    assert [path for path in FILES if not path.with_name("__init__.py").is_file()] == []


def test_no_test_and_no_support_imports_a_test_of_a_slower_tier() -> None:
    """Code that a quicker tier shares with it is in `tests/support`."""
    found = [
        (path.relative_to(ROOT).as_posix(), module)
        for path in sorted(TESTS.rglob("*.py"))
        for module in imported(path)
        if module.startswith("tests.")
        and (other := module.split(".")[1]) in TIERS
        and (tier(path) not in TIERS or TIERS.index(tier(path)) < TIERS.index(other))
    ]
    assert found == []


def test_no_unit_test_has_a_marker_that_leaves_it_out() -> None:
    left_out = {f"pytest.mark.{name}" for name in ("heavy", "alone", "soak")}
    marked = [
        path
        for path in FILES
        if tier(path) == "unit"
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in left_out
    ]
    assert marked == []


def bind() -> None:
    """Begin to listen."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: subprocess.Popen(["true"]),
        os.fork,
        lambda: socket.create_connection(("127.0.0.1", 9)),
        bind,
    ],
    ids=["program", "fork", "connection", "server"],
)
def test_a_unit_test_can_start_no_process_and_reach_no_network(attempt: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"a unit test needs (a process|the network)"):
        attempt()


ENTRIES = load_quarantine()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.test.rpartition("::")[2])
def test_a_quarantined_test_is_there_with_a_reason_and_a_date(entry: FlakyTest) -> None:
    file, _, name = entry.test.partition("::")
    names = {node.name for node in nodes(ROOT / file) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name.partition("[")[0] in names
    assert len(entry.reason.split()) >= 5
    assert type(entry.since) is date


def test_the_quarantine_is_small_sorted_and_outside_of_the_quick_tiers() -> None:
    tests = [entry.test for entry in ENTRIES]
    assert tests == sorted(set(tests))
    assert len(tests) <= 6
    assert [test for test in tests if not test.startswith("tests/e2e/")] == []
