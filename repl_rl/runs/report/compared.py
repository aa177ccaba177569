"""Comparison page of two runs: different settings, results, and curves in one chart."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from repl_rl.machine.files import Json, write_whole
from repl_rl.runs.report.data import columns
from repl_rl.runs.report.page import comparison_page
from repl_rl.runs.told import refuse_foreign, summary_of

Differing = Sequence[tuple[str, str, str]]
"""Rows of (name of a setting, value in the first run, value in the second run)."""


def write_comparison(one: Path, other: Path, settings: Differing, file: Path) -> None:
    """Write the page to `file` atomically.

    Raises:
        StoreError: one of them is not a run folder, or one of its files cannot be read.
        OSError: it cannot be written.
    """
    write_whole(file, comparison_page(compared(one, other, settings)))


def compared(one: Path, other: Path, settings: Differing) -> dict[str, Json]:
    """Return the data of the page.

    Raises:
        StoreError: one of them is not a run folder, or one of its files cannot be read.
    """
    names = told_apart(one, other)
    runs: list[Json] = [_side(run, name) for run, name in zip((one, other), names, strict=True)]
    return {"name": " and ".join(names), "runs": runs, "settings": [list(row) for row in settings]}


def told_apart(one: Path, other: Path) -> tuple[str, str]:
    """Return the names of two runs, or their whole paths if the names are equal."""
    first, second = one.resolve(), other.resolve()
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))


def _side(run: Path, name: str) -> Mapping[str, Json]:
    refuse_foreign(run)
    return {"name": name, "summary": summary_of(run) or {}, "metrics": columns(run)}
