"""Start of a console in a forked process: user, namespaces, mounts, privileges and limits, then its kernel."""

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
"""User id of a console, as it sees itself."""
_NAMESPACES = system.CLONE_NEWNS | system.CLONE_NEWIPC | system.CLONE_NEWUTS | system.CLONE_NEWCGROUP
_MIB = 1 << 20
_OUTPUT_SLACK_BYTES = 4 * _MIB
_PENDING_SIGNALS = 256
"""Maximum queued signals of one console."""
_OUR_PROCESSES = 3
"""Processes and threads that are not the program's: the supervisor and two threads of the kernel's socket library."""
_SENDING_MS = 1000
_TCP_BUFFER_BYTES = "4096 65536 131072"
"""Minimum, initial and maximum buffer size of a TCP socket."""
_FILTER = system.Filter(seccomp.program())
"""seccomp filter of a console. The fork server makes it once, because a console may not be able to read the list."""
_STATION_FILTER = system.Filter(seccomp.program(allowed=("unshare", "mount")))
"""seccomp filter of a workspace process, whose children must still leave its namespaces. They add `_FILTER`."""


@dataclass(frozen=True)
class Request:
    """Request of the host."""

    uid: int
    """User id of the console outside. 0 means that of the fork server."""
    cpu_s: float
    memory_mb: int
    output_bytes: int
    processes: int
    open_files: int
    disk_mb: int
    inodes: int
    prepares: bool = False
    """True to request a workspace process, which makes a workspace and forks consoles, instead of a console."""


def fork_first() -> int:
    """Fork as `system.fork` does, with the child as the first process of a new namespace. The fork server must be root.

    This needs one fork less than unshare in a child and a second fork, which is a fifth of the cost of a start.

    Raises:
        OSError: no further namespace is available; nothing was forked.
    """
    pid = -1
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        system.unshare(system.CLONE_NEWPID)
        try:
            pid = system.fork()
        finally:
            if pid:
                # Only the parent returns to its own namespace.
                system.enter(own, system.CLONE_NEWPID)
    finally:
        os.close(own)
    return pid


def isolate(request: Request, kept: Sequence[str]) -> Place:
    """Leave every namespace of the fork server. Return in process 1 of the new namespaces.

    `kept`: paths in the console's private folders that must stay visible.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output_bytes = _OUTPUT_SLACK_BYTES + 4 * request.output_bytes
    sizes = mounts.Sizes(request.uid, request.disk_mb, request.inodes, output_bytes)
    if request.uid:
        # As root, mount first: a user namespace may not mount a /proc of which bubblewrap has covered parts.
        system.unshare(_NAMESPACES)
        mounts.mount_own(sizes, kept)
        proc = mounts.open_proc(sealed=not request.prepares)
        os.setgroups([])
        os.setresgid(request.uid, request.uid, request.uid)
        os.setresuid(request.uid, request.uid, request.uid)
        # Otherwise the files in /proc/self belong to root.
        system.set_dumpable(True)
        _enter_user_namespace(system.CLONE_NEWNET, proc)
    else:
        # Without root, only a user namespace allows the mounts. Fork afterwards to enter the new process namespace.
        outside = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _enter_user_namespace(_NAMESPACES | system.CLONE_NEWPID | system.CLONE_NEWNET, outside)
        os.close(outside)
        if system.fork():
            os._exit(0)
        mounts.mount_own(sizes, kept)
        proc = mounts.open_proc(sealed=not request.prepares)
    _bound_sockets(proc)
    os.close(proc)
    loopback = os.eventfd(0, os.EFD_CLOEXEC)
    return Place(mounts.FOLDER, mounts.scratch(kept), temporary=False, loopback=loopback)


def _enter_user_namespace(others: int, proc: int) -> None:
    """Move into a new user namespace, and into its namespaces `others`. `proc`: descriptor of a writable /proc."""
    uid, gid = os.getuid(), os.getgid()
    system.unshare(system.CLONE_NEWUSER | others)
    maps = {"setgroups": "deny", "uid_map": f"{CONSOLE_UID} {uid} 1", "gid_map": f"{CONSOLE_UID} {gid} 1"}
    for name, text in maps.items():
        _write(proc, f"self/{name}", text)


def _bound_sockets(proc: int) -> None:
    """Limit the buffers of the console's sockets, because the memory of TCP has only a limit for the whole machine."""
    for name in ("tcp_rmem", "tcp_wmem"):
        _write(proc, f"sys/net/ipv4/{name}", _TCP_BUFFER_BYTES)


def _write(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    os.write(file, text.encode())
    os.close(file)


def renounce(station: bool = False, *, keep_network: bool = False) -> None:
    """Give up all capabilities, all ways to gain one, and all system calls that a computation does not need.

    `station`: the process may still fork consoles. `keep_network`: as in `system.drop_capabilities`.
    """
    system.drop_capabilities(keep_network=keep_network)
    system.no_new_privileges()
    system.install_filter(_STATION_FILTER if station else _FILTER)


def raise_loopback(place: Place) -> None:
    """Bring up the loopback interface, then give up the right to. The supervisor does this while its console starts.

    The Linux kernel may take milliseconds on a busy machine, and the console would otherwise wait for them.
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
    """Return a folder of the machine itself, for the `unsafe` sandbox."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    system.adopt_orphans()
    # A signal to the process group of a workspace process must not end the supervisors of its consoles.
    os.setpgid(0, 0)
    folder = tempfile.mkdtemp(prefix="repl-rl-")
    scratch = os.path.join(folder, "scratch")
    os.mkdir(scratch, 0o700)
    return Place(folder, scratch, temporary=True)


def open_capture(request: Request, place: Place, isolated: bool) -> Capture:
    """Open the file that receives the console's output."""
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
    """Make `kernel` the kernel of this process, report that to the host, and set the limits.

    `key`: the console's HMAC key. The host sends it to this process only, because every later console could read in its
    own memory what the fork server knows.

    SIGINT stays ignored, as in the fork server, until `kernel` serves: the host may send it from READY on.

    `prepared`: workspace that this process was forked with; None means that its console starts empty.
    """
    _settle(capture, place)
    if prepared is not None:
        workspace.lay_copies(prepared.scratch)
        os.close(prepared.scratch)
    if prepared is not None and prepared.random_state is not None:
        random.setstate(prepared.random_state)
    elif "numpy.random" in sys.modules:
        # `random` seeds itself after a fork, but numpy only at its import.
        sys.modules["numpy.random"].seed()
    _start(kernel, key, capture, place, prepared.console if prepared else Console())
    # READY also means that the loopback interface is up.
    _await_loopback(place)
    connection.send(READY)
    connection.close()
    for kind, pair in _limits(request, isolated).items():
        _, hard = resource.getrlimit(kind)
        # A process cannot raise a hard limit.
        ceiling = pair[1] if hard == resource.RLIM_INFINITY else min(pair[1], hard)
        resource.setrlimit(kind, (min(pair[0], ceiling), ceiling))


def become_station(
    request: Request, capture: Capture, place: Place, isolated: bool, content: bytes
) -> workspace.Prepared:
    """Make a workspace in this process, within the limits of a console, and keep nothing that its children would share.

    Raises:
        Refused: the workspace cannot be made.
    """
    _await_loopback(place)
    outside = os.environ.get("TMPDIR", "/tmp")
    _settle(capture, place)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _limited(_limits(request, isolated)):
        prepared = workspace.make(content)
    if isolated:
        # Processes that the workspace left running would not be counted, and no console would see them.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    # Consoles without namespaces must not make their folders in this process's folder.
    os.environ["TMPDIR"] = outside
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    capture.leave()
    return prepared


def _settle(capture: Capture, place: Place) -> None:
    """Begin as a process that runs user code, with its own process group, folder and output, and without input."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir(place.scratch)
    # Container engines set HOSTNAME.
    os.environ.pop("HOSTNAME", None)
    os.environ["HOME"] = os.environ["TMPDIR"] = place.scratch
    tempfile.tempdir = None
    capture.install()


def _start(kernel: ReplKernel, key: bytes, capture: Capture, place: Place, repl: Console) -> None:
    context = zmq.Context()
    shell = context.socket(zmq.ROUTER)
    shell.linger = _SENDING_MS
    folder = place.folder
    if place.temporary:
        # The length of a socket's address is limited, and a folder of the machine may have a long path. The descriptor
        # stays open, because ZeroMQ removes the socket by its address at the end.
        folder = f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"
    shell.bind(f"ipc://{folder}/shell")
    repl.before_traceback = capture.make_room
    repl.offer_submit()
    kernel.start_console(key, repl, capture, shell)


def _limits(request: Request, isolated: bool) -> dict[int, tuple[int, int]]:
    """Return the soft and hard limits of this process, on top of the resources that the kernel itself already uses."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    # RLIMIT_AS counts the kernel's own address space, too.
    space = used + request.memory_mb * _MIB
    cpu_s = ceil(request.cpu_s)
    # RLIMIT_NOFILE limits the highest number of a descriptor, not their count.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    limits = {
        resource.RLIMIT_AS: (space, space),
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_NOFILE: (highest + request.open_files,) * 2,
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    if isolated:
        # These limits count per user namespace. Outside of one, they would count the user's other processes.
        limits[resource.RLIMIT_NPROC] = (request.processes + _OUR_PROCESSES,) * 2
        # Queued signals also count for the user outside.
        limits[resource.RLIMIT_SIGPENDING] = (_PENDING_SIGNALS,) * 2
    else:
        limits[resource.RLIMIT_FSIZE] = (_file_bytes(request),) * 2
    return limits


def _file_bytes(request: Request) -> int:
    """Return the maximum size of a file if no mount limits it."""
    return max(request.disk_mb * _MIB, _OUTPUT_SLACK_BYTES + 4 * request.output_bytes)


@contextmanager
def _limited(limits: dict[int, tuple[int, int]]) -> Iterator[None]:
    """Set limits within the context. Only soft limits are set, because hard ones would hold for all later consoles."""
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, (soft, _) in limits.items():
        _, hard = before[kind]
        resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        for kind, pair in before.items():
            resource.setrlimit(kind, pair)
