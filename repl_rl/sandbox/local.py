"""The `local` sandbox: a fork server inside one bubblewrap, and namespaces of their own for each console."""

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
"""Before what is shown of the host: that may lie below them."""
INSIDE = "/opt/repl_kernel"
"""Where the kernel's package is, inside."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The whole environment of a console. One hash seed for all: sets print in the same order in every rollout."""


@dataclass(frozen=True, slots=True)
class Local(SandboxKind):
    """Consoles in namespaces of their own on this machine."""

    kind: ClassVar[str] = "local"
    about: ClassVar[str] = "namespaces on this machine"

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`."""
        return serve(self.kind, launch(births.preload), births)

    async def doctor(self) -> str:
        """See `SandboxKind.doctor`; it also says what a control group bounds, or why none does."""
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
    """As root the fork server keeps what it needs to give each console a user of its own; else a user namespace."""
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
    """The command line that runs `inner` with nothing of the host but what `seen` says; None: all but preloads.

    Raises:
        SandboxUnavailable: something that this Python needs is not there.
    """
    spaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    name = ("--hostname", "console")  # before anything is imported that remembers the host's
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
        *(*variables, *_FOLDERS, *seen.options, *binds, "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--", *inner),
    ]


def command(bwrap: str, preload: Sequence[str]) -> list[str]:
    """The command line of the sandboxed fork server; `{fd}` stands for its socket."""
    seen = view(Path(INSIDE), preload, own_uids=os.geteuid() == 0)
    options = {"isolate": True, "preload": list(preload), "packages": seen.packages, "kept": seen.kept}
    inner = (sys.executable, f"{INSIDE}/zygote.py", "{fd}", json.dumps(options))
    return wrap(bwrap, inner, seen=seen, privileges=_privileges())


def launch(preload: Sequence[str]) -> ProcessLaunch:
    """How to start the fork server of a `local` sandbox.

    Raises:
        SandboxUnavailable: there is no bubblewrap here, or something that this Python needs cannot be shown inside.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"sandbox 'local' needs Linux, and this is {sys.platform}; {INSTEAD}")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable(f"sandbox 'local' needs the program bwrap, which is missing; {_INSTALL}, or {INSTEAD}")
    own_uids = os.geteuid() == 0
    return ProcessLaunch(command(bwrap, preload), isolated=True, own_uids=own_uids, remedy_for=remedy_for, bounded=True)
