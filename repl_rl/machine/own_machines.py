"""Machines of a Ray cluster that are started on this one, for one run, and ended with it."""

import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants as constants
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._private.node import Node as Machine
from ray._raylet import AuthenticationTokenLoader, Config
from ray.cluster_utils import Cluster as Machines

from repl_rl.errors import ConfigError
from repl_rl.machine import launched
from repl_rl.machine.actors import brief
from repl_rl.machine.folders import private_folder
from repl_rl.machine.inherited import variables
from repl_rl.machine.processes import descendants, end_now

__all__ = [
    "Machine", "Machines", "add_machine", "alone", "gpus_there", "left_to_nodes", "machines_here", "processes_of",
    "remove_machine", "signals_kept",
]  # fmt: skip

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STORE_BYTES = 256 << 20
"""Of each machine that is started here: its nodes read weights from the owner's folder, so little goes that way."""
_TRIES = 4
"""Starts of a machine: a busy one misses a limit of Ray's own, 15 s, that nothing moves."""
_HEADLESS_S = 24 * 3600
"""How long Ray leaves processes alone whose head is gone. It would end this one after a minute, state or no state."""


@contextmanager
def machines_here(thing: str, simulated: int) -> Iterator[Machines]:
    """Machines on this one: one that holds everything, or a head and `simulated` others. For main threads alone.

    Raises:
        ConfigError: they do not come up.
    """
    with private_folder(Path(tempfile.gettempdir()), "repl_rl-ray-") as folder:
        yield from _machines(thing, simulated, folder)


def _machines(thing: str, simulated: int, folder: Path) -> Iterator[Machines]:
    machines = Machines(shutdown_at_exit=True)
    head: dict[str, object] = {"num_cpus": 0 if simulated else 1, "temp_dir": str(folder)}
    if not simulated:
        head["num_gpus"] = None  # as many as Ray finds
    # Ray writes the address where every other program of this user would look for a cluster.
    (folder / "ray").mkdir()
    alone = {"RAY_TMPDIR": str(folder)}
    try:
        with variables({**dict.fromkeys(launched.VARIABLES), **left_to_nodes(), **alone}):
            add_machine(machines, thing, **head, include_dashboard=False)
            for _ in range(simulated):
                add_machine(machines, thing, num_cpus=1)
        yield machines
    finally:
        for machine in machines.list_all_nodes():
            end_now(processes_of(machine))  # Ray's own way waits for a head that is gone
        with signals_kept(), variables(alone):
            machines.shutdown()


def processes_of(machine: Machine) -> list[int]:
    """Those of a machine that was started here: Ray's, and all that they have started."""
    rays = [one.process.pid for kind in machine.all_processes.values() for one in kind]
    return [*rays, *(pid for ray in rays for pid in descendants(ray))]


def remove_machine(machines: Machines, machine: Machine) -> None:
    """End a machine that was started here, at once."""
    end_now(processes_of(machine))
    with signals_kept():
        machines.remove_node(machine, allow_graceful=False)


def add_machine(machines: Machines, thing: str = "fleet", **options: object) -> Machine:
    """Start one more machine here, on the loopback address, and again where it did not come up.

    Raises:
        ConfigError: it does not come up.
    """
    for left in reversed(range(_TRIES)):
        before, head, workers = set(descendants(os.getpid())), machines.head_node, set(machines.worker_nodes)
        try:
            with signals_kept():
                machine: Machine = machines.add_node(
                    node_ip_address=LOOPBACK, object_store_memory=STORE_BYTES, **options
                )
                return machine
        except Exception as error:  # Ray has no kind of its own for this
            end_now(set(descendants(os.getpid())) - before)
            machines.head_node, machines.worker_nodes = head, workers
            log.warning("a machine of the Ray cluster did not come up: %s", brief(error))
            if not left:
                remedy = f"its cluster does not start: {brief(error)}; free cores for it, or give the address of one"
                raise ConfigError(thing, "ray", remedy) from error
    raise AssertionError("it was started or refused")


@contextmanager
def alone() -> Iterator[None]:
    """Whatever of Ray starts meanwhile is this run's alone."""
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_kill_worker_timeout_milliseconds": "1000",  # until a frozen actor is ended by force
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_HEADLESS_S),
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",  # Ray calls it so: every address is the loopback one
    }
    clusters = constants.ENABLE_RAY_CLUSTER
    try:
        with variables(ours):
            constants.ENABLE_RAY_CLUSTER = False
            _read_again()
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
        _read_again()


def left_to_nodes() -> Mapping[str, str]:
    """Where there are several GPUs the first ones are left to the processes that train here, one to each."""
    ids = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    left = (list(map(str, range(gpus_there()))) if ids is None else ids)[launched.local_processes() :]
    return {"CUDA_VISIBLE_DEVICES": ",".join(left)} if left else {}


def gpus_there() -> int:
    """GPUs of this machine, whichever of them this process may use."""
    return int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())


def _read_again() -> None:
    """Ray has read its variables when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def signals_kept() -> Iterator[None]:
    """Ray takes signals for itself; afterwards they are whose they were."""
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
