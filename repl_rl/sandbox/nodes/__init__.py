"""The `nodes` sandbox: consoles on the machines of a Ray cluster, apart from the engine, for lines that compute."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.machine.versions import installed
from repl_rl.sandbox.base import Births, Sandbox, SandboxKind
from repl_rl.sandbox.docker import Docker
from repl_rl.sandbox.local import Local
from repl_rl.sandbox.unsafe import Unsafe
from repl_rl.settings.bounds import AtLeast, check_fields

_INNER: dict[str, type[SandboxKind]] = {kind.kind: kind for kind in (Local, Docker, Unsafe)}


@dataclass(frozen=True, slots=True)
class Nodes(SandboxKind):
    """Which cluster, and what holds consoles on each of its machines."""

    kind: ClassVar[str] = "nodes"
    about: ClassVar[str] = "machines of a Ray cluster, for lines that compute"

    address: str = ""
    """HOST:PORT of a cluster that runs; empty: the one that this process is on, as a node of a fleet is, else one that
    is started on this machine, to try it."""
    machines: Annotated[int, AtLeast(0)] = 0
    """Machines that hold consoles, at most (>= 0); 0: all that have CPUs. Of a cluster that is started here: how many
    are simulated."""
    consoles: Annotated[int, AtLeast(1)] = 64
    """Consoles on each machine at a time, at most (>= 1); further rollouts wait for theirs."""
    inner: Literal["local", "docker", "unsafe"] = "local"
    """The sandbox that holds them there, with its options as they are by default."""
    beside_gpus: bool = False
    """Machines with GPUs hold consoles, too."""

    def __post_init__(self) -> None:
        check_fields(self, self.kind)
        host, _, port = self.address.rpartition(":")
        if self.address and not (host and port.isdigit()):
            remedy = "give HOST:PORT, the address that `ray start --head` prints"
            raise ConfigError(f"{self.kind}.address", self.address, remedy)

    @property
    def isolates(self) -> bool:
        """See `SandboxKind.isolates`."""
        return _INNER[self.inner]().isolates

    @property
    def unlimited(self) -> frozenset[str]:
        """See `SandboxKind.unlimited`."""
        return _INNER[self.inner]().unlimited

    def open(self, births: Births) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxKind.open`.

        Raises:
            SandboxUnavailable: Ray is not installed.
        """
        self._refuse_without_ray()
        from repl_rl.sandbox.nodes.ray import serve  # Ray is an extra

        return serve(self, births)

    def reference(self, script: Path) -> Sequence[str]:
        """See `SandboxKind.reference`."""
        return _INNER[self.inner]().reference(script)

    async def doctor(self) -> str:
        """See `SandboxKind.doctor`; it starts no cluster."""
        self._refuse_without_ray()
        return f"ray {installed('ray')} is installed; no cluster was looked for"

    def _refuse_without_ray(self) -> None:
        if find_spec("ray") is None:
            raise SandboxUnavailable("sandbox 'nodes': Ray is not installed; pip install 'repl_rl[ray]'")
