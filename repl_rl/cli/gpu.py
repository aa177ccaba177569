"""`repl-rl doctor --gpu`: the checks of `lab/gpu.py` on the first GPU, as a table and as JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from repl_rl.cli.terminal import terminal
from repl_rl.errors import ConfigError
from repl_rl.lab.gpu import CHECKS, Check, Row, Verdict, report, run_checks
from repl_rl.machine.files import Json
from repl_rl.machine.refused import writing


def try_gpu(file: Path | None) -> int:
    """Run every check on the first GPU. Returns the exit code: 1 where one failed.

    Raises:
        ConfigError: there is no GPU, or nothing can be written there.
    """
    import torch  # heavy: only for this option

    if not torch.cuda.is_available():
        remedy = "PyTorch sees none here; run this on a machine with one, with a PyTorch that was built for CUDA"
        raise ConfigError("CUDA devices", 0, remedy)
    return try_on("cuda:0", CHECKS, file)


def try_on(device: str, checks: Sequence[Check], file: Path | None) -> int:
    """Run `checks` on `device`, print them, and write them to `file`. Returns the exit code.

    Raises:
        ConfigError: nothing can be written there.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError("json", str(file), "there is no such folder; give a file in one that exists")
    rows = run_checks(device, checks, lambda line: print(line, file=sys.stderr, flush=True))
    terminal().print(table(rows))
    if file is not None:
        made = {"made": datetime.now(UTC).isoformat(timespec="seconds"), **report(device, rows)}
        with writing("file", file):
            file.write_text(json.dumps(made, indent=2) + "\n")
    return int(any(row.verdict is Verdict.FAILED for row in rows))


def table(rows: Sequence[Row]) -> Table:
    """A row a check."""
    shown = Table("check", "verdict", "figures, or why", "s")
    for row in rows:
        shown.add_row(row.name, row.verdict, row.why or told(row.figures), f"{row.seconds:.0f}")
    return shown


def told(figures: Mapping[str, Json]) -> str:
    """Figures in a line."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )
