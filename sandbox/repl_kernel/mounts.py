"""File systems of one console: scratch space that starts empty, and nothing of its siblings."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from repl_kernel import system

FOLDER = "/run/console"
"""Folder of a console's socket and its output file."""
_SCRATCH, _SHARED = "/tmp", "/dev/shm"
_LOCKED = system.MS_NOSUID | system.MS_NODEV
_TERMINALS = 16
"""Maximum pseudo terminals of a console. The machine has 4,096 for all."""


@dataclass(frozen=True)
class Sizes:
    """Sizes and owner of the file systems."""

    uid: int
    """User id of the console, as the fork server sees it. 0 means that of the fork server."""
    disk_mb: int
    inodes: int
    output_bytes: int


def mount_own(sizes: Sizes, kept: Sequence[str]) -> None:
    """Cover the folders of the fork server. `kept`: paths in them that are shown again, read-only.

    /proc is writable until `open_proc` seals it.
    """
    # Open the kept paths before they are covered.
    held = [(path, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) for path in kept]
    # Later mounts must not reach the namespace of the fork server.
    system.mount("", "/", "", system.MS_REC | system.MS_PRIVATE)
    owner = f",uid={sizes.uid},gid={sizes.uid}" if sizes.uid else ""
    disk = f"size={sizes.disk_mb}m,nr_inodes={sizes.inodes},mode=0700{owner}"
    system.mount("tmpfs", _SCRATCH, "tmpfs", _LOCKED, disk)
    system.mount("tmpfs", _SHARED, "tmpfs", _LOCKED, disk)
    for path, descriptor in held:
        _show_again(path, descriptor, sizes.uid)
        os.close(descriptor)
    output = f"size={sizes.output_bytes},nr_inodes=16,mode=0755{owner}"
    system.mount("tmpfs", FOLDER, "tmpfs", _LOCKED | system.MS_NOEXEC, output)
    _mount_terminals()
    system.mount("proc", "/proc", "proc", _LOCKED | system.MS_NOEXEC)


def _mount_terminals() -> None:
    """Mount pseudo terminals, limited in number, that no sibling sees. If the kernel cannot, mount an empty folder."""
    flags = system.MS_NOSUID | system.MS_NOEXEC
    try:
        system.mount("devpts", "/dev/pts", "devpts", flags, f"newinstance,ptmxmode=0666,mode=0620,max={_TERMINALS}")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENODEV):
            raise
        system.mount("tmpfs", "/dev/pts", "tmpfs", flags | system.MS_NODEV | system.MS_RDONLY, "size=4k,nr_inodes=1")


def open_proc(*, sealed: bool) -> int:
    """Return a descriptor of a writable /proc, for this process's own settings.

    `sealed`: the path /proc becomes read-only, so that no later code changes its `oom_score_adj`.
    """
    descriptor = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if sealed:
        system.mount("/proc", "/proc", "", system.MS_BIND)
        read_only = system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY
        system.mount("", "/proc", "", read_only | _LOCKED | system.MS_NOEXEC)
    return descriptor


def scratch(kept: Sequence[str]) -> str:
    """Return the console's empty working folder: /tmp, or a folder in it if /tmp must show other paths, too."""
    if not any(path.startswith(f"{_SCRATCH}/") for path in kept):
        return _SCRATCH
    folder = f"{_SCRATCH}/console"
    while folder in kept:
        folder += "_"
    os.mkdir(folder, 0o700)
    return folder


def _show_again(path: str, descriptor: int, uid: int) -> None:
    """Show the target of `descriptor` at `path`, which has just been covered."""
    source = f"/proc/self/fd/{descriptor}"
    try:
        target = os.readlink("", dir_fd=descriptor)
    except OSError:
        # Not a link.
        target = ""
    with _as_user(uid):
        if target:
            os.symlink(target, path)
            return
        if os.path.isdir(source):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        there = os.open(path, os.O_PATH | os.O_CLOEXEC)
    system.mount(source, f"/proc/self/fd/{there}", "", system.MS_BIND | system.MS_REC)
    os.close(there)
    with _as_user(uid):
        # Open the mounted file, not the one that it covers.
        there = os.open(path, os.O_PATH | os.O_CLOEXEC)
    # Mounts further below are read-only already, but the folders on the way belong to the fork server.
    read_only = system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY | _LOCKED
    system.mount("", f"/proc/self/fd/{there}", "", read_only)
    os.close(there)


@contextmanager
def _as_user(uid: int) -> Iterator[None]:
    """Make files as the console's user, because the fork server has no right to write into another user's folder."""
    if uid:
        os.seteuid(uid)
    try:
        yield
    finally:
        if uid:
            os.seteuid(0)
