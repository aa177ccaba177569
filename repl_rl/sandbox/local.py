"""The `local` sandbox: a fork server inside one bubblewrap, and namespaces of their own for each console."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from repl_rl.assets import asset
from repl_rl.errors import SandboxUnavailable
from repl_rl.sandbox.process import ProcessLaunch

_REMEDY = "install bubblewrap (apt-get install bubblewrap), or use --sandbox docker, or --sandbox unsafe"
INSIDE = "/opt/repl_kernel"
"""Where the kernel's package is, inside."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a console. One hash seed for all: sets print in the same order in every rollout."""


def _folder(name: str) -> Iterator[str]:
    """An empty folder with its parents. bubblewrap alone would make them for their owner only."""
    for path in (*reversed(Path(name).parents), Path(name)):
        yield from ("--perms", "0755", "--dir", str(path))


def _binds() -> Iterator[str]:
    """What of the host's files is visible inside, read-only: the system's programs and this Python."""
    yield from _folder("/etc")
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), name)
        elif path.exists():
            yield from ("--ro-bind", name, name)
    covered = Path("/usr")
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)):
        if not Path(prefix).is_relative_to(covered):
            yield from _folder(str(Path(prefix).parent))
            yield from ("--ro-bind", prefix, prefix)
    yield from _folder("/opt")
    yield from ("--ro-bind", str(asset("sandbox/repl_kernel")), INSIDE)


def _privileges() -> tuple[str, ...]:
    """As root the fork server keeps what it needs to give each console a user of its own; else a user namespace."""
    if os.geteuid() == 0:
        kept = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
        return ("--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name)))
    return ("--unshare-user",)


def wrap(bwrap: str, inner: Sequence[str], *, binds: Sequence[str] = (), privileges: Sequence[str] = ()) -> list[str]:
    """The command line that runs `inner` with nothing of the host but the system's programs and this Python."""
    spaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    variables = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    folders = ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/run/console", "--dir", "/dev/shm")
    return [
        *(bwrap, *spaces, *(privileges or ("--unshare-user",)), "--die-with-parent", "--new-session", "--clearenv"),
        *(
            *variables,
            *_binds(),
            *folders,
            *binds,
            "--remount-ro",
            "/dev",
            "--remount-ro",
            "/",
            "--chdir",
            "/tmp",
            "--",
        ),
        *inner,
    ]


def command(bwrap: str, preload: Sequence[str]) -> list[str]:
    """The command line of the sandboxed fork server; `{fd}` stands for its socket."""
    options = json.dumps({"isolate": True, "preload": list(preload)})
    inner = (sys.executable, f"{INSIDE}/zygote.py", "{fd}", options)
    return wrap(bwrap, inner, privileges=_privileges())


def launch(preload: Sequence[str]) -> ProcessLaunch:
    """How to start the fork server of a `local` sandbox.

    Raises:
        SandboxUnavailable: there is no bubblewrap here.
    """
    bwrap = shutil.which("bwrap")
    if sys.platform != "linux" or bwrap is None:
        raise SandboxUnavailable(f"sandbox 'local' needs Linux and the program bwrap, which is missing; {_REMEDY}")
    return ProcessLaunch(command(bwrap, preload), isolated=True, own_uids=os.geteuid() == 0, remedy=_REMEDY)
