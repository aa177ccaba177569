"""`repl-rl export SOURCE --out PLACE`: convert trajectories to a table for other trainers, and back."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tyro.conf import Positional

from repl_rl.errors import ConfigError
from repl_rl.machine.files import is_stream, write_named
from repl_rl.machine.folders import restore
from repl_rl.machine.outputs import followed, refuse_inputs, refuse_other_file
from repl_rl.machine.refused import writing
from repl_rl.runs.store import Store, append, is_step_file
from repl_rl.runs.store.table import PARQUET, TABLE, is_table, open_table, refuse_other_table, write_table
from repl_rl.settings.arguments import parse

_OURS = ".jsonl.gz"


@dataclass(frozen=True)
class ExportConfig:
    """Convert trajectories to a table of the library `datasets`, or such a table back to trajectories."""

    source: Positional[Path]
    """Run folder, trajectories folder or one of its files; or a table that this command wrote."""
    out: Path
    """Path to write. A table becomes one file if the path ends in .parquet, else a folder for datasets.load_from_disk.
    From a table, the path is a file of trajectories and ends in .jsonl.gz."""
    overwrite: bool = False
    """Replace an older table or file of trajectories. Anything else is refused."""

    def __post_init__(self) -> None:
        if self.out.exists() and not self.overwrite:
            raise ConfigError("out", str(self.out), "it is there already; choose another, or give --overwrite")
        if self.out.is_dir() == (self.out.suffix in (PARQUET, ".gz")) and self.out.exists():
            raise ConfigError("out", str(self.out), "a file and a folder do not replace each other; choose another")
        if self.overwrite:
            refuse_inputs("out", self.out, [("source", str(self.source))])


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    config = parse(ExportConfig, "export", argv)
    back = is_table(config.source)
    if back != config.out.name.endswith(_OURS):
        told = f"a table becomes a file of trajectories; let it end in {_OURS}"
        other = f"trajectories become a table; end it in {PARQUET}, or name a folder"
        raise ConfigError("out", str(config.out), told if back else other)
    # If a table was just restored after an interrupted replacement, check again whether it may be replaced.
    if restore(config.out, TABLE):
        config = replace(config)
    out = config.out if back or config.out.suffix == PARQUET else followed("out", config.out)
    if not back:
        refuse_other_table(out)
    elif is_stream(out, "out"):
        raise ConfigError("out", str(out), "workspaces are stored next to trajectories; name a file, no pipe or device")
    else:
        refuse_other_file("out", out, is_step_file)
    with writing("out", config.out, then=", then give the command again"):
        count = _import(config.source, out) if back else _export(config.source, out)
    print(f"{config.out}: {count} trajectories")
    return 0


def _export(source: Path, out: Path) -> int:
    store = Store(source)
    if not store.ids:
        raise ConfigError("trajectories", str(store.source), "there are none; give another folder or file")
    count = write_table(store, out)
    for each in store.damage:
        print(f"repl-rl: not readable, and left out: {each}", file=sys.stderr)
    return count


def _import(source: Path, out: Path) -> int:
    with open_table(source) as table, write_named(out, "out") as torn:
        append(torn, table.entries)
    for name in table.others:
        print(f"repl-rl: column {name!r} is no part of a trajectory, and left out", file=sys.stderr)
    return table.rows
