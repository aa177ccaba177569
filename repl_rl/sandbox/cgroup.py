"""Control group that limits the memory and CPU of all consoles of a sandbox together.

Version 2 requires write access to a group that delegates the `memory` controller: this process's group or an ancestor.
Version 1 requires write access to the groups of this process, which needs root.
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

from repl_rl.utils.hardware import count_cores

_PREFIX = "repl-rl-"
_SHARE = 2
"""Divisor of the available memory: a sandbox's consoles together may use 1/`_SHARE` of it."""
_PERIOD_US = 100_000
_SHARES_PER_CORE = 1024
_REMOVE_TIMEOUT_S, _POLL_S = 2.0, 0.02
# Shell script: write its own process number to each file before `--`, then become the command after it.
_JOIN = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 1; shift; done; shift; exec "$@"'
_REMEDY = "start the command with: systemd-run --user --scope"


class CgroupUnavailable(Exception):
    """No control group can be made here. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Control group: one folder in version 2, one folder per controller in version 1."""

    folders: tuple[Path, ...]
    memory_bytes: int
    cores: int
    """CPU limit, in cores. 0 means that CPU is not limited."""
    locks: list[int] = field(default_factory=list, compare=False)
    """Locked descriptors of the folders, open while the owner lives. `_remove_stale_groups` removes only unlocked
    folders."""

    @property
    def describe(self) -> str:
        """Description of the limits, for a status message."""
        cpu = f" and {self.cores} cores" if self.cores else ", CPU by nothing"
        return f"a cgroup bounds its consoles together to {self.memory_bytes / 2**30:.1f} GiB{cpu}"

    def wrap_command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` within the group."""
        files = [str(folder / "cgroup.procs") for folder in self.folders]
        return ["/bin/sh", "-c", _JOIN, "sh", *files, "--", *argv]

    async def remove(self) -> None:
        """Remove the group as soon as it is empty. It polls, because only version 2 reports the end of the last
        process."""
        deadline = asyncio.get_running_loop().time() + _REMOVE_TIMEOUT_S
        try:
            while remaining := [folder for folder in self.folders if not _try_remove(folder)]:
                if asyncio.get_running_loop().time() > deadline:
                    # The next sandbox on this machine removes the folder.
                    return
                for folder in remaining:
                    with contextlib.suppress(OSError):
                        (folder / "cgroup.kill").write_text("1")
                await asyncio.sleep(_POLL_S)
        finally:
            _unlock(self.locks)


def create_group() -> ControlGroup:
    """Create an empty group next to those of other sandboxes.

    Raises:
        CgroupUnavailable: no group can be made here.
    """
    version, parents = _find_parent_groups()
    # Containers may share the parent folder, but not their process numbers, so the number alone is not unique.
    name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    created: list[Path] = []
    locks: list[int] = []
    try:
        for parent in dict.fromkeys(parents.values()):
            _remove_stale_groups(parent)
            created.append(parent / name)
            locks.append(_make_locked(parent / name))
        memory_bytes = _read_available_memory(parents["memory"]) // _SHARE
        group = ControlGroup(tuple(created), memory_bytes, count_cores() if "cpu" in parents else 0, locks)
        _write_limits(version, {controller: parent / name for controller, parent in parents.items()}, group)
        # Check that a process can join the group.
        subprocess.run(group.wrap_command(["true"]), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        for folder in created:
            _try_remove(folder)
        _unlock(locks)
        raise CgroupUnavailable(f"no cgroup bounds its consoles: {error}") from error
    return group


def _write_limits(version: int, folders: Mapping[str, Path], group: ControlGroup) -> None:
    memory = str(group.memory_bytes)
    quota_us = group.cores * _PERIOD_US
    if version == 2:
        (folders["memory"] / "memory.max").write_text(memory)
        _write_if_exists(folders["memory"] / "memory.swap.max", "0")
        if "cpu" in folders:
            (folders["cpu"] / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        return
    (folders["memory"] / "memory.limit_in_bytes").write_text(memory)
    _write_if_exists(folders["memory"] / "memory.memsw.limit_in_bytes", memory)
    if "cpu" in folders:
        (folders["cpu"] / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (folders["cpu"] / "cpu.cfs_quota_us").write_text(str(quota_us))
        # Weight relative to the threads of this process, each of which counts as much as a whole group.
        (folders["cpu"] / "cpu.shares").write_text(str(group.cores * _SHARES_PER_CORE))


def _write_if_exists(file: Path, text: str) -> None:
    if file.exists():
        file.write_text(text)


def _find_parent_groups() -> tuple[int, dict[str, Path]]:
    """Return the version of the control groups, and per available controller the folder in which a group can be made.

    Raises:
        CgroupUnavailable: no group can be made here.
    """
    own_groups = _find_own_groups()
    if "memory" in own_groups:
        folders = {controller: folder for controller, folder in own_groups.items() if controller in ("memory", "cpu")}
        for folder in folders.values():
            if not os.access(folder, os.W_OK):
                raise CgroupUnavailable(
                    f"no cgroup bounds its consoles: {folder} may not be written to; run it as root"
                )
        return 1, folders
    # Version 1 has no memory controller here; look for version 2.
    if "" not in own_groups:
        raise CgroupUnavailable("no cgroup bounds its consoles: no hierarchy with the controller memory is mounted")
    # Take the innermost writable group that delegates the memory controller.
    for folder in (own_groups[""], *own_groups[""].parents):
        if not os.access(folder / "cgroup.procs", os.W_OK) or not os.access(folder, os.W_OK):
            continue
        delegated = (folder / "cgroup.subtree_control").read_text().split()
        if "memory" in delegated:
            return 2, {controller: folder for controller in delegated if controller in ("memory", "cpu")}
    raise CgroupUnavailable(
        f"no cgroup bounds its consoles: none is delegated to this process, which is in {own_groups['']}; {_REMEDY}"
    )


def _find_own_groups() -> dict[str, Path]:
    """Return the folder of this process's group per version 1 controller. The key "" is version 2."""
    # Map each controller to the root and the mount point of its hierarchy.
    mounts: dict[str, tuple[str, Path]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount_fields, _, filesystem_fields = line.partition(" - ")
        kind, _, options = filesystem_fields.split(" ", 2)
        root, mount_point = mount_fields.split(" ")[3:5]
        if kind == "cgroup2":
            mounts.setdefault("", (root, Path(mount_point)))
        elif kind == "cgroup":
            for option in options.rpartition(" ")[2].split(","):
                mounts.setdefault(option, (root, Path(mount_point)))
    folders = {}
    # Translate each group path of this process into a folder below that mount point.
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        for kind in kinds.split(","):
            if kind not in mounts:
                continue
            root, mount = mounts[kind]
            if (path + "/").startswith(root.rstrip("/") + "/"):
                folders[kind] = mount / path.removeprefix(root.rstrip("/")).lstrip("/")
    return folders


def _read_available_memory(folder: Path) -> int:
    """Return this machine's memory, bytes, or less if a group at or above `folder` has a lower limit."""
    limits_bytes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for ancestor in (folder, *folder.parents):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                # The file is missing, or contains "max".
                limits_bytes.append(int((ancestor / name).read_text()))
    return min(limits_bytes)


def _make_locked(folder: Path) -> int:
    """Make a folder and lock it. Return the lock's descriptor, which `exec` closes."""
    while True:
        folder.mkdir(exist_ok=True)
        # `_remove_stale_groups` of another process may remove the folder before it is locked here; try again.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = _lock(folder)
            if folder.exists():
                return descriptor
            os.close(descriptor)


def _lock(folder: Path) -> int:
    """Lock a folder for this process. The lock ends with the process, even if that is in another container.

    Raises:
        BlockingIOError: another process holds the lock.
        FileNotFoundError: the folder does not exist any more.
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


def _remove_stale_groups(parent: Path) -> None:
    """Remove unlocked group folders below `parent`, which killed processes left behind."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        # The folder is locked, removed, or owned by another user. None of these may prevent a new group.
        with contextlib.suppress(OSError):
            descriptor = _lock(folder)
            try:
                _try_remove(folder)
            finally:
                os.close(descriptor)


def _try_remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        # The group still contains processes.
        return False
    return True
