"""How a forked process becomes an isolated console: user, namespaces, mounts, privileges, limits, then its kernel."""

import os
import random
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import ceil

import zmq

from repl_kernel import mounts, seccomp, system, workspace
from repl_kernel.capture import Capture
from repl_kernel.console import Console
from repl_kernel.keeper import READY, Place
from repl_kernel.kernel import ReplKernel

CONSOLE_UID = 1000
"""Of a console, as it sees itself."""
_NAMESPACES = system.CLONE_NEWNS | system.CLONE_NEWIPC | system.CLONE_NEWUTS | system.CLONE_NEWCGROUP
_MIB = 1 << 20
_OUTPUT_SLACK_BYTES = 4 * _MIB
_OUR_PROCESSES = 3
"""The supervisor and two threads of the kernel's socket library."""
_SENDING_MS = 1000
_TCP_BUFFER_BYTES = "4096 65536 131072"
"""Least, first and largest size of the buffer of a TCP socket."""
_FILTER = seccomp.program()
"""Made once, by the fork server: a console may not be able to read the list."""
_STATION_FILTER = seccomp.program(allowed=("unshare", "mount"))
"""Of a process in which a workspace was made: its children still have to leave its namespaces. They add `_FILTER`."""


@dataclass(frozen=True)
class Request:
    """What the host asks for."""

    uid: int
    """Outside user id of the console; 0: the fork server's own."""
    cpu_s: float
    memory_mb: int
    output_bytes: int
    processes: int
    open_files: int
    disk_mb: int
    inodes: int
    prepares: bool = False
    """It is no console that is asked for, but a process in which a workspace is made, to fork consoles from."""


def fork_first() -> int:
    """As `os.fork`; the child is process 1 of a new process namespace. The fork server must be root.

    One fork less than to unshare in a child and to fork again, which is a fifth of what a birth costs.

    Raises:
        OSError: no further namespace can be had; nothing was forked.
    """
    pid = -1
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        system.unshare(system.CLONE_NEWPID)
        try:
            pid = os.fork()
        finally:
            if pid:  # not in the child: it is where it belongs
                system.enter(own, system.CLONE_NEWPID)
    finally:
        os.close(own)
    return pid


def isolate(request: Request, kept: Sequence[str]) -> Place:
    """Leave every namespace of the fork server. Returns in process 1 of the new ones.

    `kept`: what of the folders that the console gets for itself must be seen in them all the same.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output_bytes = _OUTPUT_SLACK_BYTES + 4 * request.output_bytes
    sizes = mounts.Sizes(request.uid, request.disk_mb, request.inodes, output_bytes)
    if request.uid:
        # As root: mounts first, because a user namespace may not mount a /proc where bubblewrap has covered parts.
        system.unshare(_NAMESPACES)
        mounts.mount_own(sizes, kept)
        proc = mounts.open_proc(sealed=not request.prepares)
        os.setgroups([])
        os.setresgid(request.uid, request.uid, request.uid)
        os.setresuid(request.uid, request.uid, request.uid)
        system.set_dumpable(True)  # else the files in /proc/self belong to root
        _enter_user_namespace(system.CLONE_NEWNET, proc)
    else:
        outside = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _enter_user_namespace(_NAMESPACES | system.CLONE_NEWPID | system.CLONE_NEWNET, outside)
        os.close(outside)
        if os.fork():
            os._exit(0)
        mounts.mount_own(sizes, kept)
        proc = mounts.open_proc(sealed=not request.prepares)
    _bound_sockets(proc)
    os.close(proc)
    loopback = os.eventfd(0, os.EFD_CLOEXEC)
    return Place(mounts.FOLDER, mounts.scratch(kept), temporary=False, loopback=loopback)


def _enter_user_namespace(others: int, proc: int) -> None:
    """Move into a new user namespace, and into `others`, which belong to it. `proc`: a /proc that can be written to."""
    uid, gid = os.getuid(), os.getgid()
    system.unshare(system.CLONE_NEWUSER | others)
    maps = {"setgroups": "deny", "uid_map": f"{CONSOLE_UID} {uid} 1", "gid_map": f"{CONSOLE_UID} {gid} 1"}
    for name, text in maps.items():
        _write(proc, f"self/{name}", text)


def _bound_sockets(proc: int) -> None:
    """Make the buffers of the console's sockets small: the memory of TCP is limited for the whole machine only."""
    for name in ("tcp_rmem", "tcp_wmem"):
        _write(proc, f"sys/net/ipv4/{name}", _TCP_BUFFER_BYTES)


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    os.write(file, text.encode())
    os.close(file)


def renounce(station: bool = False, *, keep_network: bool = False) -> None:
    """No capability, no way to gain one, and only the system calls of a computation; a `station` may fork consoles.

    `keep_network`: as for `system.drop_capabilities`.
    """
    system.drop_capabilities(keep_network=keep_network)
    system.no_new_privileges()
    system.install_filter(_STATION_FILTER if station else _FILTER)


def raise_loopback(place: Place) -> None:
    """Bring up the loopback interface, then give up the right to; in the supervisor, while its console is being born.

    The kernel may take milliseconds on a busy machine, which a console would otherwise wait for.
    """
    system.raise_loopback()
    system.drop_the_last()
    os.eventfd_write(place.loopback, 1)
    os.close(place.loopback)


def _await_loopback(place: Place) -> None:
    if place.loopback >= 0:
        os.eventfd_read(place.loopback)
        os.close(place.loopback)


def expose() -> Place:
    """A folder of the machine itself: for the `unsafe` sandbox."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    system.adopt_orphans()
    os.setpgid(0, 0)  # whoever ends the group of a station must not end the supervisors of its consoles
    folder = tempfile.mkdtemp(prefix="repl-rl-")
    scratch = os.path.join(folder, "scratch")
    os.mkdir(scratch, 0o700)
    return Place(folder, scratch, temporary=True)


def open_capture(request: Request, place: Place, isolated: bool) -> Capture:
    """The file that takes what the console prints."""
    if isolated:
        return Capture(place.folder, request.output_bytes)
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else place.folder
    with tempfile.TemporaryDirectory(prefix="repl-rl-", dir=folder) as unique:
        return Capture(unique, request.output_bytes, _file_bytes(request))


def become_console(
    kernel: ReplKernel,
    request: Request,
    key: bytes,
    connection: socket.socket,
    capture: Capture,
    place: Place,
    isolated: bool,
    prepared: workspace.Prepared | None,
) -> None:
    """Make `kernel` the kernel of this process, tell the host, and set the limits.

    `key`: the console's HMAC key, which the host sends to this process only: what the fork server knew, later consoles
    could read in their own memory.

    SIGINT stays ignored, as in the fork server, until `kernel` serves: the host may ask for it from READY on.

    `prepared`: what this process was forked with; None: its console starts empty.
    """
    _settle(capture, place)
    if prepared is not None:
        workspace.lay_copies(prepared.scratch)
        os.close(prepared.scratch)
    if prepared is not None and prepared.random_state is not None:
        random.setstate(prepared.random_state)
    elif "numpy.random" in sys.modules:  # `random` seeds itself after a fork; numpy does when it is first asked for
        sys.modules["numpy.random"].seed()
    _start(kernel, key, capture, place, prepared.console if prepared else Console())
    _await_loopback(place)
    connection.send(READY)
    connection.close()
    for kind, pair in _limits(request, isolated).items():
        _, hard = resource.getrlimit(kind)
        ceiling = pair[1] if hard == resource.RLIM_INFINITY else min(pair[1], hard)
        resource.setrlimit(kind, (min(pair[0], ceiling), ceiling))


def become_station(
    request: Request, capture: Capture, place: Place, isolated: bool, content: bytes
) -> workspace.Prepared:
    """Make a workspace in this process, within the limits of a console, and leave nothing that its children share.

    Raises:
        Refused: it cannot be made.
    """
    _await_loopback(place)
    outside = os.environ.get("TMPDIR", "/tmp")
    _settle(capture, place)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _limited(_limits(request, isolated)):
        prepared = workspace.make(content)
    if isolated:  # nobody counts what a workspace has left running here, and no console would see it
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    os.environ["TMPDIR"] = outside  # where consoles without namespaces get their folders: not in this one's
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    capture.leave()
    return prepared


def _settle(capture: Capture, place: Place) -> None:
    """Begin as a process that runs a user's code: a group of its own, no input, its own folder and output."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir(place.scratch)
    os.environ.pop("HOSTNAME", None)  # set by container engines
    os.environ["HOME"] = os.environ["TMPDIR"] = place.scratch
    tempfile.tempdir = None
    capture.install()


def _start(kernel: ReplKernel, key: bytes, capture: Capture, place: Place, repl: Console) -> None:
    context = zmq.Context()
    shell = context.socket(zmq.ROUTER)
    shell.linger = _SENDING_MS
    shell.bind(f"ipc://{place.folder}/shell")
    repl.before_traceback = capture.make_room
    repl.offer_submit()
    kernel.start_console(key, repl, capture, shell)


def _limits(request: Request, isolated: bool) -> dict[int, tuple[int, int]]:
    """What this process may use, soft and hard, on top of what the kernel itself already uses."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    space = used + request.memory_mb * _MIB
    cpu_s = ceil(request.cpu_s)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    limits = {
        resource.RLIMIT_AS: (space, space),
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_NOFILE: (highest + request.open_files,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    if isolated:  # counted a user namespace; outside of one it would count the user's other processes
        limits[resource.RLIMIT_NPROC] = (request.processes + _OUR_PROCESSES,) * 2
    else:
        limits[resource.RLIMIT_FSIZE] = (_file_bytes(request),) * 2
    return limits


def _file_bytes(request: Request) -> int:
    """The size of a file where no mount bounds it."""
    return max(request.disk_mb * _MIB, _OUTPUT_SLACK_BYTES + 4 * request.output_bytes)


@contextmanager
def _limited(limits: dict[int, tuple[int, int]]) -> Iterator[None]:
    """Keep limits for a while. Only soft ones are set: a hard one would hold for every console that is forked later."""
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, (soft, _) in limits.items():
        _, hard = before[kind]
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        for kind, pair in before.items():
            resource.setrlimit(kind, pair)
