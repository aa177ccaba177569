"""Choice of the processes that play rollouts: `local`, `ray`, or `ray://HOST:PORT`, with options in parentheses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named, options_of

_THING = "fleet"
_ADDRESS = "://"


@dataclass(frozen=True, slots=True)
class OnRay:
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


def local() -> None:
    """Play all rollouts in this process."""
    return


def ray(
    *,
    nodes: Annotated[int, AtLeast(0)] = 0,
    gpus: Annotated[int, AtLeast(0)] = 1,
    simulate: bool = False,
    patience_s: Annotated[float, Above(0)] = 300.0,
) -> OnRay:
    """Play rollouts on workers of a Ray cluster, each an actor with engine, consoles and sampler.

    Args:
        nodes: largest number of workers (>= 0); 0 means one per `gpus` GPUs, or one per machine without GPUs.
        gpus: GPUs per worker (>= 0), on machines with GPUs.
        simulate: start a cluster of `nodes` machines on this one.
        patience_s: longest wait for a worker while there is none, seconds (> 0).
    """
    return OnRay("", nodes, gpus, simulate, patience_s)


FLEETS: Mapping[str, Callable[..., OnRay | None]] = {"local": local, "ray": ray}


def fleet_options(name: str) -> Mapping[str, object]:
    """Return the options of a fleet by name, each with its annotation. Raises ConfigError for an unknown name."""
    return options_of(_maker(name))


def chosen_fleet(text: str) -> OnRay | None:
    """Read the `fleet` setting. None means that this process plays all rollouts.

    Raises:
        ConfigError: the setting is not valid, or its package is not installed.
    """
    named = Named.read(_THING, text)
    found = named.bound(_THING, _maker(named.name))()
    if found is None:
        return None
    _, _, address = named.name.partition(_ADDRESS)
    # Simulated machines are started here, so their number is needed and an address has no effect.
    if found.simulate and (address or not found.nodes):
        remedy = "leave the address out, and say how many machines: --fleet.nodes 2"
        raise ConfigError("fleet.simulate", found.simulate, remedy)
    if find_spec("ray") is None:
        raise ConfigError("package", "ray", "it is not installed; install it with `pip install 'repl_rl[ray]'`")
    return OnRay(address, found.nodes, found.gpus, found.simulate, found.patience_s)


def _maker(name: str) -> Callable[..., OnRay | None]:
    kind, marked, address = name.partition(_ADDRESS)
    if kind not in FLEETS or (marked and kind != "ray"):
        raise ConfigError(_THING, name, f"choose {', '.join(FLEETS)} or ray{_ADDRESS}HOST:PORT")
    host, _, port = address.rpartition(":")
    if marked and not (host and port.isdigit()):
        raise ConfigError(_THING, name, f"give ray{_ADDRESS}HOST:PORT, the address that `ray start --head` prints")
    return FLEETS[kind]
