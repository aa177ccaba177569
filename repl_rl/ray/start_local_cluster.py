"""Machines of a Ray cluster that are started on this host for one run, and ended with it.

`python -P -m repl_rl.ray.start_local_cluster MACHINES` is the process of a cluster. It prints the cluster's address,
and ends when its standard input closes.
"""

import logging
import os
import secrets
import signal
import sys
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
from repl_rl.ray.actor_calls import format_ray_error
from repl_rl.utils import processes as launched
from repl_rl.utils.atomic_files import folder_for_sockets, open_private_folder
from repl_rl.utils.processes import kill_processes, list_descendants

__all__ = [
    "Machine",
    "Machines",
    "add_machine",
    "count_gpus",
    "get_worker_gpu_variables",
    "isolate_ray_environment",
    "list_machine_processes",
    "preserve_signal_handlers",
    "remove_machine",
    "set_variables",
    "start_local_machines",
]  # fmt: skip

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
"""Address of every machine that is started here."""
STORE_BYTES = 256 << 20
"""Object store of each machine that is started here. It can be small, because workers read weights from the owner's
folder."""
_TRIES = 4
"""Attempts to start a machine. On a busy host, a start can miss a limit in Ray of 15 s, which cannot be configured."""
_HEADLESS_S = 24 * 3600
"""Time that Ray keeps processes after their head is gone, seconds. By default, Ray would end this process after a
minute, even with unsaved state."""
_SOCKET_NAME_BYTES = 95
"""Length of the longest socket path below the temporary folder, bytes. The path contains the folder of this process,
and Ray's session folder, whose name has the date and the pid."""


@contextmanager
def start_local_machines(thing: str, simulated: int) -> Iterator[Machines]:
    """Start Ray machines on this host: one with all resources, or a head and `simulated` others.

    Call it from the main thread only.

    Raises:
        ConfigError: the machines do not start.
    """
    with open_private_folder(folder_for_sockets(_SOCKET_NAME_BYTES), "repl_rl-ray-") as folder:
        yield from _start_machines(thing, simulated, folder)


def add_machine(machines: Machines, thing: str = "workers", **options: object) -> Machine:
    """Start one more machine on the loopback address, and retry if it does not come up.

    Raises:
        ConfigError: the machine does not come up.
    """
    for left in reversed(range(_TRIES)):
        # Remember processes and machines, to remove what a failed start adds.
        before, head, workers = set(list_descendants(os.getpid())), machines.head_node, set(machines.worker_nodes)
        try:
            with preserve_signal_handlers():
                machine: Machine = machines.add_node(
                    node_ip_address=LOOPBACK, object_store_memory=STORE_BYTES, **options
                )
                return machine
        except Exception as error:
            # Ray raises no specific exception here. Remove what the failed start left behind before the next attempt.
            kill_processes(set(list_descendants(os.getpid())) - before)
            machines.head_node, machines.worker_nodes = head, workers
            log.warning("a machine of the Ray cluster did not come up: %s", format_ray_error(error))
            if not left:
                reason = format_ray_error(error)
                remedy = f"its cluster does not start: {reason}; free cores for it, or give the address of one"
                raise ConfigError(thing, "ray", remedy) from error
    raise AssertionError("it was started or refused")


def remove_machine(machines: Machines, machine: Machine) -> None:
    """End a machine that was started here, at once."""
    kill_processes(list_machine_processes(machine))
    with preserve_signal_handlers():
        machines.remove_node(machine, allow_graceful=False)


def list_machine_processes(machine: Machine) -> list[int]:
    """Return the pids of a machine that was started here: Ray's processes and all their descendants."""
    rays = [one.process.pid for kind in machine.all_processes.values() for one in kind]
    return [*rays, *(pid for ray in rays for pid in list_descendants(ray))]


@contextmanager
def isolate_ray_environment() -> Iterator[None]:
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
        with set_variables(ours):
            constants.ENABLE_RAY_CLUSTER = False
            _reload_ray_config()
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters
        _reload_ray_config()


@contextmanager
def set_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables during the block, and restore the old values afterwards. None removes a variable."""
    before = {name: os.environ.get(name) for name in values}
    _apply_variables(values)
    try:
        yield
    finally:
        _apply_variables(before)


@contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the block, because Ray replaces them."""
    # Only the main thread may set signal handlers.
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def get_worker_gpu_variables() -> Mapping[str, str]:
    """Return environment variables that show Ray only the GPUs on which no local training process trains.

    Training uses the first GPUs, one per process. The result is empty if no other GPU exists.
    """
    # None: no variable restricts this process, so it sees all GPUs.
    ids = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    left = (list(map(str, range(count_gpus()))) if ids is None else ids)[launched.get_local_world_size() :]
    return {"CUDA_VISIBLE_DEVICES": ",".join(left)} if left else {}


def count_gpus() -> int:
    """Return the number of GPUs of this machine, including those hidden from this process."""
    return int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())


def _start_machines(thing: str, simulated: int, folder: Path) -> Iterator[Machines]:
    machines = Machines(shutdown_at_exit=True)
    head: dict[str, object] = {"num_cpus": 0 if simulated else 1, "temp_dir": str(folder)}
    if not simulated:
        # With None, Ray detects the GPUs.
        head["num_gpus"] = None
    # Keep the address in this folder. By default, Ray writes it where all programs of this user look for a cluster.
    (folder / "ray").mkdir()
    alone = {"RAY_TMPDIR": str(folder)}
    try:
        # Machines are not processes of a launcher, and get only GPUs on which nothing trains.
        with set_variables({**dict.fromkeys(launched.VARIABLES), **get_worker_gpu_variables(), **alone}):
            add_machine(machines, thing, **head, include_dashboard=False)
            for _ in range(simulated):
                add_machine(machines, thing, num_cpus=1)
        yield machines
    finally:
        # Also after a failed start, which may leave some machines.
        for machine in machines.list_all_nodes():
            # Ray's own shutdown would wait for a head that is gone.
            kill_processes(list_machine_processes(machine))
        with preserve_signal_handlers(), set_variables(alone):
            machines.shutdown()


def _apply_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _reload_ray_config() -> None:
    """Make Ray read its environment variables again, because it reads them only on import."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


if __name__ == "__main__":
    with start_local_machines("cluster", int(sys.argv[1])) as here:
        print(here.address, flush=True)
        sys.stdin.read()
