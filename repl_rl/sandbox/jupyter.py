"""Our console for any Jupyter front end: a kernelspec, and a kernel provisioner that starts it inside bubblewrap."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from repl_rl.assets import asset
from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox import local

NAME = "repl-rl"
PROVISIONER = "repl-rl-local"
"""Entry point in the group `jupyter_client.kernel_provisioners`."""


def kernelspec(*, isolated: bool = True) -> dict[str, object]:
    """The contents of `kernel.json`. `isolated`: started by our provisioner, inside bubblewrap."""
    spec: dict[str, object] = {
        "argv": [sys.executable, str(asset("sandbox/repl_kernel/__main__.py")), "-f", "{connection_file}"],
        "display_name": "Python console (repl-rl)",
        "language": "python",
        "interrupt_mode": "signal",
    }
    if isolated:
        spec["metadata"] = {"kernel_provisioner": {"provisioner_name": PROVISIONER}}
    return spec


def install(prefix: Path = Path(sys.prefix), *, isolated: bool = True) -> Path:
    """Write the kernelspec below `prefix`, where Jupyter finds it; returns its folder."""
    folder = prefix / "share" / "jupyter" / "kernels" / NAME
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_text(json.dumps(kernelspec(isolated=isolated), indent=1) + "\n")
    return folder


class BubblewrapProvisioner(LocalProvisioner):
    """Starts the kernel of a kernelspec inside one bubblewrap; it listens on sockets in a folder, not on ports."""

    _folder: str = ""

    async def pre_launch(self, **kwargs: object) -> dict[str, object]:
        """Choose the sockets, then build the command line."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailable("the program bwrap is missing; install bubblewrap (apt-get install bubblewrap)")
        self._folder = tempfile.mkdtemp(prefix="repl-rl-")
        manager = self.parent
        if not isinstance(manager, KernelManager):
            raise ConfigError("kernel provisioner's parent", manager, "start kernels through a KernelManager")
        manager.transport = "ipc"
        manager.ip = f"{self._folder}/kernel"
        manager.connection_file = f"{self._folder}/connection.json"
        settings = await super().pre_launch(**kwargs)
        inside = [f"{local.INSIDE}/__main__.py", "-f", manager.connection_file, "--sealed"]
        settings["cmd"] = local.wrap(bwrap, [sys.executable, *inside], binds=("--bind", self._folder, self._folder))
        return settings

    async def launch_kernel(self, cmd: list[str], **kwargs: object) -> KernelConnectionInfo:
        """As the base class; the environment is bubblewrap's business."""
        return await super().launch_kernel(cmd, **kwargs)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove the sockets."""
        await super().cleanup(restart)
        if self._folder and not restart:
            shutil.rmtree(self._folder, ignore_errors=True)
