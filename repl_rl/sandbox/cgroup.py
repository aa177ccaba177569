"""A control group of one sandbox, where this process may make one: memory and CPU of all its consoles together.

Version 2 is used where the group that this process is in, or one above it, may be written to and hands `memory` on;
version 1 where the groups that this process is in may be written to, which needs root.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from repl_rl.machine.cores import cores

_PREFIX = "repl-rl-"
_SHARE = 2
"""The consoles of a sandbox may use one part in so many of the memory that there is."""
_PERIOD_US = 100_000
_SHARES_PER_CORE = 1024
_REMOVED_WITHIN_S, _PAUSE_S = 2.0, 0.02
_JOIN = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 1; shift; done; shift; exec "$@"'
_REMEDY = "start the command with: systemd-run --user --scope"


class NoGroup(Exception):
    """None can be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group, which is one folder in version 2 and one for each controller in version 1."""

    folders: tuple[Path, ...]
    memory_bytes: int
    cores: int
    """0: CPU is not bounded."""
    locks: list[int] = field(default_factory=list, compare=False)
    """Locked descriptors of the folders, open while their owner lives. `_sweep` removes unlocked folders only."""

    @property
    def about(self) -> str:
        """What it bounds, in words."""
        cpu = f" and {self.cores} cores" if self.cores else ", CPU by nothing"
        return f"a cgroup bounds its consoles together to {self.memory_bytes / 2**30:.1f} GiB{cpu}"

    def joining(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` within the group."""
        files = [str(folder / "cgroup.procs") for folder in self.folders]
        return ["/bin/sh", "-c", _JOIN, "sh", *files, "--", *argv]

    async def remove(self) -> None:
        """Remove it, as soon as its last process has ended. The kernel tells of that in version 2 only, so it polls."""
        deadline = asyncio.get_running_loop().time() + _REMOVED_WITHIN_S
        try:
            while left := [folder for folder in self.folders if not _removed(folder)]:
                if asyncio.get_running_loop().time() > deadline:
                    return  # the next sandbox of this machine sweeps it
                for folder in left:
                    with contextlib.suppress(OSError):
                        (folder / "cgroup.kill").write_text("1")
                await asyncio.sleep(_PAUSE_S)
        finally:
            _unlock(self.locks)


def make_group() -> ControlGroup:
    """A new group, empty, next to those of other sandboxes.

    Raises:
        NoGroup: none can be made here.
    """
    version, parents = _parents()
    # Containers may share the folder and not the numbers of their processes.
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    made: list[Path] = []
    locks: list[int] = []
    try:
        for parent in dict.fromkeys(parents.values()):
            _sweep(parent)
            made.append(parent / name)
            locks.append(_make_locked(parent / name))
        memory_bytes = _memory_bytes(parents["memory"]) // _SHARE
        group = ControlGroup(tuple(made), memory_bytes, cores() if "cpu" in parents else 0, locks)
        _bound(version, {kind: parent / name for kind, parent in parents.items()}, group)
        subprocess.run(group.joining(["true"]), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        for folder in made:
            _removed(folder)
        _unlock(locks)
        raise NoGroup(f"no cgroup bounds its consoles: {error}") from error
    return group


def _bound(version: int, folders: Mapping[str, Path], group: ControlGroup) -> None:
    memory = str(group.memory_bytes)
    quota_us = group.cores * _PERIOD_US
    if version == 2:
        (folders["memory"] / "memory.max").write_text(memory)
        _write_if_there(folders["memory"] / "memory.swap.max", "0")
        if "cpu" in folders:
            (folders["cpu"] / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        return
    (folders["memory"] / "memory.limit_in_bytes").write_text(memory)
    _write_if_there(folders["memory"] / "memory.memsw.limit_in_bytes", memory)
    if "cpu" in folders:
        (folders["cpu"] / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folders["cpu"] / "cpu.cfs_quota_us").write_text(str(quota_us))
        # Next to the threads of this process, each of which has the weight of a whole group.
        (folders["cpu"] / "cpu.shares").write_text(str(group.cores * _SHARES_PER_CORE))


def _write_if_there(file: Path, text: str) -> None:
    if file.exists():
        file.write_text(text)


def _parents() -> tuple[int, dict[str, Path]]:
    """The version, and where a group can be made, for each controller that there is.

    Raises:
        NoGroup: nowhere.
    """
    own = _own_folders()
    if "memory" in own:
        folders = {kind: folder for kind, folder in own.items() if kind in ("memory", "cpu")}
        for folder in folders.values():
            if not os.access(folder, os.W_OK):
                raise NoGroup(f"no cgroup bounds its consoles: {folder} may not be written to; run it as root")
        return 1, folders
    if "" not in own:
        raise NoGroup("no cgroup bounds its consoles: no hierarchy with the controller memory is mounted")
    for folder in (own[""], *own[""].parents):
        if not os.access(folder / "cgroup.procs", os.W_OK) or not os.access(folder, os.W_OK):
            continue
        handed_on = (folder / "cgroup.subtree_control").read_text().split()
        if "memory" in handed_on:
            return 2, {kind: folder for kind in handed_on if kind in ("memory", "cpu")}
    raise NoGroup(f"no cgroup bounds its consoles: none is delegated to this process, which is in {own['']}; {_REMEDY}")


def _own_folders() -> dict[str, Path]:
    """The folder of the group that this process is in, for each controller of version 1; "" names version 2."""
    mounts: dict[str, tuple[str, Path]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, place = before.split(" ")[3:5]
        if kind == "cgroup2":
            mounts.setdefault("", (root, Path(place)))
        elif kind == "cgroup":
            for option in options.rpartition(" ")[2].split(","):
                mounts.setdefault(option, (root, Path(place)))
    folders = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        for kind in kinds.split(","):
            if kind not in mounts:
                continue
            root, mount = mounts[kind]
            if (path + "/").startswith(root.rstrip("/") + "/"):
                folders[kind] = mount / path.removeprefix(root.rstrip("/")).lstrip("/")
    return folders


def _memory_bytes(folder: Path) -> int:
    """Memory of this machine, or less where a group at or above `folder` has less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for above in (folder, *folder.parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                found.append(int((above / name).read_text()))
    return min(found)


def _make_locked(folder: Path) -> int:
    """Make a folder and lock it. Return the lock's descriptor, which `exec` closes."""
    while True:
        folder.mkdir(exist_ok=True)
        # Another process's sweep may take the folder before it is locked.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = _lock(folder)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int:
    """Lock a folder for this process. The lock ends with its process, whichever container that is in.

    Raises:
        BlockingIOError: another process has it.
        FileNotFoundError: it is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unlock(locks: list[int]) -> None:
    while locks:
        os.close(locks.pop())


def _sweep(parent: Path) -> None:
    """Remove folders of killed processes."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        # Locked, gone, or another user's: none of these may keep this process from a group of its own.
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            try:
                _removed(folder)
            finally:
                os.close(descriptor)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # processes are in it
        return False
    return True
