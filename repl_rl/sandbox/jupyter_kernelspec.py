"""Kernelspec and kernel provisioner that run the console inside bubblewrap for any Jupyter front end."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox import isolated_subprocess
from repl_rl.sandbox.bubblewrap import build_view
from repl_rl.sandbox.fork_server_client import draw_uid
from repl_rl.utils.atomic_files import folder_for_sockets, validate_replaceable_file, write_text_atomically
from repl_rl.utils.package_data import find_asset

NAME = "repl-rl"
PROVISIONER = "repl-rl-local"
"""Name of the entry point in the group `jupyter_client.kernel_provisioners`."""
_KEPT = ("CAP_SETPCAP", "CAP_SETUID", "CAP_SETGID")
_SOCKET_NAME_BYTES = len("repl-rl-12345678/kernel-5")
_PRIVILEGES = ("--cap-drop", "ALL", *(word for name in _KEPT for word in ("--cap-add", name)))
"""Capabilities that a kernel of root needs to become another user."""


def build_kernelspec(name: str = NAME, *, isolated: bool = True) -> dict[str, object]:
    """Return the contents of `kernel.json`. If `isolated`, our provisioner starts the kernel inside bubblewrap."""
    spec: dict[str, object] = {
        "argv": [sys.executable, str(find_asset("sandbox/repl_kernel/__main__.py")), "-f", "{connection_file}"],
        "display_name": f"Python console ({name})" if isolated else f"Python console ({name}, not isolated)",
        "language": "python",
        "interrupt_mode": "signal",
    }
    if isolated:
        spec["metadata"] = {"kernel_provisioner": {"provisioner_name": PROVISIONER}}
    return spec


def get_data_folder(prefix: Path = Path(sys.prefix)) -> Path:
    """Return Jupyter's data folder of an installation prefix."""
    return prefix / "share" / "jupyter"


def install_kernelspec(data: Path | None = None, *, name: str = NAME, isolated: bool = True) -> Path:
    """Write the kernelspec into a data folder of Jupyter, by default this environment's, and return its own folder.

    Raises:
        ConfigError: `name` is invalid, or names a kernel of another program; or the folder is not writable.
        SandboxUnavailable: `isolated` is True, and bubblewrap is missing.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ConfigError("kernel's name", name, "use letters, digits, `-`, `.` and `_` only")
    if isolated:
        _find_bubblewrap()
    folder = (get_data_folder() if data is None else data).absolute() / "kernels" / name
    text = json.dumps(build_kernelspec(name, isolated=isolated), indent=1) + "\n"
    validate_replaceable_file("file of the kernelspec", folder / "kernel.json", _is_own_kernelspec)
    try:
        write_text_atomically(folder / "kernel.json", text)
    except OSError as error:
        remedy = f"{error.strerror}; choose a place that you may write to, with --user or --prefix"
        raise ConfigError("folder of the kernelspec", str(folder), remedy) from error
    return folder


def _is_own_kernelspec(file: Path) -> bool:
    """Return True for a `kernel.json` that starts this console, from any installation."""
    try:
        spec = json.loads(file.read_text(encoding="utf-8"))
        return any("repl_kernel" in word for word in spec["argv"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _find_bubblewrap() -> str:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        remedy = "install bubblewrap (apt-get install bubblewrap), or give --no-isolated"
        raise SandboxUnavailable(f"the program bwrap is missing; {remedy}")
    return bwrap


def _list_child_pids(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        # The process has ended.
        return []


class BubblewrapProvisioner(LocalProvisioner):
    """Provisioner that starts a kernel inside bubblewrap. The kernel listens on sockets in a folder, not on ports."""

    _folder: str = ""

    async def pre_launch(self, **kwargs: object) -> dict[str, object]:
        """Choose the sockets, then build the command line."""
        bwrap = _find_bubblewrap()
        # A restarted kernel keeps its folder, because its clients are connected there.
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="repl-rl-", dir=folder_for_sockets(_SOCKET_NAME_BYTES))
        manager = self.parent
        if not isinstance(manager, KernelManager):
            raise ConfigError("kernel provisioner's parent", manager, "start kernels through a KernelManager")
        # Ports inside cannot be reached, because the sandbox has its own network.
        manager.transport = "ipc"
        manager.ip = f"{self._folder}/kernel"
        manager.connection_file = f"{self._folder}/connection.json"
        settings = await super().pre_launch(**kwargs)
        kernel_argv = [f"{isolated_subprocess.INSIDE}/__main__.py", "-f", manager.connection_file, "--sealed"]
        # bubblewrap would make the parent folders for root alone, and the kernel is another user.
        parents = [("--perms", "0755", "--dir", str(parent)) for parent in reversed(Path(self._folder).parents)]
        binds = (*(word for options in parents for word in options), "--bind", self._folder, self._folder)
        if os.geteuid() != 0:
            settings["cmd"] = isolated_subprocess.wrap_in_bubblewrap(bwrap, [sys.executable, *kernel_argv], binds=binds)
            return settings
        # The folder is on the host. Files that the kernel makes there must not be root's.
        uid = draw_uid()
        for path in (self._folder, manager.connection_file):
            os.chown(path, uid, uid)
        settings["cmd"] = isolated_subprocess.wrap_in_bubblewrap(
            bwrap,
            [sys.executable, *kernel_argv, "--user", str(uid)],
            view=build_view(Path(isolated_subprocess.INSIDE), (), own_uids=True),
            binds=(*binds, "--chmod", "1777", "/tmp"),
            privileges=_PRIVILEGES,
        )
        return settings

    async def launch_kernel(self, cmd: list[str], **kwargs: object) -> KernelConnectionInfo:
        """As in the base class. bubblewrap sets the environment."""
        return await super().launch_kernel(cmd, **kwargs)

    async def send_signal(self, signum: int) -> None:
        """Send a signal. An interrupt goes to the processes inside, because it would end bubblewrap itself."""
        if signum != signal.SIGINT or self.process is None:
            await super().send_signal(signum)
            return
        for pid in _list_child_pids(self.process.pid):
            # The first process of the namespace leads the group, and ignores the signal.
            os.killpg(pid, signum)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove the sockets, unless the kernel restarts."""
        await super().cleanup(restart)
        if self._folder and not restart:
            shutil.rmtree(self._folder, ignore_errors=True)
