"""Pytest plugin: the quarantine of tests that can fail for their neighbours' sake.

`tests/flaky.toml` names them, each with a reason and a date. `--quarantined exclude` leaves them out, and
`--quarantined only` runs nothing else. `scripts/suite` does one after the other.
"""

import os
import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "flaky.toml"


@dataclass(frozen=True)
class FlakyTest:
    """A quarantined test."""

    test: str
    """Node id, with or without the parameters in brackets."""
    reason: str
    since: date

    def covers(self, node_id: str) -> bool:
        """Return whether the entry names this test, or the function that it is a case of."""
        return node_id == self.test or node_id.startswith(f"{self.test}[")


def load_quarantine(file: Path = FILE) -> list[FlakyTest]:
    """Return the entries of a file."""
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("flaky", [])
    return [FlakyTest(**entry) for entry in entries]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this plugin."""
    parser.addoption("--quarantined", choices=("exclude", "only"), help="which tests of the quarantine run")
    parser.addoption("--quarantine-file", type=Path, default=FILE, help="the quarantine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other file where only the quarantine runs: importing all of them takes a minute."""
    if config.getoption("--quarantined") != "only" or collection_path.suffix != ".py":
        return None
    files = {entry.test.partition("::")[0] for entry in load_quarantine(config.getoption("--quarantine-file"))}
    return None if os.path.relpath(collection_path, config.rootpath) in files else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests in quarantine, or the other ones."""
    if (chosen := config.getoption("--quarantined")) is None:
        return
    entries = load_quarantine(config.getoption("--quarantine-file"))
    wanted = {item: any(entry.covers(item.nodeid) for entry in entries) == (chosen == "only") for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not wanted[item]])
    items[:] = [item for item in items if wanted[item]]
