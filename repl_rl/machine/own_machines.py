"""Machines of a Ray cluster that are started on this host for one run, and ended with it."""

import logging
import os
import secrets
import signal
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
from repl_rl.machine.folders import folder_for_sockets, private_folder
from repl_rl.machine.inherited import variables
from repl_rl.machine.processes import descendants, end_now

__all__ = [
    "Machine", "Machines", "add_machine", "alone", "gpus_there", "left_to_nodes", "machines_here", "processes_of",
    "remove_machine", "signals_kept",
]  # fmt: skip

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STORE_BYTES = 256 << 20
"""Object store of each machine that is started here. It can be small, because workers read weights from the owner's
folder."""
_TRIES = 4
"""Attempts to start a machine. On a busy host, a start can miss a limit in Ray of 15 s, which cannot be configured."""
_HEADLESS_S = 24 * 3600
"""Time that Ray keeps processes after their head is gone, seconds. By default, Ray would end this process after a
minute, even with unsaved state."""
_SOCKET_NAME_BYTES = 95
"""Length of a socket's longest name, bytes. It has this process's folder and Ray's session with date and pid."""


@contextmanager
def machines_here(thing: str, simulated: int) -> Iterator[Machines]:
    """Start Ray machines on this host: one with all resources, or a head and `simulated` others.

    Call it from the main thread only.

    Raises:
        ConfigError: the machines do not start.
    """
    with private_folder(folder_for_sockets(_SOCKET_NAME_BYTES), "repl_rl-ray-") as folder:
        yield from _machines(thing, simulated, folder)


def _machines(thing: str, simulated: int, folder: Path) -> Iterator[Machines]:
    machines = Machines(shutdown_at_exit=True)
    head: dict[str, object] = {"num_cpus": 0 if simulated else 1, "temp_dir": str(folder)}
    if not simulated:
        # With None, Ray detects the GPUs.
        head["num_gpus"] = None
    # By default, Ray writes the address where all programs of this user look for a cluster.
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
            # Ray's own shutdown would wait for a head that is gone.
            end_now(processes_of(machine))
        with signals_kept(), variables(alone):
            machines.shutdown()


def processes_of(machine: Machine) -> list[int]:
    """Return the pids of a machine that was started here: Ray's processes and all their descendants."""
    rays = [one.process.pid for kind in machine.all_processes.values() for one in kind]
    return [*rays, *(pid for ray in rays for pid in descendants(ray))]


def remove_machine(machines: Machines, machine: Machine) -> None:
    """End a machine that was started here, at once."""
    end_now(processes_of(machine))
    with signals_kept():
        machines.remove_node(machine, allow_graceful=False)


def add_machine(machines: Machines, thing: str = "fleet", **options: object) -> Machine:
    """Start one more machine on the loopback address, and retry if it does not come up.

    Raises:
        ConfigError: the machine does not come up.
    """
    for left in reversed(range(_TRIES)):
        before, head, workers = set(descendants(os.getpid())), machines.head_node, set(machines.worker_nodes)
        try:
            with signals_kept():
                machine: Machine = machines.add_node(
                    node_ip_address=LOOPBACK, object_store_memory=STORE_BYTES, **options
                )
                return machine
        except Exception as error:
            # Ray raises no specific exception here. Remove what the failed start left behind before the next attempt.
            end_now(set(descendants(os.getpid())) - before)
            machines.head_node, machines.worker_nodes = head, workers
            log.warning("a machine of the Ray cluster did not come up: %s", brief(error))
            if not left:
                remedy = f"its cluster does not start: {brief(error)}; free cores for it, or give the address of one"
                raise ConfigError(thing, "ray", remedy) from error
    raise AssertionError("it was started or refused")


@contextmanager
def alone() -> Iterator[None]:
    """Make each Ray cluster that starts in the block private to this run."""
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Time until a frozen actor is killed.
        "RAY_kill_worker_timeout_milliseconds": "1000",
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_HEADLESS_S),
        # With clusters disabled, Ray uses the loopback address for every node.
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
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
    """Return the environment that leaves the first GPUs to the local training processes, one GPU per process.

    It is empty if no further GPU exists.
    """
    ids = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    left = (list(map(str, range(gpus_there()))) if ids is None else ids)[launched.local_processes() :]
    return {"CUDA_VISIBLE_DEVICES": ",".join(left)} if left else {}


def gpus_there() -> int:
    """Return the number of GPUs of this machine, including those hidden from this process."""
    return int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())


def _read_again() -> None:
    """Make Ray read its environment variables again, because it reads them only on import."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the block, because Ray replaces them."""
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
