"""`repl-rl export SOURCE --out PLACE`: convert trajectories to a table for other trainers, and back."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import Positional

from repl_rl.errors import ConfigError
from repl_rl.runs.store import Store, append_records, is_step_file
from repl_rl.runs.store.export_formats import PARQUET, TABLE, is_table, open_table, validate_table_target, write_table
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.atomic_files import (
    is_stream,
    resolve_link,
    restore_backup,
    validate_no_inputs_inside,
    validate_replaceable_file,
    write_named,
)
from repl_rl.utils.describe_os_errors import catch_os_errors

_OURS = ".jsonl.gz"
"""Ending of a file of trajectories."""


@dataclass(frozen=True)
class ExportConfig:
    """Convert trajectories to a table of the library `datasets`, or such a table back to trajectories."""

    source: Positional[Path]
    """Run folder, trajectories folder or one of its files; or a table that this command wrote."""
    out: Path
    """Output path. Trajectories become a table: one file if the path ends in .parquet, else a folder for
    datasets.load_from_disk. A table becomes a file of trajectories, whose path must end in .jsonl.gz."""
    overwrite: bool = False
    """Replace an older table or file of trajectories. Anything else is refused."""

    def __post_init__(self) -> None:
        if self.out.exists() and not self.overwrite:
            raise ConfigError("out", str(self.out), "it is there already; choose another, or give --overwrite")
        if self.out.is_dir() == (self.out.suffix in (PARQUET, ".gz")) and self.out.exists():
            raise ConfigError("out", str(self.out), "a file and a folder do not replace each other; choose another")
        if self.overwrite:
            validate_no_inputs_inside("out", self.out, [("source", str(self.source))])


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    config = parse(ExportConfig, "export", argv)
    back = is_table(config.source)
    if back != config.out.name.endswith(_OURS):
        told = f"a table becomes a file of trajectories; let it end in {_OURS}"
        other = f"trajectories become a table; end it in {PARQUET}, or name a folder"
        raise ConfigError("out", str(config.out), told if back else other)
    # If a table was just restored after an interrupted replacement, check again whether it may be replaced.
    if restore_backup(config.out, TABLE):
        config = replace(config)
    out = config.out if back or config.out.suffix == PARQUET else resolve_link("out", config.out)
    if not back:
        validate_table_target(out)
    elif is_stream(out, "out"):
        raise ConfigError("out", str(out), "workspaces are stored next to trajectories; name a file, no pipe or device")
    else:
        validate_replaceable_file("out", out, is_step_file)
    with catch_os_errors("out", config.out, then=", then give the command again"):
        count = _import_table(config.source, out) if back else _export_trajectories(config.source, out)
    print(f"{config.out}: {count} trajectories")
    return 0


def _export_trajectories(source: Path, out: Path) -> int:
    """Write the trajectories of `source` as a table, and return their number."""
    store = Store(source)
    if not store.ids:
        remedy = "it has no trajectories: a run stores them after its first step; wait for that, or give another source"
        raise ConfigError("source", str(store.source), remedy)
    count = write_table(store, out)
    for each in store.damaged_regions:
        print(f"repl-rl: not readable, and left out: {each}", file=sys.stderr)
    return count


def _import_table(source: Path, out: Path) -> int:
    """Write the trajectories of a table to a file, and return their number."""
    with open_table(source) as table, write_named(out, "out") as torn:
        append_records(torn, table.entries)
    for name in table.extra_columns:
        print(f"repl-rl: column {name!r} is no part of a trajectory, and left out", file=sys.stderr)
    return table.row_count
