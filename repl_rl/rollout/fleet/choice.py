"""How a fleet is chosen: `local`, `ray`, or `ray://HOST:PORT`, with options in parentheses."""

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
    """Nodes on a Ray cluster."""

    address: str
    """HOST:PORT of a cluster that runs; "": one is started on this machine, for this run alone."""
    nodes: int
    """At most so many; 0: a node for each `gpus` GPUs, or for each machine where there are none."""
    gpus: int
    """Of a node, where its machine has some."""
    simulate: bool
    """Start as many machines on this one as there are nodes."""
    patience_s: float


def local() -> None:
    """This process plays all rollouts."""
    return


def ray(
    *,
    nodes: Annotated[int, AtLeast(0)] = 0,
    gpus: Annotated[int, AtLeast(0)] = 1,
    simulate: bool = False,
    patience_s: Annotated[float, Above(0)] = 300.0,
) -> OnRay:
    """Nodes on a Ray cluster, each an actor with engine, consoles and sampler.

    Args:
        nodes: at most so many (>= 0); 0: one for each `gpus` GPUs, or for each machine where there are none.
        gpus: of a node (>= 0), where its machine has some.
        simulate: start a cluster of `nodes` machines on this one.
        patience_s: how long a fleet without a node waits for one, seconds (> 0).
    """
    return OnRay("", nodes, gpus, simulate, patience_s)


FLEETS: Mapping[str, Callable[..., OnRay | None]] = {"local": local, "ray": ray}


def fleet_options(name: str) -> Mapping[str, object]:
    """The options of the fleet of that name, each with its annotation. Raises ConfigError: there is none."""
    return options_of(_maker(name))


def chosen_fleet(text: str) -> OnRay | None:
    """What `fleet` says; None: this process.

    Raises:
        ConfigError: it says something else, or its package is not installed.
    """
    named = Named.read(_THING, text)
    found = named.bound(_THING, _maker(named.name))()
    if found is None:
        return None
    _, _, address = named.name.partition(_ADDRESS)
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
