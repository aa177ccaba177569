"""The `gateway` sandbox: consoles on an external Jupyter Server or Kernel Gateway, one kernel per console."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from repl_rl.errors import SandboxUnavailable
from repl_rl.sandbox.base import Births, Sandbox, SandboxKind
from repl_rl.sandbox.gateway.address import Address

_CLIENT = "jupyter_kernel_client"


@dataclass(frozen=True, slots=True)
class Gateway(SandboxKind):
    """Kernels of the Jupyter server that the environment names."""

    kind: ClassVar[str] = "gateway"
    about: ClassVar[str] = "kernels of the Jupyter server at JUPYTER_GATEWAY_URL, which alone isolates them"
    isolates: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = True
    unlimited: ClassVar[frozenset[str]] = frozenset({"processes", "inodes", "CPU time of all processes"})

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`.

        Raises:
            ConfigError: the environment names no server.
        """
        address = Address.named()
        if find_spec(_CLIENT) is None:
            raise SandboxUnavailable(f"sandbox 'gateway' needs {_CLIENT}; pip install 'repl_rl[gateway]'")
        from repl_rl.sandbox.gateway.served import serve  # the client is an extra

        return serve(address, births)
