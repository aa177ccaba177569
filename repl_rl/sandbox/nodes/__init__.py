"""The `nodes` sandbox: consoles on machines of a Ray cluster, separate from the engine, for lines that compute."""

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.machine.versions import installed
from repl_rl.sandbox.base import Births, Sandbox, SandboxKind
from repl_rl.sandbox.local import Local

ADDRESS = "RAY_ADDRESS"
"""Variable with the address of the cluster. Ray's own programs read it, too."""
INNER = Local()
"""Sandbox that holds the consoles on each machine."""


@dataclass(frozen=True, slots=True)
class Nodes(SandboxKind):
    """Consoles on the machines of a Ray cluster.

    The cluster is the one that this process is part of, as a rollout worker is. Otherwise it is the one that the
    environment names; no run stores that address. Otherwise a cluster is started on this machine, for trials.
    """

    kind: ClassVar[str] = "nodes"
    about: ClassVar[str] = "machines of a Ray cluster, for lines that compute"
    elsewhere: ClassVar[bool] = True

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`.

        Raises:
            SandboxUnavailable: Ray is not installed.
            ConfigError: the environment names no address.
        """
        self._refuse_without_ray()
        from repl_rl.sandbox.nodes.ray import serve  # Ray is an extra

        return serve(cluster_address(), births)

    def reference(self, script: Path) -> Sequence[str]:
        """See `SandboxKind.reference`."""
        return INNER.reference(script)

    async def doctor(self) -> str:
        """See `SandboxKind.doctor`. It starts no cluster."""
        self._refuse_without_ray()
        return f"ray {installed('ray')} is installed; no cluster was looked for"

    def _refuse_without_ray(self) -> None:
        if find_spec("ray") is None:
            raise SandboxUnavailable("sandbox 'nodes': Ray is not installed; pip install 'repl_rl[ray]'")


def cluster_address() -> str:
    """Return HOST:PORT of the cluster that the environment names. Empty means that it names none.

    Raises:
        ConfigError: the variable contains anything else.
    """
    address = os.environ.get(ADDRESS, "")
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdigit()):
        raise ConfigError(ADDRESS, address, "give HOST:PORT, the address that `ray start --head` prints")
    return address
