"""`repl-rl doctor`: check what works on this machine, and name a remedy for what does not."""

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from repl_rl.cli.gpu import try_gpu
from repl_rl.cli.terminal import terminal
from repl_rl.engine import ENGINES
from repl_rl.engine.preflight import broken_companions
from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.machine.cores import cores
from repl_rl.machine.versions import installed
from repl_rl.sandbox import SANDBOXES
from repl_rl.settings.arguments import parse
from repl_rl.world import World


@dataclass(frozen=True)
class DoctorConfig:
    """Check this machine. The exit code is 0 if the bundled run would work (--gpu: if no check failed), else 1."""

    gpu: bool = False
    """Run the checks that need a GPU on the first one: both engines, weight syncs, number formats, sleep, adapters, a
    short training. They take at most 15 minutes."""
    json: Path | None = None
    """File for the results of --gpu. Without it they are only printed."""
    only: tuple[str, ...] = ()
    """Parts of names that select the checks of --gpu. Rows of other checks in the file stay. Default: all checks."""

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
        return try_gpu(config.json, config.only)
    findings = [_python(), _torch(), *_engines(), _trainer(), _imports(), *_sandboxes(), _fleet(), _memory()]
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        mark = "ok" if not finding.remedy else ("MISSING" if finding.required else "-")
        table.add_row(mark, finding.thing, finding.found, finding.remedy)
    terminal().print(table)
    return int(any(finding.required and finding.remedy for finding in findings))


def _version(package: str) -> str | None:
    return installed(package) if importlib.util.find_spec(package.replace("-", "_")) else None


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} on {cores()} cores ({sys.executable})")


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "missing", "pip install torch", required=True)
    # torch is slow to import, so it is imported only for this line of the table.
    import torch

    return Finding("torch", f"{version}, {torch.cuda.device_count()} CUDA devices")


def _trainer() -> Finding:
    names = ("transformers", "trl", "accelerate", "jupyter_client", "ipykernel")
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Finding("trainer", found, f"pip install {' '.join(missing)}" if missing else "", required=bool(missing))


def _imports() -> Finding:
    broken = broken_companions()
    remedy = "python -m repl_rl.engine.preflight --fix" if broken else ""
    return Finding(
        "media packages", f"{', '.join(broken)} cannot be imported" if broken else "none broken", remedy, True
    )


def _engines() -> list[Finding]:
    """Check each engine. The bundled run needs the default one."""
    found, default = [], World()
    for name, kind in ENGINES.kinds.items():
        required = kind is type(default.engine)
        try:
            found.append(Finding(f"engine {name}", kind().doctor(), required=required))
        except ConfigError as error:
            found.append(Finding(f"engine {name}", "missing", str(error).rpartition("; ")[2], required))
    return found


def _sandboxes() -> list[Finding]:
    """Check each sandbox that isolates. The bundled run needs the default one."""
    found, default = [], World()
    for name, kind in SANDBOXES.kinds.items():
        if not kind.isolates:
            continue
        required = kind is type(default.sandbox)
        try:
            found.append(Finding(f"sandbox {name}", asyncio.run(kind().doctor()), required=required))
        except SandboxUnavailable as error:
            # The message has the form "sandbox 'NAME': problem; remedy".
            problem, _, remedy = str(error).removeprefix(f"sandbox {name!r}: ").rpartition("; ")
            found.append(Finding(f"sandbox {name}", problem, remedy, required))
    return found


def _fleet() -> Finding:
    version = _version("ray")
    if version is None:
        return Finding("fleet ray", "missing", "pip install 'repl_rl[ray]'")
    return Finding("fleet ray", f"ray {version}")


def _memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    remedy = "" if free > 2**28 else "give /dev/shm at least 256 MiB: weights pass through it"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free", remedy)
