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

from repl_rl.cli.terminal_output import format_duration, make_terminal
from repl_rl.errors import ConfigError
from repl_rl.runs.list_runs import RunInfo, RunStatus, list_runs, read_run_info
from repl_rl.runs.report import SettingDifferences, is_report_page, make_distinct_names, write_comparison
from repl_rl.runs.run_metadata import RUNS, read_settings, validate_run_folder
from repl_rl.runs.store import escape_control_characters
from repl_rl.settings.argument_parser import flatten, parse
from repl_rl.settings.migrate_run_settings import format_component
from repl_rl.settings.toml_values import format_toml_value
from repl_rl.utils.atomic_files import Json, validate_replaceable_file, write_named
from repl_rl.utils.describe_os_errors import catch_os_errors

_SHARES = ("solve_rate", "greedy", "line_error_rate")
_NOT_SETTINGS = ("name", "out", "overwrite", "resume")
"""Settings that always differ, or that do not change the result."""
_COLOURS = {RunStatus.FINISHED: "green", RunStatus.RUNNING: "cyan", RunStatus.NOT_A_RUN: "dim"}
_UNKNOWN = "–"
"""Cell of an unknown value."""
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
        _compare_runs(parse(CompareConfig, "runs compare", argv[1:]))
        return 0
    config = parse(RunsConfig, "runs", argv)
    found = list_runs(config.folder)
    if config.json:
        print(json.dumps([build_run_record(run) for run in found], indent=2, allow_nan=False))
    else:
        _print_list(config.folder, found, make_terminal())
    return 0


def build_run_record(run: RunInfo) -> dict[str, Json]:
    """Return a run as `--json` prints it. Unknown values are null."""
    shares = [f"{name}_{when}" for name in _SHARES for when in ("first", "last")]
    return {
        "name": run.path.name,
        "path": str(run.path),
        "status": run.status.value,
        "why": run.reason,
        "step": run.step,
        "steps": run.steps,
        **{name: _get_text_or_none(run.summary.get(name)) for name in ("model", "engine", "sandbox")},
        **{name: _get_finite_or_none(run.get_number(name)) for name in (*shares, "wall_s")},
        "disk_bytes": run.disk_bytes,
        "changed": datetime.fromtimestamp(run.modified_s, UTC).isoformat(timespec="seconds")
        if run.modified_s
        else None,
    }


def _get_text_or_none(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _get_finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _print_list(folder: Path, found: Sequence[RunInfo], console: Console) -> None:
    if not found:
        console.print(Text(f"{folder} has no runs; `repl-rl train` makes one"))
        return
    table = Table(
        "run", "status", "steps", "before", "after", "errors", "time", "disk", "changed", box=None, pad_edge=False
    )
    for run in found:
        status = Text(run.status, _COLOURS.get(run.status, "yellow"))
        age = f"{format_duration(max(0.0, time.time() - run.modified_s))} ago" if run.modified_s else _UNKNOWN
        table.add_row(Text(escape_control_characters(run.path.name)), status, *_build_cells(run), age)
    console.print(table)
    console.print("before, after: held-out tasks solved; errors: lines in error, after", style="dim")
    # Reasons are too long for the table, so they follow it.
    for run in found:
        if run.reason:
            console.print(
                Text(escape_control_characters(f"{run.path.name}: {' '.join(run.reason.split())}"), style="yellow")
            )
    folders = "1 folder" if len(found) == 1 else f"{len(found)} folders"
    console.print(f"{folders}, {decimal(sum(run.disk_bytes for run in found))}")


def _build_cells(run: RunInfo) -> list[str]:
    if not run.is_run:
        return [""] * 5 + [decimal(run.disk_bytes)]
    steps = str(run.step) if run.steps is None else f"{run.step}/{run.steps}"
    shares = [
        _format_share(run.get_number(name)) for name in ("solve_rate_first", "solve_rate_last", "line_error_rate_last")
    ]
    wall_s = run.get_number("wall_s")
    duration = _UNKNOWN if wall_s is None else format_duration(wall_s)
    return [steps, *shares, duration, decimal(run.disk_bytes)]


def _format_share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1%}"


def _compare_runs(config: CompareConfig) -> None:
    for run in (config.one, config.other):
        # A bare name may be meant as a run in the default folder.
        if not run.exists() and (RUNS / run).is_dir():
            raise ConfigError("run folder", str(run), f"there is none; did you mean {str(RUNS / run)!r}?")
        validate_run_folder(run)
    if config.one.resolve() == config.other.resolve():
        raise ConfigError("run folders", f"{config.one} twice", "name two")
    names = make_distinct_names(config.one, config.other)
    beside = config.one.resolve().parent / f"compare-{config.one.resolve().name}-{config.other.resolve().name}.html"
    file = config.out or beside
    settings = find_setting_differences(config.one, config.other)
    validate_replaceable_file("out", file, is_report_page)
    with catch_os_errors("report", file, then=", or choose another --out"), write_named(file, "out") as place:
        write_comparison(config.one, config.other, settings, place)
    _print_side_by_side(names, settings, [read_run_info(config.one), read_run_info(config.other)], make_terminal())
    address = file.resolve().as_uri()
    print(address, flush=True)
    if config.open:
        webbrowser.open(address)


def find_setting_differences(one: Path, other: Path) -> SettingDifferences:
    """Return the settings that differ between two runs, as TOML. A missing setting has a placeholder.

    Raises:
        StoreError: the settings of a run cannot be read.
    """
    sides = [
        {name: _format_setting(name, value) for name, value in flatten(read_settings(run))} for run in (one, other)
    ]
    names = sorted({*sides[0], *sides[1]} - {*_NOT_SETTINGS})
    told = [(name, *(side.get(name, "not said") for side in sides)) for name in names]
    return [(name, here, there) for name, here, there in told if here != there]


def _format_setting(name: str, value: object) -> str:
    return format_component(name, value) or format_toml_value(tuple(value) if isinstance(value, list) else value)


def _print_side_by_side(
    names: tuple[str, str], settings: SettingDifferences, runs: Sequence[RunInfo], console: Console
) -> None:
    table = Table("")
    for name in names:
        table.add_column(Text(escape_control_characters(name)))
    # Each run has a list of cells. Transpose them to one row per metric.
    for label, cells in zip(
        ("steps", "solved before", "solved after", "lines in error", "wall clock", "disk"),
        zip(*map(_build_cells, runs), strict=True),
        strict=True,
    ):
        table.add_row(label, *cells)
    if settings:
        table.add_section()
    for row in settings:
        table.add_row(
            *(Text(escape_control_characters(part if len(part) <= _MOST else f"{part[:_MOST]} ...")) for part in row)
        )
    console.print(table)
