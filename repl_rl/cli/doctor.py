"""`repl-rl doctor`: check what works on this machine, and name a remedy for what does not.

With `--gpu`, it runs the checks of `repl_rl.doctor_gpu` on the first GPU instead. The results are printed as a
table, and written to a JSON file if one is named.
"""

import asyncio
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from repl_rl.cli.terminal_output import make_terminal
from repl_rl.doctor_gpu import CHECKS, Check, Row, Verdict, build_report, run_checks
from repl_rl.engine import ENGINES
from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.rollout_config import RolloutConfig
from repl_rl.sandbox import SANDBOXES
from repl_rl.settings.argument_parser import parse
from repl_rl.utils.atomic_files import Json, write_named
from repl_rl.utils.describe_os_errors import catch_os_errors
from repl_rl.utils.hardware import count_cores
from repl_rl.utils.installed_versions import find_broken_companions, get_version


@dataclass(frozen=True)
class DoctorConfig:
    """Check this machine. The exit code is 0 if the bundled run would work (--gpu: if no check failed), else 1."""

    gpu: bool = False
    """Run the checks that need a GPU on the first one: both engines, weight syncs, number formats, sleep, adapters, a
    short training. They take at most 15 minutes."""
    json: Path | None = None
    """File for the results of --gpu. Without it they are only printed."""
    only: tuple[str, ...] = ()
    """Substrings of check names: --gpu runs only checks whose name contains one of them. Default: all checks. Results
    of other checks in the --json file are kept."""

    def __post_init__(self) -> None:
        if self.json is not None and not self.gpu:
            raise ConfigError("json", str(self.json), "only what --gpu finds is written; add --gpu, or leave it out")
        if self.only and not self.gpu:
            raise ConfigError("only", " ".join(self.only), "it chooses among the checks of --gpu; add that")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    thing: str
    found: str
    remedy: str = ""
    """Suggested remedy, or "" if none is needed."""
    required: bool = False
    """True if the bundled run does not work without it."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    config = parse(DoctorConfig, "doctor", argv)
    if config.gpu:
        return run_gpu_checks(config.json, config.only)
    # Check each part, in the order of the table.
    findings = [
        _check_python(),
        _check_torch(),
        *_check_engines(),
        _check_trainer(),
        _check_imports(),
        *_check_sandboxes(),
        _check_ray(),
        _check_memory(),
    ]
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        mark = "ok" if not finding.remedy else ("MISSING" if finding.required else "-")
        table.add_row(mark, finding.thing, finding.found, finding.remedy)
    make_terminal().print(table)
    return int(any(finding.required and finding.remedy for finding in findings))


def _check_python() -> Finding:
    return Finding("Python", f"{platform.python_version()} on {count_cores()} cores ({sys.executable})")


def _check_torch() -> Finding:
    version = _get_package_version("torch")
    if version is None:
        return Finding("torch", "missing", "pip install torch", required=True)
    # torch is slow to import, so it is imported only for this line of the table.
    import torch

    return Finding("torch", f"{version}, {torch.cuda.device_count()} CUDA devices")


def _check_engines() -> list[Finding]:
    """Check each engine. The bundled run needs the default one."""
    found, default = [], RolloutConfig()
    for name, kind in ENGINES.entries.items():
        required = kind is type(default.engine)
        try:
            found.append(Finding(f"engine {name}", kind().describe_status(), required=required))
        except ConfigError as error:
            found.append(Finding(f"engine {name}", "missing", str(error).rpartition("; ")[2], required))
    return found


def _check_trainer() -> Finding:
    names = ("transformers", "trl", "accelerate", "jupyter_client", "ipykernel")
    versions = {name: _get_package_version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Finding("trainer", found, f"pip install {' '.join(missing)}" if missing else "", required=bool(missing))


def _check_imports() -> Finding:
    broken = find_broken_companions()
    remedy = "python -m repl_rl.utils.installed_versions --fix" if broken else ""
    return Finding(
        "media packages", f"{', '.join(broken)} cannot be imported" if broken else "none broken", remedy, True
    )


def _check_sandboxes() -> list[Finding]:
    """Check each sandbox that isolates. The bundled run needs the default one."""
    found, default = [], RolloutConfig()
    for name, kind in SANDBOXES.entries.items():
        if not kind.isolates:
            continue
        required = kind is type(default.sandbox)
        try:
            found.append(Finding(f"sandbox {name}", asyncio.run(kind().describe_status()), required=required))
        except SandboxUnavailable as error:
            # The message has the form "sandbox 'NAME': problem; remedy".
            problem, _, remedy = str(error).removeprefix(f"sandbox {name!r}: ").rpartition("; ")
            found.append(Finding(f"sandbox {name}", problem, remedy, required))
    return found


def _check_ray() -> Finding:
    version = _get_package_version("ray")
    if version is None:
        return Finding("fleet ray", "missing", "pip install 'repl_rl[ray]'")
    return Finding("fleet ray", f"ray {version}")


def _check_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    remedy = "" if free > 2**28 else "give /dev/shm at least 256 MiB: weights pass through it"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free", remedy)


def _get_package_version(package: str) -> str | None:
    return get_version(package) if importlib.util.find_spec(package.replace("-", "_")) else None


def run_gpu_checks(file: Path | None, only: Sequence[str] = ()) -> int:
    """Run every check on the first GPU, or those with one of `only` in their names.

    Returns:
        The exit code: 1 if any check failed.

    Raises:
        ConfigError: this machine has no GPU, a check does not exist, or the file cannot be written.
    """
    checks = select_checks(CHECKS, only)
    # torch is slow to import, so it is imported only for this option.
    import torch

    if not torch.cuda.is_available():
        remedy = "PyTorch sees none here; run this on a machine with one, with a PyTorch that was built for CUDA"
        raise ConfigError("CUDA devices", 0, remedy)
    return run_checks_on("cuda:0", checks, file)


def select_checks(checks: Sequence[Check], only: Sequence[str]) -> Sequence[Check]:
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


def run_checks_on(device: str, checks: Sequence[Check], file: Path | None) -> int:
    """Run `checks` on `device`, print the results, and write `file` after each check. Return the exit code.

    Rows of other checks in the file stay.

    Raises:
        ConfigError: the file cannot be written, is of another device, or has another format.
    """
    kept = _read_other_rows(device, checks, file)

    def show_rows(rows: Sequence[Row]) -> None:
        row = rows[-1]
        why = f": {row.why}" if row.why else ""
        print(f"{row.name}: {row.verdict}{why} ({row.seconds:.0f} s)", file=sys.stderr, flush=True)
        # Write after every check: a rented GPU machine may be lost before the last one.
        if file is not None:
            with catch_os_errors("file", file), write_named(file) as place:
                place.write_text(json.dumps(build_report(device, rows, kept), indent=2) + "\n", encoding="utf-8")

    rows = run_checks(device, checks, show_rows)
    make_terminal().print(build_table(rows))
    return int(any(row.verdict is Verdict.FAILED for row in rows))


def build_table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per check."""
    shown = Table("check", "verdict", "figures, or why", "s")
    for row in rows:
        shown.add_row(row.name, row.verdict, row.why or format_figures(row.figures), f"{row.seconds:.0f}")
    return shown


def format_figures(figures: Mapping[str, Json]) -> str:
    """Format metrics as one line."""
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def _read_other_rows(device: str, checks: Sequence[Check], file: Path | None) -> list[dict[str, Json]]:
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
