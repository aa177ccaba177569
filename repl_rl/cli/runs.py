"""`repl-rl runs` and `repl-rl runs compare A B`: list all runs, and compare two of them."""

import json
import math
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from repl_rl.cli.terminal import terminal
from repl_rl.errors import ConfigError
from repl_rl.machine.files import Json, write_named
from repl_rl.machine.outputs import refuse_other_file
from repl_rl.machine.refused import writing
from repl_rl.runs.listed import Listed, Status, listed, runs_in
from repl_rl.runs.report import Differing, is_page, told_apart, write_comparison
from repl_rl.runs.store import printable
from repl_rl.runs.told import RUNS, refuse_foreign, settings_of
from repl_rl.settings.arguments import parse
from repl_rl.settings.scalars import literal
from repl_rl.settings.toml import flatten

_SHARES = ("solve_rate", "greedy", "line_error_rate")
_NOT_SETTINGS = ("name", "out", "overwrite", "resume")
_COLOURS = {Status.FINISHED: "green", Status.RUNNING: "cyan", Status.FOREIGN: "dim"}
_UNKNOWN = "–"
_MOST = 120
"""Longest setting in a terminal, characters. A prompt's text can be longer; the page shows all of it."""


@dataclass(frozen=True)
class RunsConfig:
    """List run folders with status, metrics and disk usage, last written first.

    `repl-rl runs compare A B` compares two.
    """

    folder: Positional[Path] = RUNS
    """Folder of the run folders."""
    json: bool = False
    """Print a list of JSON objects instead, with shares in [0, 1], seconds and bytes."""


@dataclass(frozen=True)
class CompareConfig:
    """Compare two runs in one report: settings that differ, metrics, curves. Its address is printed."""

    one: Positional[Path]
    """Run folder, such as runs/quickstart."""
    other: Positional[Path]
    """Run folder."""
    out: Path | None = None
    """File of the report. Default: compare-ONE-OTHER.html next to the folder of the first run."""
    open: bool = True
    """Open a browser. The address is printed in any case."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    if argv and argv[0] == "compare":
        _compare(parse(CompareConfig, "runs compare", argv[1:]))
        return 0
    config = parse(RunsConfig, "runs", argv)
    found = runs_in(config.folder)
    if config.json:
        print(json.dumps([record(run) for run in found], indent=2, allow_nan=False))
    else:
        _list(config.folder, found, terminal())
    return 0


def record(run: Listed) -> dict[str, Json]:
    """Return a run as `--json` prints it. Unknown values are null."""
    shares = [f"{name}_{when}" for name in _SHARES for when in ("first", "last")]
    return {
        "name": run.path.name,
        "path": str(run.path),
        "status": run.status.value,
        "why": run.why,
        "step": run.step,
        "steps": run.steps,
        **{name: _word(run.summary.get(name)) for name in ("model", "engine", "sandbox")},
        **{name: _finite(run.figure(name)) for name in (*shares, "wall_s")},
        "disk_bytes": run.disk_bytes,
        "changed": datetime.fromtimestamp(run.changed_s, UTC).isoformat(timespec="seconds") if run.changed_s else None,
    }


def _word(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _list(folder: Path, found: Sequence[Listed], console: Console) -> None:
    if not found:
        console.print(Text(f"{folder} has no runs; `repl-rl train` makes one"))
        return
    table = Table(
        "run", "status", "steps", "before", "after", "errors", "time", "disk", "changed", box=None, pad_edge=False
    )
    for run in found:
        status = Text(run.status, _COLOURS.get(run.status, "yellow"))
        age = f"{_lasting(max(0.0, time.time() - run.changed_s))} ago" if run.changed_s else _UNKNOWN
        table.add_row(Text(printable(run.path.name)), status, *_cells(run), age)
    console.print(table)
    console.print("before, after: held-out tasks solved; errors: lines in error, after", style="dim")
    # Reasons are too long for the table, so they follow it.
    for run in found:
        if run.why:
            console.print(Text(printable(f"{run.path.name}: {' '.join(run.why.split())}"), style="yellow"))
    folders = "1 folder" if len(found) == 1 else f"{len(found)} folders"
    console.print(f"{folders}, {decimal(sum(run.disk_bytes for run in found))}")


def _cells(run: Listed) -> list[str]:
    if not run.is_run:
        return [""] * 5 + [decimal(run.disk_bytes)]
    steps = str(run.step) if run.steps is None else f"{run.step}/{run.steps}"
    shares = [_share(run.figure(name)) for name in ("solve_rate_first", "solve_rate_last", "line_error_rate_last")]
    return [steps, *shares, _lasting(run.figure("wall_s")), decimal(run.disk_bytes)]


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"


def _lasting(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} d"


def _compare(config: CompareConfig) -> None:
    for run in (config.one, config.other):
        # A bare name may be meant as a run in the default folder.
        if not run.exists() and (RUNS / run).is_dir():
            raise ConfigError("run folder", str(run), f"there is none; did you mean {str(RUNS / run)!r}?")
        refuse_foreign(run)
    if config.one.resolve() == config.other.resolve():
        raise ConfigError("run folders", f"{config.one} twice", "name two")
    names = told_apart(config.one, config.other)
    beside = config.one.resolve().parent / f"compare-{config.one.resolve().name}-{config.other.resolve().name}.html"
    file = config.out or beside
    settings = differing(config.one, config.other)
    refuse_other_file("out", file, is_page)
    with writing("report", file, then=", or choose another --out"), write_named(file, "out") as place:
        write_comparison(config.one, config.other, settings, place)
    _beside(names, settings, [listed(config.one), listed(config.other)], terminal())
    address = file.resolve().as_uri()
    print(address, flush=True)
    if config.open:
        webbrowser.open(address)


def differing(one: Path, other: Path) -> Differing:
    """Return the settings that differ between two runs, as TOML. A missing setting has a placeholder.

    Raises:
        StoreError: the settings of a run cannot be read.
    """
    sides = [{name: _literal(value) for name, value in flatten(settings_of(run))} for run in (one, other)]
    names = sorted({*sides[0], *sides[1]} - {*_NOT_SETTINGS})
    told = [(name, *(side.get(name, "not said") for side in sides)) for name in names]
    return [(name, here, there) for name, here, there in told if here != there]


def _literal(value: object) -> str:
    return literal(tuple(value) if isinstance(value, list) else value)


def _beside(names: tuple[str, str], settings: Differing, runs: Sequence[Listed], console: Console) -> None:
    table = Table("")
    for name in names:
        table.add_column(Text(printable(name)))
    # Each run has a list of cells. Transpose them to one row per metric.
    for label, cells in zip(
        ("steps", "solved before", "solved after", "lines in error", "wall clock", "disk"),
        zip(*map(_cells, runs), strict=True),
        strict=True,
    ):
        table.add_row(label, *cells)
    if settings:
        table.add_section()
    for row in settings:
        table.add_row(*(Text(printable(part if len(part) <= _MOST else f"{part[:_MOST]} ...")) for part in row))
    console.print(table)
