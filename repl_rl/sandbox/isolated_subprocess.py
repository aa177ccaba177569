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
from repl_rl.sandbox.base import Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.bubblewrap import INSTEAD, FilesystemView, build_view, find_remedy
from repl_rl.sandbox.cgroup import CgroupUnavailable, create_group
from repl_rl.sandbox.console_pool import open_fork_server_sandbox
from repl_rl.sandbox.fork_server_client import ProcessLauncher

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
class Local(SandboxConfig):
    """Consoles in their own namespaces on this machine."""

    kind: ClassVar[str] = "local"
    about: ClassVar[str] = "namespaces on this machine"

    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`."""
        return open_fork_server_sandbox(self.kind, make_local_launcher(options.preload), options)

    async def describe_status(self) -> str:
        """See `SandboxConfig.describe_status`. It also reports the limits of a control group, or the reason why it has
        none."""
        answers = await SandboxConfig.describe_status(self)
        try:
            group = create_group()
        except CgroupUnavailable as reason:
            return f"{answers}; {reason}"
        await group.remove()
        return f"{answers}; {group.describe}"

    def build_reference_command(self, script: Path) -> Sequence[str]:
        """See `SandboxConfig.build_reference_command`."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            return SandboxConfig.build_reference_command(self, script)
        user = ("--unshare-user", "--uid", "1000", "--gid", "1000")
        binds = ("--ro-bind", str(script), "/opt/reference.py")
        return wrap_in_bubblewrap(bwrap, [sys.executable, "-u", "/opt/reference.py"], binds=binds, privileges=user)


def _build_privilege_options() -> tuple[str, ...]:
    """Return the options for privileges. As root, the fork server keeps the capabilities to give each console its own
    user. Any other user needs a user namespace."""
    if os.geteuid() == 0:
        capabilities = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID")
        return ("--cap-drop", "ALL", *(word for name in capabilities for word in ("--cap-add", name)))
    return ("--unshare-user",)


def wrap_in_bubblewrap(
    bwrap: str,
    inner: Sequence[str],
    *,
    view: FilesystemView | None = None,
    binds: Sequence[str] = (),
    privileges: Sequence[str] = (),
) -> list[str]:
    """Return the command line that runs `inner` with only the host files of `view`. None means a view without preloads.

    Raises:
        SandboxUnavailable: something that this Python needs is missing.
    """
    spaces = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    # Set it before modules are imported, because some store the host's name.
    name = ("--hostname", "console")
    variables = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    view = view or build_view(Path(INSIDE), (), own_uids=False)
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
        *(*variables, *_FOLDERS, *view.bubblewrap_options, *binds, "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/tmp", "--", *inner),
    ]


def build_fork_server_command(bwrap: str, preload: Sequence[str]) -> list[str]:
    """Return the command line of the sandboxed fork server. `{fd}` is replaced by the number of its socket."""
    view = build_view(Path(INSIDE), preload, own_uids=os.geteuid() == 0)
    options = {
        "isolate": True,
        "preload": list(preload),
        "packages": view.package_folders,
        "kept": view.reexposed_paths,
    }
    inner = (sys.executable, f"{INSIDE}/fork_server_main.py", "{fd}", json.dumps(options))
    return wrap_in_bubblewrap(bwrap, inner, view=view, privileges=_build_privilege_options())


def make_local_launcher(preload: Sequence[str]) -> ProcessLauncher:
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
    return ProcessLauncher(
        build_fork_server_command(bwrap, preload),
        isolates_consoles=True,
        uses_own_uids=own_uids,
        find_remedy=find_remedy,
        uses_control_group=True,
    )
