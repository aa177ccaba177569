"""The fork server: it imports everything once, then forks a console for each request.

On its socket (SEQPACKET) each packet is a request (JSON) with one file descriptor: the console's own socket to the
host. Its options: `isolate` (namespaces a console), `preload` (modules to import).
"""

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from repl_kernel import birth, keeper, system
from repl_kernel.console import clean_interpreter
from repl_kernel.kernel import ReplKernel

_MAX_REQUEST_BYTES = 65_536


@dataclass(frozen=True)
class Options:
    """How consoles are made."""

    isolate: bool
    """Each in namespaces of its own."""
    preload: list[str]
    """Modules to import before the first fork."""
    packages: Sequence[str] = ()
    """Folders in which modules are looked for after Python's own."""
    kept: Sequence[str] = ()
    """What consoles see of this process's /tmp and /dev/shm, which they cover with their own."""


def _forget_dead_children() -> None:
    """Let the kernel reap: nobody waits for the processes that this one forks."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _next_request(host: socket.socket) -> tuple[birth.Request, socket.socket]:
    data, descriptors, _, _ = socket.recv_fds(host, _MAX_REQUEST_BYTES, 1)
    if not data:
        os._exit(0)
    return birth.Request(**json.loads(data)), socket.socket(fileno=descriptors[0])


def _leave(message: str) -> NoReturn:
    sys.stderr.write(f"repl_kernel: {message}\n")
    sys.stderr.flush()
    os._exit(1)


def _become_keeper_or_console(
    kernel: ReplKernel, request: birth.Request, connection: socket.socket, options: Options
) -> None:
    """In the forked child: returns in the console only."""
    place, isolate = None, options.isolate
    try:
        place = birth.isolate(request, options.kept) if options.isolate else birth.expose()
        keeper.announce(connection, place)
        capture = birth.open_capture(request, place, isolate)
        if isolate:
            birth.renounce()
        pid = os.fork()
        if pid:
            keeper.keep(connection, pid, capture, place, owns_all=isolate)
        if not isolate:
            system.die_with_parent()
        birth.become_console(kernel, request, connection, capture, place, isolate)
    except OSError as error:  # the host may have changed its mind before the birth
        if place is not None and place.temporary:
            shutil.rmtree(place.folder, ignore_errors=True)
        _leave(str(error))


def _connect(address: str) -> socket.socket:
    """`address`: the number of an inherited descriptor, or the path of a socket."""
    if not address.startswith("/"):
        return socket.socket(fileno=int(address))
    host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host.connect(address)
    return host


def serve(address: str, options: Options, filters: Sequence[object]) -> ReplKernel:
    """Serve requests for ever; returns once in each console, with its kernel.

    `filters`: `warnings.filters` as they were before any import.
    """
    host = _connect(address)
    for name in options.preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            _leave(f"module {name!r} cannot be preloaded: {error}; install it where the console runs, or leave it out")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _forget_dead_children()
    tempfile.tempdir = None
    kernel = ReplKernel()
    clean_interpreter(filters)
    gc.collect()
    gc.freeze()
    host.send(json.dumps({"python": sys.version_info[:3], "pid": os.getpid()}).encode())
    while True:
        request, connection = _next_request(host)
        try:
            pid = birth.fork_first() if options.isolate and request.uid else os.fork()
        except OSError as error:  # no process or namespace to be had: the host learns of it as its connection closes
            sys.stderr.write(f"repl_kernel: {error}\n")
            connection.close()
            continue
        if pid == 0:
            host.close()
            _become_keeper_or_console(kernel, request, connection, options)
            return kernel
        connection.close()
