"""The file systems of one console: scratch space that starts empty, and nothing of its siblings'."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from repl_kernel import system

FOLDER = "/run/console"
"""A console's socket and its output file."""
_SCRATCH, _SHARED = "/tmp", "/dev/shm"
_LOCKED = system.MS_NOSUID | system.MS_NODEV
_TERMINALS = 16
"""Most pseudo terminals of a console: the machine has 4,096 for all."""


@dataclass(frozen=True)
class Sizes:
    """How large they are, and whose."""

    uid: int
    """Of the console, as the fork server sees it; 0: the fork server's own."""
    disk_mb: int
    inodes: int
    output_bytes: int


def mount_own(sizes: Sizes, kept: Sequence[str]) -> None:
    """Cover what the fork server has there. `kept`: paths in it that are shown again, read-only.

    /proc can be written to until `open_proc` seals it.
    """
    held = [(path, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) for path in kept]
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
    """Pseudo terminals that no sibling sees, and that are counted; none at all where the kernel makes no instance."""
    flags = system.MS_NOSUID | system.MS_NOEXEC
    try:
        system.mount("devpts", "/dev/pts", "devpts", flags, f"newinstance,ptmxmode=0666,mode=0620,max={_TERMINALS}")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENODEV):
            raise
        system.mount("tmpfs", "/dev/pts", "tmpfs", flags | system.MS_NODEV | system.MS_RDONLY, "size=4k,nr_inodes=1")


def open_proc(*, sealed: bool) -> int:
    """A descriptor of /proc that can be written to, for this process's own settings.

    `sealed`: at its path /proc is read-only from now on, so that no later code changes its `oom_score_adj`.
    """
    descriptor = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if sealed:
        system.mount("/proc", "/proc", "", system.MS_BIND)
        read_only = system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY
        system.mount("", "/proc", "", read_only | _LOCKED | system.MS_NOEXEC)
    return descriptor


def scratch(kept: Sequence[str]) -> str:
    """The console's working folder, which is empty: /tmp, or one in it where that must show something else too."""
    if not any(path.startswith(f"{_SCRATCH}/") for path in kept):
        return _SCRATCH
    folder = f"{_SCRATCH}/console"
    while folder in kept:
        folder += "_"
    os.mkdir(folder, 0o700)
    return folder


def _show_again(path: str, descriptor: int, uid: int) -> None:
    """What `descriptor` refers to, at `path`, which has just been covered."""
    source = f"/proc/self/fd/{descriptor}"
    try:
        target = os.readlink("", dir_fd=descriptor)
    except OSError:  # no link
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
        there = os.open(path, os.O_PATH | os.O_CLOEXEC)  # of what is mounted now
    # What is mounted below is read-only already; the folders on the way to it are the fork server's.
    read_only = system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY | _LOCKED
    system.mount("", f"/proc/self/fd/{there}", "", read_only)
    os.close(there)


@contextmanager
def _as_user(uid: int) -> Iterator[None]:
    """Make files as the console's user: the fork server has no right to write into what is another's."""
    if uid:
        os.seteuid(uid)
    try:
        yield
    finally:
        if uid:
            os.seteuid(0)
