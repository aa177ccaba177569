"""Fault injection for `bench faults`: the known faults, how each is caused, and how a run must react."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from repl_rl.sandbox.docker import OWNER
from repl_rl.utils.processes import list_descendants

_KIB = 1024
_WRITTEN_S = 60.0
"""Timeout for a step's state to be written, seconds."""
_BORN_S = 120.0
"""Timeout for the restart of a killed process, seconds."""
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Victim:
    """Running training that gets a fault."""

    pid: int
    folder: Path
    dice: Random


def _always() -> str:
    return ""


def _nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Strike:
    """Fault that can be injected into a run."""

    about: str
    """Description of the reaction of a run that survived."""
    blow: Callable[[Victim], str]
    """Function that causes the fault. Returns the reason if it could not, else ""."""
    codes: Sequence[int] = ()
    """Exit codes that the fault may cause; empty means that the run continues by itself."""
    engine: str = ""
    """Engine of the run; "" means the user's choice."""
    sandbox: str = "local"
    within_s: float = 2.0
    """Longest time between the end of a step and the fault, seconds."""
    missing: Callable[[], str] = _always
    """Function that returns the reason why the fault cannot be injected here, or ""."""
    mend: Callable[[Path], None] = _nothing
    """Function that removes the cause, given the run's folder."""

    @property
    def resumes(self) -> bool:
        """True if the run ends and has to be resumed."""
        return bool(self.codes)


def _signals(number: signal.Signals) -> Callable[[Victim], str]:
    def blow(victim: Victim) -> str:
        os.kill(victim.pid, number)
        return ""

    return blow


def _named(family: int, name: str) -> int | None:
    """Return the first descendant of `family` whose command begins with `name`, or None."""
    for pid in list_descendants(family):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
        # The process has just ended.
        except OSError:
            continue
        if Path(command).name.startswith(name):
            return pid
    return None


def _kills(name: str) -> Callable[[Victim], str]:
    """Return a fault that sends SIGKILL to a process of that name as soon as one runs.

    After an earlier fault the dead process may not be noticed yet, or its replacement may still start.
    """

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
    # Wait for two states, so that an intact one remains.
    while len(_states(states)) < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    os.kill(victim.pid, signal.SIGKILL)
    return tear(states, victim.dice)


def _states(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.isdigit())


def tear(folder: Path, dice: Random) -> str:
    """Truncate or change a file of the newest state in `folder` at a random offset.

    Return a reason if that tests nothing.
    """
    states = _states(folder)
    if len(states) < 2:
        return f"it had {len(states)} states, and none before the newest"
    file = dice.choice(sorted(path for path in states[-1].iterdir() if path.stat().st_size))
    content = bytearray(file.read_bytes())
    at = dice.randrange(len(content))
    # Half of the time truncate the file, else flip bits of one byte.
    if dice.random() < 0.5:
        del content[at:]
    else:
        content[at] ^= 1 + dice.randrange(255)
    file.write_bytes(content)
    return ""


def _small_disk(victim: Victim) -> str:
    """Mount a small disk over the run's states, which has room for part of one."""
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
"""Faults by their names on the command line."""
