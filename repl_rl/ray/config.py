"""Options of a Ray cluster that a user can choose, and checks that need no Ray.

The `fleet` setting names the processes that play rollouts: `local`, `ray`, or `ray://HOST:PORT`, with options in
parentheses. The `nodes` sandbox has its consoles on machines of a cluster, separate from the engine, for lines that
compute.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar

from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox.base import Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.local import Local
from repl_rl.settings.component_registry import NameWithOptions, get_options
from repl_rl.settings.value_bounds import Above, AtLeast
from repl_rl.utils.installed_versions import get_version

_SETTING = "fleet"
"""Name of the setting, for messages."""
_ADDRESS_MARK = "://"
"""Text between the name of a backend and its address."""
ADDRESS = "RAY_ADDRESS"
"""Variable with the address of the cluster. Ray's own programs read it, too."""
INNER = Local()
"""Sandbox that holds the consoles on each machine."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Options of workers on a Ray cluster."""

    address: str
    """HOST:PORT of a running cluster; empty starts one on this machine, for this run alone."""
    nodes: int
    """Largest number of workers; 0 means one per `gpus` GPUs, or one per machine without GPUs."""
    gpus: int
    """GPUs per worker, on machines with GPUs."""
    simulate: bool
    """True to start one machine per worker on this machine."""
    patience_s: float


def use_local() -> None:
    """Play all rollouts in this process."""
    return


def use_ray(
    *,
    nodes: Annotated[int, AtLeast(0)] = 0,
    gpus: Annotated[int, AtLeast(0)] = 1,
    simulate: bool = False,
    patience_s: Annotated[float, Above(0)] = 300.0,
) -> RayOptions:
    """Play rollouts on workers of a Ray cluster, each an actor with engine, consoles and sampler.

    Args:
        nodes: largest number of workers (>= 0); 0 means one per `gpus` GPUs, or one per machine without GPUs.
        gpus: GPUs per worker (>= 0), on machines with GPUs.
        simulate: start a cluster of `nodes` machines on this one.
        patience_s: longest wait for a worker while there is none, seconds (> 0).
    """
    return RayOptions("", nodes, gpus, simulate, patience_s)


FLEETS: Mapping[str, Callable[..., RayOptions | None]] = {"local": use_local, "ray": use_ray}
"""Function of each backend, by its name in the setting. Its keyword arguments are the options."""


def get_worker_options(name: str) -> Mapping[str, object]:
    """Return the options of a fleet by name, each with its annotation. Raises ConfigError for an unknown name."""
    return get_options(_find_backend(name))


def parse_workers(text: str) -> RayOptions | None:
    """Read the `fleet` setting. None means that this process plays all rollouts.

    Raises:
        ConfigError: the setting is not valid, or its package is not installed.
    """
    named = NameWithOptions.parse(_SETTING, text)
    # Check the given options, and call the function of the backend with them.
    found = named.bind_options(_SETTING, _find_backend(named.name))()
    if found is None:
        return None
    _, _, address = named.name.partition(_ADDRESS_MARK)
    # Simulated machines are started here, so their number is needed and an address has no effect.
    if found.simulate and (address or not found.nodes):
        remedy = "leave the address out, and say how many machines: --fleet.nodes 2"
        raise ConfigError("fleet.simulate", found.simulate, remedy)
    if find_spec("ray") is None:
        raise ConfigError("package", "ray", "it is not installed; install it with `pip install 'repl_rl[ray]'`")
    return RayOptions(address, found.nodes, found.gpus, found.simulate, found.patience_s)


@dataclass(frozen=True, slots=True)
class Nodes(SandboxConfig):
    """Consoles on the machines of a Ray cluster.

    The cluster is the one that this process is part of, as a rollout worker is. Otherwise it is the one that the
    environment names; no run stores that address. Otherwise a cluster is started on this machine, for trials.
    """

    kind: ClassVar[str] = "nodes"
    about: ClassVar[str] = "machines of a Ray cluster, for lines that compute"
    is_remote: ClassVar[bool] = True

    def open(self, births: SandboxOptions) -> AbstractAsyncContextManager[Sandbox]:
        """See `SandboxConfig.open`.

        Raises:
            SandboxUnavailable: Ray is not installed.
            ConfigError: the environment names no address.
        """
        self._validate_ray_installed()
        from repl_rl.ray.console_actors import open_ray_consoles  # Ray is an extra

        return open_ray_consoles(read_cluster_address(), births)

    def build_reference_command(self, script: Path) -> Sequence[str]:
        """See `SandboxConfig.build_reference_command`."""
        return INNER.build_reference_command(script)

    async def describe_status(self) -> str:
        """See `SandboxConfig.describe_status`. It starts no cluster."""
        self._validate_ray_installed()
        return f"ray {get_version('ray')} is installed; no cluster was looked for"

    def _validate_ray_installed(self) -> None:
        if find_spec("ray") is None:
            raise SandboxUnavailable("sandbox 'nodes': Ray is not installed; pip install 'repl_rl[ray]'")


def read_cluster_address() -> str:
    """Return HOST:PORT of the cluster that the environment names. Empty means that it names none.

    Raises:
        ConfigError: the variable contains anything else.
    """
    address = os.environ.get(ADDRESS, "")
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdigit()):
        raise ConfigError(ADDRESS, address, "give HOST:PORT, the address that `ray start --head` prints")
    return address


def _find_backend(name: str) -> Callable[..., RayOptions | None]:
    # Only ray takes an address.
    kind, marked, address = name.partition(_ADDRESS_MARK)
    if kind not in FLEETS or (marked and kind != "ray"):
        raise ConfigError(_SETTING, name, f"choose {', '.join(FLEETS)} or ray{_ADDRESS_MARK}HOST:PORT")
    host, _, port = address.rpartition(":")
    if marked and not (host and port.isdigit()):
        raise ConfigError(
            _SETTING, name, f"give ray{_ADDRESS_MARK}HOST:PORT, the address that `ray start --head` prints"
        )
    return FLEETS[kind]
