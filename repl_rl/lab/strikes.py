"""The faults that `bench faults` knows: how each strikes a run, and how the run is promised to take it."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from repl_rl.machine.processes import descendants
from repl_rl.sandbox.docker import OWNER

_KIB = 1024
_WRITTEN_S = 60.0
"""How long a step's state may be on its way to the disk."""
_BORN_S = 120.0
"""How long a process that was killed may take to be there again."""
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Victim:
    """A run under way."""

    pid: int
    folder: Path
    dice: Random


def _always() -> str:
    return ""


def _nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault."""

    about: str
    """What the run has done where it survived."""
    blow: Callable[[Victim], str]
    """Let it happen. Returns why it could not; "": it has."""
    codes: Sequence[int] = ()
    """How the run may end of it; none: it goes on by itself."""
    engine: str = ""
    """What samples; "": what the user says."""
    sandbox: str = "local"
    within_s: float = 2.0
    """The longest time from a step's end to the blow."""
    missing: Callable[[], str] = _always
    """Why it cannot be tried here; "": it can."""
    mend: Callable[[Path], None] = _nothing
    """Take its cause away again, from the run's folder."""

    @property
    def resumes(self) -> bool:
        """The run ends, and is given again."""
        return bool(self.codes)


def _signals(number: signal.Signals) -> Callable[[Victim], str]:
    def blow(victim: Victim) -> str:
        os.kill(victim.pid, number)
        return ""

    return blow


def _named(family: int, name: str) -> int | None:
    """The first of a process's own whose command begins so; None: there is none now."""
    for pid in descendants(family):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
        except OSError:  # it has just ended
            continue
        if Path(command).name.startswith(name):
            return pid
    return None


def _kills(name: str) -> Callable[[Victim], str]:
    """SIGKILL to a process of that name, as soon as there is one: what died of the strike before may not have been
    missed yet, or be on its way."""

    def blow(victim: Victim) -> str:
        deadline = time.monotonic() + _BORN_S
        while (pid := _named(victim.pid, name)) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if pid is None:
            return f"it has no process {name}"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return ""

    return blow


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _without_docker() -> str:
    try:
        return "" if _docker("info", "--format", "{{.ServerVersion}}").strip() else "no Docker daemon answers"
    except (OSError, subprocess.TimeoutExpired):
        return "there is no program docker"


def _kill_container(victim: Victim) -> str:
    mine = _docker("ps", "-q", "--filter", f"label={OWNER}={victim.pid}").split()
    if not mine:
        return "it has no container"
    return "" if _docker("kill", victim.dice.choice(mine)) else "its container could not be killed"


def _kill_and_tear(victim: Victim) -> str:
    states, deadline = victim.folder / "states", time.monotonic() + _WRITTEN_S
    while len(_states(states)) < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    os.kill(victim.pid, signal.SIGKILL)
    return tear(states, victim.dice)


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def tear(folder: Path, dice: Random) -> str:
    """Cut or change a file of the newest state in `folder`, at a random place. Returns why that would be no test."""
    states = _states(folder)
    if len(states) < 2:
        return f"it had {len(states)} states, and none before the newest"
    file = dice.choice(sorted(path for path in states[-1].iterdir() if path.stat().st_size))
    content = bytearray(file.read_bytes())
    at = dice.randrange(len(content))
    if dice.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 + dice.randrange(255)
    file.write_bytes(content)
    return ""


def _small_disk(victim: Victim) -> str:
    """Put a disk over the run's states on which part of one has room."""
    place = victim.folder / "states"
    size = victim.dice.randrange(64 * _KIB, 4096 * _KIB)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True
    )
    return done.stderr.strip()


def _unmount(folder: Path) -> None:
    if os.path.ismount(folder / "states"):
        subprocess.run(["umount", "-l", str(folder / "states")], capture_output=True)


def _without_root() -> str:
    return "" if os.geteuid() == 0 else "only root can mount a small disk"


STRIKES: Mapping[str, Strike] = {
    "sigkill": Strike("gone on with after SIGKILL", _signals(signal.SIGKILL), codes=(-signal.SIGKILL,)),
    "sigterm": Strike("gone on with after SIGTERM", _signals(signal.SIGTERM), codes=(128 + signal.SIGTERM,)),
    "engine": Strike("another engine was opened", _kills("VLLM::EngineCore"), engine="vllm"),
    "fork-server": Strike("another fork server was started", _kills("bwrap")),
    "container": Strike("another container was started", _kill_container, sandbox="docker", missing=_without_docker),
    "disk": Strike("gone on with once there was room", _small_disk, codes=(2,), missing=_without_root, mend=_unmount),
    "torn-state": Strike("the state before the torn one was taken", _kill_and_tear, codes=(-signal.SIGKILL,)),
}
"""By the names that the command line has for them."""
