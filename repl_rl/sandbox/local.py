"""The `local` sandbox: a fork server inside one bubblewrap, in which each console gets its own namespaces."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from repl_rl.errors import SandboxUnavailable
from repl_rl.sandbox.base import Births, Sandbox, SandboxKind
from repl_rl.sandbox.causes import INSTEAD, remedy_for
from repl_rl.sandbox.cgroup import NoGroup, make_group
from repl_rl.sandbox.process import ProcessLaunch
from repl_rl.sandbox.served import serve
from repl_rl.sandbox.view import View, view

_INSTALL = "install bubblewrap (apt-get install bubblewrap)"
_FOLDERS = (
    *("--perms", "0755", "--dir", "/run", "--dir", "/run/console"),
    *("--proc", "/proc", "--dev", "/dev", "--dir", "/dev/shm", "--tmpfs", "/tmp"),
)
"""Options that come before those for host files, which may be below these folders."""
INSIDE = "/opt/repl_kernel"
"""Folder of the kernel's package inside the sandbox."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Complete environment of a console. It has one hash seed, so that sets print in the same order in every rollout."""


@dataclass(frozen=True, slots=True)
class Local(SandboxKind):
    """Consoles in their own namespaces on this machine."""

    kind: ClassVar[str] = "local"
    about: ClassVar[str] = "namespaces on this machine"

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`."""
        return serve(self.kind, launch(births.preload), births)

    async def doctor(self) -> str:
        """See `SandboxKind.doctor`. It also reports the limits of a control group, or the reason why it has none."""
        answers = await SandboxKind.doctor(self)
        try:
            group = make_group()
        except NoGroup as reason:
            return f"{answers}; {reason}"
        await group.remove()
        return f"{answers}; {group.about}"

    def reference(self, script: Path) -> Sequence[str]:
        """See `SandboxKind.reference`."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return SandboxKind.reference(self, script)
        user = ("--unshare-user", "--uid", "1000", "--gid", "1000")
        binds = ("--ro-bind", str(script), "/opt/reference.py")
        return wrap(bwrap, [sys.executable, "-u", "/opt/reference.py"], binds=binds, privileges=user)


def _privileges() -> tuple[str, ...]:
    """Return the options for privileges. As root, the fork server keeps the capabilities to give each console its own
    user. Any other user needs a user namespace."""
    if os.geteuid() == 0:
        kept = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
        return ("--cap-drop", "ALL", *(word for name in kept for word in ("--cap-add", name)))
    return ("--unshare-user",)


def wrap(
    bwrap: str,
    inner: Sequence[str],
    *,
    seen: View | None = None,
    binds: Sequence[str] = (),
    privileges: Sequence[str] = (),
) -> list[str]:
    """Return the command line that runs `inner` with only the host files of `seen`. None means a view without preloads.

    Raises:
        SandboxUnavailable: something that this Python needs is missing.
    """
    spaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    # Set it before modules are imported, because some store the host's name.
    name = ("--hostname", "console")
    variables = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    seen = seen or view(Path(INSIDE), (), own_uids=False)
    return [
        *(
            bwrap,
            *spaces,
            *name,
            *(privileges or ("--unshare-user",)),
            "--die-with-parent",
            "--new-session",
            "--clearenv",
        ),
        # Make the root read-only last, because earlier options create folders in it.
        *(*variables, *_FOLDERS, *seen.options, *binds, "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--", *inner),
    ]


def command(bwrap: str, preload: Sequence[str]) -> list[str]:
    """Return the command line of the sandboxed fork server. `{fd}` is replaced by the number of its socket."""
    seen = view(Path(INSIDE), preload, own_uids=os.geteuid() == 0)
    options = {"isolate": True, "preload": list(preload), "packages": seen.packages, "kept": seen.kept}
    inner = (sys.executable, f"{INSIDE}/zygote.py", "{fd}", json.dumps(options))
    return wrap(bwrap, inner, seen=seen, privileges=_privileges())


def launch(preload: Sequence[str]) -> ProcessLaunch:
    """Return the launcher of the fork server of a `local` sandbox.

    Raises:
        SandboxUnavailable: this is not Linux, bubblewrap is missing, or a file that this Python needs cannot be shown.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"sandbox 'local' needs Linux, and this is {sys.platform}; {INSTEAD}")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable(f"sandbox 'local' needs the program bwrap, which is missing; {_INSTALL}, or {INSTEAD}")
    own_uids = os.geteuid() == 0
    return ProcessLaunch(command(bwrap, preload), isolated=True, own_uids=own_uids, remedy_for=remedy_for, bounded=True)
