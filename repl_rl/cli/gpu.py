"""`repl-rl doctor --gpu`: run the checks of `lab/gpu.py` on the first GPU, and print them as a table or JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from repl_rl.cli.terminal import terminal
from repl_rl.errors import ConfigError
from repl_rl.lab.gpu import CHECKS, Check, Row, Verdict, report, run_checks
from repl_rl.machine.files import Json, write_named
from repl_rl.machine.refused import writing


def try_gpu(file: Path | None, only: Sequence[str] = ()) -> int:
    """Run every check on the first GPU, or those with one of `only` in their names.

    Returns:
        The exit code: 1 if any check failed.

    Raises:
        ConfigError: this machine has no GPU, a check does not exist, or the file cannot be written.
    """
    checks = chosen(CHECKS, only)
    # torch is slow to import, so it is imported only for this option.
    import torch

    if not torch.cuda.is_available():
        remedy = "PyTorch sees none here; run this on a machine with one, with a PyTorch that was built for CUDA"
        raise ConfigError("CUDA devices", 0, remedy)
    return try_on("cuda:0", checks, file)


def chosen(checks: Sequence[Check], only: Sequence[str]) -> Sequence[Check]:
    """Return the checks with one of `only` in their names, or all if `only` is empty.

    Raises:
        ConfigError: no check has one of them in its name.
    """
    for part in only:
        if not any(part in check.name for check in checks):
            raise ConfigError(
                "only", part, f"no check has it in its name; they are: {'; '.join(c.name for c in checks)}"
            )
    return [check for check in checks if not only or any(part in check.name for part in only)]


def try_on(device: str, checks: Sequence[Check], file: Path | None) -> int:
    """Run `checks` on `device`, print the results, and write `file` after each check. Return the exit code.

    Rows of other checks in the file stay.

    Raises:
        ConfigError: the file cannot be written, is of another device, or has another format.
    """
    kept = _kept(device, checks, file)

    def tell(rows: Sequence[Row]) -> None:
        row = rows[-1]
        why = f": {row.why}" if row.why else ""
        print(f"{row.name}: {row.verdict}{why} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
        # Write after every check: a rented GPU machine may be lost before the last one.
        if file is not None:
            with writing("file", file), write_named(file) as place:
                place.write_text(json.dumps(report(device, rows, kept), indent=2) + "\n", encoding="utf-8")

    rows = run_checks(device, checks, tell)
    terminal().print(table(rows))
    return int(any(row.verdict is Verdict.FAILED for row in rows))


def _kept(device: str, checks: Sequence[Check], file: Path | None) -> list[dict[str, Json]]:
    """Return the rows of other checks in the file, or none if it does not exist yet."""
    if file is None:
        return []
    if not file.absolute().parent.is_dir():
        raise ConfigError("json", str(file), "there is no such folder; give a file in one that exists")
    if not file.exists():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        rows, before = list(found["rows"]), found["device"]
        # Checks that run now replace their older rows.
        mine = {check.name for check in checks}
        kept = [row for row in rows if row["name"] not in mine]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError("json", str(file), "it is not what this command writes; give another file") from error
    if kept and before != device:
        raise ConfigError("json", str(file), f"its rows are of {before}, these would be of {device}; give another file")
    return kept


def table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per check."""
    shown = Table("check", "verdict", "figures, or why", "s")
    for row in rows:
        shown.add_row(row.name, row.verdict, row.why or told(row.figures), f"{row.seconds:.0f}")
    return shown


def told(figures: Mapping[str, Json]) -> str:
    """Format metrics as one line."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )
