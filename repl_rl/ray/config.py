"""Options of a Ray cluster that a user can choose, and checks that need no Ray.

The `workers` setting names the processes that play rollouts: `local`, `ray`, or `ray://HOST:PORT`, with options in
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

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, SandboxUnavailable
from repl_rl.sandbox.base import Sandbox, SandboxConfig, SandboxOptions
from repl_rl.sandbox.isolated_subprocess import Local
from repl_rl.settings.component_registry import NameWithOptions, get_options
from repl_rl.settings.value_bounds import Above, AtLeast
from repl_rl.utils.installed_versions import get_version

_SETTING = "workers"
"""Name of the setting, for messages."""
_ADDRESS_MARK = "://"
"""Text between the name of a backend and its address."""
ADDRESS = "RAY_ADDRESS"
"""Variable with the address of the cluster. Ray's own programs read it, too."""
INNER = Local()
"""Sandbox that holds the consoles on each machine."""


@keeps_old_names
@dataclass(frozen=True, slots=True)
class RayOptions:
    """Options of workers on a Ray cluster."""

    address: str
    """HOST:PORT of a running cluster; empty starts one on this machine, for this run alone."""
    max_workers: int
    """Largest number of workers; 0 means one per `gpus_per_worker` GPUs, or one per machine without GPUs."""
    gpus_per_worker: int
    """GPUs per worker, on machines with GPUs."""
    simulate_machines: bool
    """True to start one machine per worker on this machine."""
    startup_timeout_s: float


def use_local() -> None:
    """Play all rollouts in this process."""
    return


def use_ray(
    *,
    max_workers: Annotated[int, AtLeast(0)] = 0,
    gpus_per_worker: Annotated[int, AtLeast(0)] = 1,
    simulate_machines: bool = False,
    startup_timeout_s: Annotated[float, Above(0)] = 300.0,
) -> RayOptions:
    """Play rollouts on workers of a Ray cluster, each an actor with engine, consoles and sampler.

    Args:
        max_workers: largest number of workers (>= 0); 0 means one per `gpus_per_worker` GPUs, or one per machine
            without GPUs.
        gpus_per_worker: GPUs per worker (>= 0), on machines with GPUs.
        simulate_machines: start a cluster of `max_workers` machines on this one.
        startup_timeout_s: longest wait for a worker while there is none, seconds (> 0).
    """
    return RayOptions("", max_workers, gpus_per_worker, simulate_machines, startup_timeout_s)


FLEETS: Mapping[str, Callable[..., RayOptions | None]] = {"local": use_local, "ray": use_ray}
"""Function of each backend, by its name in the setting. Its keyword arguments are the options."""


def get_worker_options(name: str) -> Mapping[str, object]:
    """Return the options of workers by name, each with its annotation. Raises ConfigError for an unknown name."""
    return get_options(_find_backend(name))


def parse_workers(text: str) -> RayOptions | None:
    """Read the `workers` setting. None means that this process plays all rollouts.

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
    if found.simulate_machines and (address or not found.max_workers):
        remedy = "leave the address out, and say how many machines: --workers.max-workers 2"
        raise ConfigError("workers.simulate_machines", found.simulate_machines, remedy)
    if find_spec("ray") is None:
        raise ConfigError("package", "ray", "it is not installed; install it with `pip install 'repl_rl[ray]'`")
    return RayOptions(
        address, found.max_workers, found.gpus_per_worker, found.simulate_machines, found.startup_timeout_s
    )


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
            ConfigError: see `read_cluster_address`.
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
