"""Fork server: imports everything once, then forks a console per request.

On its socket (SEQPACKET), each packet is a request (JSON) with a file descriptor: the console's own socket to the host.
The console's key arrives on that socket and is read after the fork, so that no later console finds it in its memory.
The options are `isolate` (namespaces per console) and `preload` (modules to import).

A request can also ask for a workspace process, in its own namespaces and without any privilege. It makes a workspace,
and then takes requests for consoles as the fork server does. Two more descriptors come with such a request: the socket
for its requests, and the workspace.
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

from repl_kernel import libc_calls as system
from repl_kernel import linux_namespaces as namespaces
from repl_kernel import timeout_supervisor as supervisor
from repl_kernel import workspace_setup as workspace
from repl_kernel.execute_line import reset_interpreter
from repl_kernel.output_capture import OutputCapture
from repl_kernel.request_loop import ReplKernel

_MAX_REQUEST_BYTES = 65_536
_MAX_KEY_BYTES = 1024
_SHOWN_CHARS = 2000


@dataclass(frozen=True)
class ForkServerOptions:
    """Options of the fork server."""

    isolate: bool
    """True if each console gets its own namespaces."""
    preload: list[str]
    """Modules to import before the first fork."""
    packages: Sequence[str] = ()
    """Folders in which modules are searched after Python's own."""
    kept: Sequence[str] = ()
    """Paths in this process's /tmp and /dev/shm that consoles see, although they cover these folders with their own."""


def _ignore_dead_children() -> None:
    """Let the Linux kernel reap children, because this process does not wait for them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@dataclass(frozen=True)
class _Zygote:
    """Process that consoles are forked from: the fork server, or a workspace process."""

    host_socket: socket.socket
    """Socket of its requests."""
    prepared: workspace.PreparedWorkspace | None = None

    def receive_request(self) -> tuple[namespaces.ConsoleRequest, list[int]]:
        """Return the next request, and the descriptors that come with it."""
        data, descriptors, _, _ = socket.recv_fds(self.host_socket, _MAX_REQUEST_BYTES, 3)
        if not data:
            os._exit(0)
        return namespaces.ConsoleRequest(**json.loads(data)), descriptors

    def close_in_child(self) -> list[int]:
        """Release its resources in a forked child. Return the descriptors that a supervisor must close as well."""
        self.host_socket.close()
        return [self.prepared.folder_fd] if self.prepared else []


def _exit_with_message(message: str) -> NoReturn:
    sys.stderr.write(f"repl_kernel: {message}\n")
    sys.stderr.flush()
    os._exit(1)


def _fork_supervised(
    request: namespaces.ConsoleRequest,
    connection: socket.socket,
    options: ForkServerOptions,
    unused_descriptors: Sequence[int],
) -> tuple[supervisor.ConsoleFolders, OutputCapture]:
    """Isolate a forked child, and fork again. Return in the second child only; the first one supervises it.

    Before the second child exists, the supervisor is closed to tracing, with its memory and descriptors.
    `unused_descriptors`: descriptors that the supervisor does not keep.
    """
    folders, isolate = None, options.isolate
    try:
        folders = (
            namespaces.enter_namespaces(request, options.kept) if options.isolate else namespaces.create_shared_folder()
        )
        supervisor.send_handles(connection, folders)
        capture = namespaces.open_capture(request, folders, isolate)
        if isolate:
            namespaces.drop_privileges(forks_consoles=request.prepares, keep_network=True)
        # After the fork it may be too late, because the console does not wait for this process.
        system.set_dumpable(False)
        pid = os.fork()
        if pid:
            for descriptor in unused_descriptors:
                os.close(descriptor)
            if isolate:
                namespaces.bring_up_loopback(folders)
            # The namespace of a workspace process also contains its consoles, whose own supervisors count their time.
            cpu_s = request.cpu_s if isolate and not request.prepares else None
            supervisor.supervise(connection, pid, capture, folders, owns_all=isolate, cpu_s=cpu_s)
        if isolate:
            system.drop_remaining_capabilities()
        else:
            system.set_parent_death_signal()
        system.set_dumpable(True)
    except OSError as error:
        # The host may have cancelled the request before the birth.
        if folders is not None and folders.is_temporary:
            shutil.rmtree(folders.folder, ignore_errors=True)
        _exit_with_message(str(error))
    return folders, capture


def _become_console(
    kernel: ReplKernel,
    request: namespaces.ConsoleRequest,
    descriptors: list[int],
    options: ForkServerOptions,
    zygote: _Zygote,
) -> None:
    """Turn the forked child into a console. Return in the console only."""
    unused_descriptors = zygote.close_in_child()
    connection = socket.socket(fileno=descriptors[0])
    # Read the key before the supervisor reads orders from the same socket.
    key = connection.recv(_MAX_KEY_BYTES)
    folders, capture = _fork_supervised(request, connection, options, unused_descriptors)
    try:
        namespaces.become_console(kernel, request, key, connection, capture, folders, options.isolate, zygote.prepared)
    except OSError as error:
        _exit_with_message(str(error))


def _become_zygote(
    request: namespaces.ConsoleRequest, descriptors: list[int], options: ForkServerOptions, zygote: _Zygote
) -> _Zygote:
    """Turn the forked child into a workspace process. Return in that process only, when its workspace is made."""
    zygote.close_in_child()
    connection, channel = (socket.socket(fileno=descriptor) for descriptor in descriptors[:2])
    folders, capture = _fork_supervised(request, connection, options, descriptors[1:])
    connection.close()
    with open(descriptors[2], "rb") as file:
        content = file.read()
    try:
        prepared = namespaces.become_zygote(request, capture, folders, options.isolate, content)
    except workspace.WorkspaceRefused as error:
        # The reply is the problem, or an empty object.
        problem = {"place": error.location, "value": error.value, "problem": error.problem}
        channel.send(json.dumps({name: text[:_SHOWN_CHARS] for name, text in problem.items()}).encode())
        os._exit(0)
    _ignore_dead_children()
    # Set it again, because the lines of the workspace can change it.
    system.prefer_oom_kill()
    gc.collect()
    gc.freeze()
    channel.send(b"{}")
    return _Zygote(channel, prepared)


def _connect_to_host(address: str) -> socket.socket:
    """Return the socket of requests. `address`: the number of an inherited descriptor, or the path of a socket."""
    if not address.startswith("/"):
        return socket.socket(fileno=int(address))
    host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host.connect(address)
    return host


def run_fork_server(address: str, options: ForkServerOptions, filters: Sequence[object]) -> ReplKernel:
    """Serve requests for ever. Return once in each console, with its kernel.

    `filters`: `warnings.filters` as they were before any import.
    """
    host = _connect_to_host(address)
    system.prefer_oom_kill()
    if options.isolate:
        system.overwrite_arguments(b"python3\0repl_kernel")
    for name in options.preload:
        try:
            importlib.import_module(name)
        except Exception as error:
            _exit_with_message(
                f"module {name!r} cannot be preloaded: {error}; install it where the console runs, or leave it out"
            )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ignore_dead_children()
    tempfile.tempdir = None
    kernel = ReplKernel()
    reset_interpreter(filters)
    # Keep the garbage collector away from inherited objects, so that their pages stay shared after a fork.
    gc.collect()
    gc.freeze()
    host.send(json.dumps({"python": sys.version_info[:3], "pid": os.getpid()}).encode())
    zygote = _Zygote(host)
    while True:
        request, descriptors = zygote.receive_request()
        try:
            # Only a fork server that is root receives a user id.
            pid = namespaces.fork_as_init() if options.isolate and request.uid else system.fork()
        except OSError as error:
            # No process or namespace is available. The host notices the closed connection.
            sys.stderr.write(f"repl_kernel: {error}\n")
            pid = -1
        if pid:
            for descriptor in descriptors:
                os.close(descriptor)
        elif request.prepares:
            zygote = _become_zygote(request, descriptors, options, zygote)
        else:
            _become_console(kernel, request, descriptors, options, zygote)
            return kernel
