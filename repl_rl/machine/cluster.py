"""The Ray cluster that this process is on, which runs or is started here; `actors.py` has what lives on it."""

import atexit
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray
from ray import exceptions
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
    "Machine",
    "Machines",
    "add_machine",
    "connected",
    "machines_here",
    "processes_of",
    "remove_machine",
    "shared",
]

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
STORE_BYTES = 256 << 20
"""Of each machine that is started here: its nodes read weights from the owner's folder, so little goes that way."""
_TRIES = 4
"""Starts of a machine: a busy one misses a limit of Ray's own, 15 s, that nothing moves."""
_HEADLESS_S = 24 * 3600
"""How long Ray leaves processes alone whose head is gone. It would end this one after a minute, state or no state."""
_LEAVE_S = 20.0
"""For Ray to let go of a cluster."""


@contextmanager
def connected(thing: str, address: str, simulated: int) -> Iterator[Machines | None]:
    """Connect this process to a cluster, which is started here and ended again where no address is given.

    A process that is on a cluster already, as those of Ray Train are, stays on it. One that is started here listens on
    the loopback address alone and asks everybody for a token that only processes of this user can read. Ctrl-C and
    SIGTERM stay what they are.

    Args:
        thing: whose address it is, for messages.
        address: HOST:PORT; "": one is started.
        simulated: so many machines are started on this one, beside a head; 0: the head alone, which has all.

    Raises:
        ConfigError: there is no such cluster, it cannot be started, or this process is on another one already.
    """
    if ray.is_initialized():
        if simulated:
            raise ConfigError(f"{thing}.simulate", True, "this process is on a cluster already; end that first")
        _refuse_other(thing, address)
        yield None
        return
    with ExitStack() as stack:
        here = None
        if not address:
            stack.enter_context(_alone())
            here = stack.enter_context(machines_here(thing, simulated))
        stack.enter_context(_joined(thing, address or str(here.address if here else "")))
        if address:
            _tell_open(address)
        yield here


@contextmanager
def _joined(thing: str, address: str) -> Iterator[None]:
    with _signals_kept():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            remedy = f"Ray does not answer there: {brief(error)}; run this on a machine of that cluster"
            raise ConfigError(thing, f"ray://{address}", remedy) from error
    try:
        yield
    finally:
        with _signals_kept():
            _leave()


def _leave() -> None:
    leaving = threading.Thread(target=ray.shutdown, daemon=True, name="ray")
    leaving.start()
    leaving.join(_LEAVE_S)
    if leaving.is_alive():
        log.warning("the cluster does not answer, and is left as it is")
        atexit.unregister(ray.shutdown)  # it would wait for an answer when this process exits


def _tell_open(address: str) -> None:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning("cluster %s asks nobody for a token: whoever reaches it runs programs there", address)


_sharing = threading.Lock()
_shared: list[ExitStack] = []
"""The connection that `shared` made, once for each who uses it."""


@contextmanager
def shared(thing: str, address: str, simulated: int) -> Iterator[None]:
    """As `connected`, from any thread: whoever comes second has the first one's connection, and the last one ends it.

    A process that is on a cluster by itself, as a node of a fleet is, stays on it. One that is started here is in a
    process of its own, since Ray starts machines from main threads alone.

    Raises:
        ConfigError: as `connected`; or this process is on another cluster.
    """
    with _sharing:
        if _shared or not ray.is_initialized():
            mine = _shared[0] if _shared else ExitStack()
            if not _shared:
                mine.enter_context(_apart(thing, address, simulated))
            _shared.append(mine)
        else:
            mine = None
        _refuse_other(thing, address)
    try:
        yield
    finally:
        with _sharing:
            if mine is not None:
                _shared.remove(mine)
                if not _shared:
                    mine.close()


def _refuse_other(thing: str, address: str) -> None:
    """Refuse an address that is not the cluster's that this process is on."""
    if not address:
        return
    on = str(ray.get_runtime_context().gcs_address)
    host, _, port = address.rpartition(":")
    mine, _, own = on.rpartition(":")
    try:
        same = port == own and socket.gethostbyname(host) in (mine, socket.gethostbyname(mine), _LOOPBACK)
    except OSError:
        same = False
    if not same:
        raise ConfigError(thing, f"ray://{address}", f"this process is on the cluster {on}; give that address, or none")


@contextmanager
def _apart(thing: str, address: str, simulated: int) -> Iterator[None]:
    with ExitStack() as stack:
        if address:
            _tell_open(address)
        else:
            stack.enter_context(_alone())
            address = stack.enter_context(_trial(thing, simulated))
        stack.enter_context(_joined(thing, address))
        yield


@contextmanager
def _trial(thing: str, simulated: int) -> Iterator[str]:
    """The address of a cluster in a process that ends with this one, however this one ends."""
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    with subprocess.Popen(
        [sys.executable, "-m", "repl_rl.machine.trial", str(simulated)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C of the terminal must not end it before its consoles
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise ConfigError(thing, "ray", "its cluster does not start, as told above; give the address of one")
            yield address
        finally:
            process.stdin.close()


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
        with variables({**dict.fromkeys(launched.VARIABLES), **_others(), **alone}):
            add_machine(machines, thing, **head, include_dashboard=False)
            for _ in range(simulated):
                add_machine(machines, thing, num_cpus=1)
        yield machines
    finally:
        for machine in machines.list_all_nodes():
            end_now(processes_of(machine))  # Ray's own way waits for a head that is gone
        with _signals_kept(), variables(alone):
            machines.shutdown()


def processes_of(machine: Machine) -> list[int]:
    """Those of a machine that was started here: Ray's, and all that they have started."""
    rays = [one.process.pid for kind in machine.all_processes.values() for one in kind]
    return [*rays, *(pid for ray in rays for pid in descendants(ray))]


def remove_machine(machines: Machines, machine: Machine) -> None:
    """End a machine that was started here, at once."""
    end_now(processes_of(machine))
    with _signals_kept():
        machines.remove_node(machine, allow_graceful=False)


def add_machine(machines: Machines, thing: str = "fleet", **options: object) -> Machine:
    """Start one more machine here, on the loopback address, and again where it did not come up.

    Raises:
        ConfigError: it does not come up.
    """
    for left in reversed(range(_TRIES)):
        before, head, workers = set(descendants(os.getpid())), machines.head_node, set(machines.worker_nodes)
        try:
            with _signals_kept():
                machine: Machine = machines.add_node(
                    node_ip_address=_LOOPBACK, object_store_memory=STORE_BYTES, **options
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
def _alone() -> Iterator[None]:
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


def _others() -> Mapping[str, str]:
    """Where there are several GPUs the first ones are left to the processes that train here, one to each."""
    count = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    ids = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids() or list(map(str, range(count)))
    left = ids[launched.local_processes() :]
    return {"CUDA_VISIBLE_DEVICES": ",".join(left)} if left else {}


def _read_again() -> None:
    """Ray has read its variables when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes signals for itself; afterwards they are whose they were."""
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
