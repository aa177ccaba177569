"""The `gateway` sandbox: consoles on an external Jupyter Server or Kernel Gateway, one kernel per console."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from repl_rl.errors import SandboxUnavailable
from repl_rl.sandbox.base import Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.jupyter_gateway.gateway_address import GatewayAddress

_CLIENT = "jupyter_kernel_client"


@dataclass(frozen=True, slots=True)
class Gateway(SandboxConfig):
    """Kernels of the Jupyter server that the environment names."""

    kind: ClassVar[str] = "gateway"
    about: ClassVar[str] = "kernels of the Jupyter server at JUPYTER_GATEWAY_URL, which alone isolates them"
    isolates: ClassVar[bool] = False
    is_remote: ClassVar[bool] = True
    unenforced_limits: ClassVar[frozenset[str]] = frozenset({"processes", "inodes", "CPU time of all processes"})

    def open(self, options: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`.

        Raises:
            ConfigError: the environment names no server.
        """
        address = GatewayAddress.from_environment()
        if find_spec(_CLIENT) is None:
            raise SandboxUnavailable(f"sandbox 'gateway' needs {_CLIENT}; pip install 'repl_rl[gateway]'")
        from repl_rl.sandbox.jupyter_gateway.gateway_console import open_gateway_sandbox  # the client is an extra

        return open_gateway_sandbox(address, options)
