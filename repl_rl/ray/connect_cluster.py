"""Connection to a Ray cluster that already runs or is started here. `actor_calls` handles the actors on it.

`connect_to_ray` is for the main thread of a run. `connect_shared` is for users in any thread.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ray
from ray import exceptions

from repl_rl.errors import ConfigError
from repl_rl.ray.actor_calls import format_ray_error, list_live_machines
from repl_rl.ray.start_local_cluster import (
    LOOPBACK,
    Machines,
    count_gpus,
    isolate_ray_environment,
    preserve_signal_handlers,
    start_local_machines,
)
from repl_rl.utils.processes import get_local_world_size

__all__ = ["connect_shared", "connect_to_ray", "validate_cluster_gpus", "validate_free_gpus"]

log = logging.getLogger(__name__)

_LEAVE_S = 20.0
"""Timeout for Ray to disconnect from a cluster, seconds."""
_ANSWER_S = 300.0
"""Timeout for a cluster to answer, seconds. Its head may be starting at the same time as this process."""
_SOON_S = 10.0
"""Time without an answer after which a warning is logged, seconds."""
_TRIES, _TRY_S = "RAY_gcs_server_port_wait_time_s", 41.0
"""Environment variable for the number of Ray's connection attempts (default: 20), and seconds per unanswered attempt.

The name of the variable wrongly suggests a time.
"""
_sharing = threading.Lock()
"""Lock of `_shared`."""
_shared: list[ExitStack] = []
"""Connection of `connect_shared`, repeated once per current user; empty without users."""


@contextmanager
def connect_to_ray(
    thing: str, address: str, simulated: int, patience_s: float = _ANSWER_S
) -> Iterator[Machines | None]:
    """Connect this process to a Ray cluster. Without an address, a cluster is started here and ended with the block.

    A process that is on a cluster already, such as a worker of Ray Train, stays on it. A cluster that is started here
    listens on the loopback address only. It asks for a token that only processes of this user can read. The handlers of
    Ctrl-C and SIGTERM are kept.

    Args:
        thing: owner of the address, for messages.
        address: HOST:PORT; "" starts a cluster.
        simulated: number of machines to start on this one in addition to a head; 0 starts one head with all resources.
        patience_s: time for a running cluster to answer, rounded to attempts of about forty seconds.

    Raises:
        ConfigError: the cluster does not exist or cannot be started, or this process is on another one already.
    """
    if ray.is_initialized():
        if simulated:
            raise ConfigError(
                f"{thing}.simulate_machines", True, "this process is on a cluster already; end that first"
            )
        _validate_same_cluster(thing, address)
        yield None
        return
    # Start a cluster if no address is given, then join it.
    with ExitStack() as stack:
        here = None
        if not address:
            stack.enter_context(isolate_ray_environment())
            here = stack.enter_context(start_local_machines(thing, simulated))
        stack.enter_context(_join_cluster(thing, address or str(here.address if here else ""), patience_s))
        if address:
            _warn_if_unreachable(address)
        yield here


@contextmanager
def connect_shared(thing: str, address: str, simulated: int) -> Iterator[None]:
    """Connect like `connect_to_ray`, but from any thread. All users share one connection, which the last one closes.

    A process that is on a cluster already, such as a worker, stays on it. A cluster that is started here runs in a
    separate process, since Ray starts machines from main threads only.

    Raises:
        ConfigError: see `connect_to_ray`, or this process is on another cluster.
    """
    with _sharing:
        # The first user connects, unless this process is on a cluster already.
        if _shared or not ray.is_initialized():
            mine = _shared[0] if _shared else ExitStack()
            if not _shared:
                mine.enter_context(_connect_separately(thing, address, simulated))
            _shared.append(mine)
        else:
            mine = None
        _validate_same_cluster(thing, address)
    try:
        yield
    finally:
        with _sharing:
            # The last user disconnects.
            if mine is not None:
                _shared.remove(mine)
                if not _shared:
                    mine.close()


def validate_cluster_gpus(thing: str) -> None:
    """Refuse a cluster that may assign GPUs to actors while processes of this machine train on them.

    Raises:
        ConfigError: see `validate_free_gpus`.
    """
    context = ray.get_runtime_context()
    # Ray already accounts for the GPUs of an actor, such as those of Ray Train.
    if context.get_actor_id() is None:
        here = context.get_node_id()
        offered = sum(machine.gpus for machine in list_live_machines() if machine.id == here)
        validate_free_gpus(thing, offered, count_gpus(), get_local_world_size())


def validate_free_gpus(thing: str, offered: int, there: int, trainers: int) -> None:
    """Raise an error if Ray may assign a GPU of this machine on which a process trains.

    Args:
        thing: owner of the cluster, for messages.
        offered: GPUs of this machine that Ray may assign (>= 0).
        there: all GPUs of this machine (>= 0).
        trainers: processes that train on this machine (>= 1), with one GPU each.

    Raises:
        ConfigError: Ray may assign such a GPU.
    """
    if not there or offered <= max(0, there - trainers):
        return
    left = ",".join(str(number) for number in range(trainers, there))
    how = f"CUDA_VISIBLE_DEVICES={left} ray start ..." if left else "ray start --num-gpus=0 ..."
    found = f"Ray has {offered} of the {there} GPUs of this machine, {trainers} are needed to train"
    raise ConfigError(thing, found, f"workers would get training GPUs; start Ray on this machine with `{how}`")


@contextmanager
def _join_cluster(thing: str, address: str, patience_s: float = _ANSWER_S) -> Iterator[None]:
    with preserve_signal_handlers(), _limit_connect_retries(address, patience_s):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            remedy = f"Ray does not answer there: {format_ray_error(error)}; run this on a machine of that cluster"
            raise ConfigError(thing, f"ray://{address}", remedy) from error
    try:
        yield
    finally:
        with preserve_signal_handlers():
            _disconnect()


@contextmanager
def _limit_connect_retries(address: str, patience_s: float) -> Iterator[None]:
    """Make Ray give up after about `patience_s` in place of ten silent minutes, and log a warning while it waits."""
    notice = threading.Timer(_SOON_S, log.warning, ("cluster %s does not answer yet; it may be starting", address))
    notice.daemon = True
    notice.start()
    # A value that the user has set is kept.
    mine = _TRIES not in os.environ
    if mine:
        os.environ[_TRIES] = str(max(1, round(patience_s / _TRY_S)))
    try:
        yield
    finally:
        notice.cancel()
        if mine:
            del os.environ[_TRIES]


def _disconnect() -> None:
    leaving = threading.Thread(target=ray.shutdown, daemon=True, name="ray")
    leaving.start()
    leaving.join(_LEAVE_S)
    if leaving.is_alive():
        log.warning("the cluster does not answer, and is left as it is")
        # Ray's exit handler would wait for an answer.
        atexit.unregister(ray.shutdown)


def _warn_if_unreachable(address: str) -> None:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning("cluster %s asks nobody for a token: whoever reaches it runs programs there", address)


def _validate_same_cluster(thing: str, address: str) -> None:
    """Raise an error if `address` is not that of the cluster that this process is on."""
    if not address:
        return
    # Names of the same host may differ, so compare the addresses behind them.
    on = str(ray.get_runtime_context().gcs_address)
    host, _, port = address.rpartition(":")
    mine, _, own = on.rpartition(":")
    try:
        same = port == own and socket.gethostbyname(host) in (mine, socket.gethostbyname(mine), LOOPBACK)
    except OSError:
        same = False
    if not same:
        raise ConfigError(thing, f"ray://{address}", f"this process is on the cluster {on}; give that address, or none")


@contextmanager
def _connect_separately(thing: str, address: str, simulated: int) -> Iterator[None]:
    with ExitStack() as stack:
        if address:
            _warn_if_unreachable(address)
        else:
            stack.enter_context(isolate_ray_environment())
            address = stack.enter_context(_open_trial_cluster(thing, simulated))
        stack.enter_context(_join_cluster(thing, address))
        yield


@contextmanager
def _open_trial_cluster(thing: str, simulated: int) -> Iterator[str]:
    """Start a cluster in a process that ends with this one, however this one ends, and yield its address."""
    # The child finds this package even if it is not installed.
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "repl_rl.ray.start_local_cluster", str(simulated)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # Ctrl-C in the terminal must not end the cluster before its consoles.
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # The child prints the address once the cluster runs, and nothing if it fails.
            address = process.stdout.readline().strip()
            if not address:
                raise ConfigError(
                    thing, "ray", "the local cluster does not start (see the log above); give a cluster's address"
                )
            yield address
        finally:
            # The cluster ends when its standard input closes.
            process.stdin.close()
