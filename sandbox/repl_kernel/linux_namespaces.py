"""Start of a console in a forked process: namespaces, mounts, user, privileges and limits, then its kernel.

A workspace process starts in the same way, but makes a workspace instead of starting a kernel. The file systems of a
console are its own: scratch space that starts empty, and nothing of its siblings.
"""

import errno
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

from repl_kernel import libc_calls as system
from repl_kernel import seccomp
from repl_kernel import workspace_setup as workspace
from repl_kernel.execute_line import ReplConsole
from repl_kernel.output_capture import OutputCapture
from repl_kernel.request_loop import ReplKernel
from repl_kernel.timeout_supervisor import READY, ConsoleFolders

CONSOLE_UID = 1000
"""User id of a console, as it sees itself."""
FOLDER = "/run/console"
"""Folder of a console's socket and its output file."""
_SCRATCH, _SHARED = "/tmp", "/dev/shm"
_LOCKED = system.MS_NOSUID | system.MS_NODEV
"""Flags of a mount that contains no devices."""
_TERMINALS = 16
"""Maximum pseudo terminals of a console. The machine has 4,096 for all."""
_NAMESPACES = system.CLONE_NEWNS | system.CLONE_NEWIPC | system.CLONE_NEWUTS | system.CLONE_NEWCGROUP
_MIB = 1 << 20
_OUTPUT_SLACK_BYTES = 4 * _MIB
_PENDING_SIGNALS = 256
"""Maximum queued signals of one console."""
_OUR_PROCESSES = 3
"""Processes and threads that are not the program's: the supervisor and two threads of the kernel's socket library."""
_SENDING_MS = 1000
"""Time for the last messages of a kernel to be sent, milliseconds."""
_TCP_BUFFER_BYTES = "4096 65536 131072"
"""Minimum, initial and maximum buffer size of a TCP socket."""
_FILTER = system.Filter(seccomp.build_filter())
"""seccomp filter of a console. The fork server makes it once, because a console may not be able to read the list."""
_ZYGOTE_FILTER = system.Filter(seccomp.build_filter(allowed=("unshare", "mount")))
"""seccomp filter of a workspace process, whose children must still leave its namespaces. They add `_FILTER`."""


@dataclass(frozen=True)
class ConsoleRequest:
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


def fork_as_init() -> int:
    """Fork as `system.fork` does, with the child as the first process of a new namespace. The fork server must be root.

    This needs one fork less than unshare in a child and a second fork, which is a fifth of the cost of a start.

    Raises:
        OSError: no further namespace is available; nothing was forked.
    """
    pid = -1
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        system.unshare_namespaces(system.CLONE_NEWPID)
        try:
            pid = system.fork()
        finally:
            if pid:
                # Only the parent returns to its own namespace.
                system.enter_namespace(own_namespace, system.CLONE_NEWPID)
    finally:
        os.close(own_namespace)
    return pid


def enter_namespaces(request: ConsoleRequest, visible_paths: Sequence[str]) -> ConsoleFolders:
    """Leave every namespace of the fork server. Return in process 1 of the new namespaces.

    `visible_paths`: paths in the console's private folders that must stay visible.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output_bytes = _OUTPUT_SLACK_BYTES + 4 * request.output_bytes
    sizes = MountSizes(request.uid, request.disk_mb, request.inodes, output_bytes)
    if request.uid:
        # As root, mount first: a user namespace may not mount a /proc of which bubblewrap has covered parts.
        system.unshare_namespaces(_NAMESPACES)
        mount_console_folders(sizes, visible_paths)
        proc = open_proc(sealed=not request.prepares)
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
        mount_console_folders(sizes, visible_paths)
        proc = open_proc(sealed=not request.prepares)
    _limit_socket_buffers(proc)
    os.close(proc)
    loopback = os.eventfd(0, os.EFD_CLOEXEC)
    return ConsoleFolders(FOLDER, choose_working_folder(visible_paths), is_temporary=False, loopback_ready_fd=loopback)


def _enter_user_namespace(other_flags: int, proc: int) -> None:
    """Move into a new user namespace, and into those of `other_flags`. `proc`: descriptor of a writable /proc."""
    uid, gid = os.getuid(), os.getgid()
    system.unshare_namespaces(system.CLONE_NEWUSER | other_flags)
    maps = {"setgroups": "deny", "uid_map": f"{CONSOLE_UID} {uid} 1", "gid_map": f"{CONSOLE_UID} {gid} 1"}
    for name, text in maps.items():
        _write_proc(proc, f"self/{name}", text)


def _limit_socket_buffers(proc: int) -> None:
    """Limit the buffers of the console's sockets, because the memory of TCP has only a limit for the whole machine."""
    for name in ("tcp_rmem", "tcp_wmem"):
        _write_proc(proc, f"sys/net/ipv4/{name}", _TCP_BUFFER_BYTES)


def _write_proc(proc: int, name: str, text: str) -> None:
    file = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    os.write(file, text.encode())
    os.close(file)


def drop_privileges(forks_consoles: bool = False, *, keep_network: bool = False) -> None:
    """Give up all capabilities, all ways to gain one, and all system calls that a computation does not need.

    `forks_consoles`: the process may still fork consoles. `keep_network`: as in `system.drop_capabilities`.
    """
    system.drop_capabilities(keep_network=keep_network)
    system.forbid_new_privileges()
    system.install_seccomp_filter(_ZYGOTE_FILTER if forks_consoles else _FILTER)


def bring_up_loopback(folders: ConsoleFolders) -> None:
    """Bring up the loopback interface, then give up the right to. The supervisor does this while its console starts.

    The Linux kernel may take milliseconds on a busy machine, and the console would otherwise wait for them.
    """
    system.bring_up_loopback()
    system.drop_remaining_capabilities()
    os.eventfd_write(folders.loopback_ready_fd, 1)
    os.close(folders.loopback_ready_fd)


def _wait_for_loopback(folders: ConsoleFolders) -> None:
    if folders.loopback_ready_fd >= 0:
        os.eventfd_read(folders.loopback_ready_fd)
        os.close(folders.loopback_ready_fd)


def create_shared_folder() -> ConsoleFolders:
    """Return a folder of the machine itself, for the `unsafe` sandbox."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    system.become_subreaper()
    # A signal to the process group of a workspace process must not end the supervisors of its consoles.
    os.setpgid(0, 0)
    folder = tempfile.mkdtemp(prefix="repl-rl-")
    scratch = os.path.join(folder, "scratch")
    os.mkdir(scratch, 0o700)
    return ConsoleFolders(folder, scratch, is_temporary=True)


def open_capture(request: ConsoleRequest, folders: ConsoleFolders, isolated: bool) -> OutputCapture:
    """Open the file that receives the console's output."""
    if isolated:
        return OutputCapture(folders.folder, request.output_bytes)
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else folders.folder
    with tempfile.TemporaryDirectory(prefix="repl-rl-", dir=folder) as unique:
        return OutputCapture(unique, request.output_bytes, _compute_max_file_bytes(request))


def become_console(
    kernel: ReplKernel,
    request: ConsoleRequest,
    key: bytes,
    connection: socket.socket,
    capture: OutputCapture,
    folders: ConsoleFolders,
    isolated: bool,
    prepared: workspace.PreparedWorkspace | None,
) -> None:
    """Make `kernel` the kernel of this process, report that to the host, and set the limits.

    `key`: the console's HMAC key. The host sends it to this process only, because every later console could read in its
    own memory what the fork server knows.

    SIGINT stays ignored, as in the fork server, until `kernel` serves: the host may send it from READY on.

    `prepared`: workspace that this process was forked with; None means that its console starts empty.
    """
    _redirect_process(capture, folders)
    if prepared is not None:
        workspace.copy_files(prepared.folder_fd)
        os.close(prepared.folder_fd)
    if prepared is not None and prepared.random_state is not None:
        random.setstate(prepared.random_state)
    elif "numpy.random" in sys.modules:
        # `random` seeds itself after a fork, but numpy only at its import.
        sys.modules["numpy.random"].seed()
    _start_kernel(kernel, key, capture, folders, prepared.console if prepared else ReplConsole())
    # READY also means that the loopback interface is up.
    _wait_for_loopback(folders)
    connection.send(READY)
    connection.close()
    for limit, pair in _compute_rlimits(request, isolated).items():
        _, hard = resource.getrlimit(limit)
        # A process cannot raise a hard limit.
        ceiling = pair[1] if hard == resource.RLIM_INFINITY else min(pair[1], hard)
        resource.setrlimit(limit, (min(pair[0], ceiling), ceiling))


def become_zygote(
    request: ConsoleRequest, capture: OutputCapture, folders: ConsoleFolders, isolated: bool, content: bytes
) -> workspace.PreparedWorkspace:
    """Make a workspace in this process, within the limits of a console, and keep nothing that its children would share.

    Raises:
        WorkspaceRefused: the workspace cannot be made.
    """
    _wait_for_loopback(folders)
    outside = os.environ.get("TMPDIR", "/tmp")
    _redirect_process(capture, folders)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with _apply_soft_limits(_compute_rlimits(request, isolated)):
        prepared = workspace.build_workspace(content)
    if isolated:
        # Processes that the workspace left running would not be counted, and no console would see them.
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    # Consoles without namespaces must not make their folders in this process's folder.
    os.environ["TMPDIR"] = outside
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    capture.detach()
    return prepared


def _redirect_process(capture: OutputCapture, folders: ConsoleFolders) -> None:
    """Begin as a process that runs user code, with its own process group, folder and output, and without input."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir(folders.scratch)
    # Container engines set HOSTNAME.
    os.environ.pop("HOSTNAME", None)
    os.environ["HOME"] = os.environ["TMPDIR"] = folders.scratch
    tempfile.tempdir = None
    capture.redirect_and_reopen()


def _start_kernel(
    kernel: ReplKernel, key: bytes, capture: OutputCapture, folders: ConsoleFolders, repl: ReplConsole
) -> None:
    context = zmq.Context()
    shell = context.socket(zmq.ROUTER)
    shell.linger = _SENDING_MS
    folder = folders.folder
    if folders.is_temporary:
        # The length of a socket's address is limited, and a folder of the machine may have a long path. The descriptor
        # stays open, because ZeroMQ removes the socket by its address at the end.
        folder = f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}"
    shell.bind(f"ipc://{folder}/shell")
    repl.on_traceback = capture.free_middle
    repl.install_submit_function()
    kernel.start_console(key, repl, capture, shell)


def _compute_rlimits(request: ConsoleRequest, isolated: bool) -> dict[int, tuple[int, int]]:
    """Return the soft and hard limits of this process, on top of the resources that the kernel itself already uses."""
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    # RLIMIT_AS counts the kernel's own address space, too.
    space = used_bytes + request.memory_mb * _MIB
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
        limits[resource.RLIMIT_FSIZE] = (_compute_max_file_bytes(request),) * 2
    return limits


def _compute_max_file_bytes(request: ConsoleRequest) -> int:
    """Return the maximum size of a file if no mount limits it."""
    return max(request.disk_mb * _MIB, _OUTPUT_SLACK_BYTES + 4 * request.output_bytes)


@contextmanager
def _apply_soft_limits(limits: dict[int, tuple[int, int]]) -> Iterator[None]:
    """Set limits within the context. Only soft limits are set, because hard ones would hold for all later consoles."""
    previous = {limit: resource.getrlimit(limit) for limit in limits}
    for limit, (soft, _) in limits.items():
        _, hard = previous[limit]
        resource.setrlimit(limit, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    try:
        yield
    finally:
        for limit, pair in previous.items():
            resource.setrlimit(limit, pair)


# Mounts.


@dataclass(frozen=True)
class MountSizes:
    """Sizes and owner of the file systems."""

    uid: int
    """User id of the console, as the fork server sees it. 0 means that of the fork server."""
    disk_mb: int
    inodes: int
    output_bytes: int


def mount_console_folders(sizes: MountSizes, visible_paths: Sequence[str]) -> None:
    """Cover the folders of the fork server. `visible_paths`: paths in them that are shown again, read-only.

    /proc is writable until `open_proc` seals it.
    """
    # Open the visible paths before they are covered.
    opened = [(path, os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) for path in visible_paths]
    # Later mounts must not reach the namespace of the fork server.
    system.mount("", "/", "", system.MS_REC | system.MS_PRIVATE)
    owner = f",uid={sizes.uid},gid={sizes.uid}" if sizes.uid else ""
    disk = f"size={sizes.disk_mb}m,nr_inodes={sizes.inodes},mode=0700{owner}"
    system.mount("tmpfs", _SCRATCH, "tmpfs", _LOCKED, disk)
    system.mount("tmpfs", _SHARED, "tmpfs", _LOCKED, disk)
    for path, descriptor in opened:
        _remount_path(path, descriptor, sizes.uid)
        os.close(descriptor)
    output = f"size={sizes.output_bytes},nr_inodes=16,mode=0755{owner}"
    system.mount("tmpfs", FOLDER, "tmpfs", _LOCKED | system.MS_NOEXEC, output)
    _mount_terminals()
    system.mount("proc", "/proc", "proc", _LOCKED | system.MS_NOEXEC)


def _mount_terminals() -> None:
    """Mount pseudo terminals, limited in number, that no sibling sees. If the kernel cannot, mount an empty folder."""
    flags = system.MS_NOSUID | system.MS_NOEXEC
    try:
        system.mount("devpts", "/dev/pts", "devpts", flags, f"newinstance,ptmxmode=0666,mode=0620,max={_TERMINALS}")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENODEV):
            raise
        system.mount("tmpfs", "/dev/pts", "tmpfs", flags | system.MS_NODEV | system.MS_RDONLY, "size=4k,nr_inodes=1")


def open_proc(*, sealed: bool) -> int:
    """Return a descriptor of a writable /proc, for this process's own settings.

    `sealed`: the path /proc becomes read-only, so that no later code changes its `oom_score_adj`.
    """
    descriptor = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if sealed:
        system.mount("/proc", "/proc", "", system.MS_BIND)
        read_only = system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY
        system.mount("", "/proc", "", read_only | _LOCKED | system.MS_NOEXEC)
    return descriptor


def choose_working_folder(visible_paths: Sequence[str]) -> str:
    """Return the console's empty working folder: /tmp, or a folder in it if /tmp must show other paths, too."""
    if not any(path.startswith(f"{_SCRATCH}/") for path in visible_paths):
        return _SCRATCH
    folder = f"{_SCRATCH}/console"
    while folder in visible_paths:
        folder += "_"
    os.mkdir(folder, 0o700)
    return folder


def _remount_path(path: str, descriptor: int, uid: int) -> None:
    """Show the target of `descriptor` at `path`, which has just been covered."""
    source = f"/proc/self/fd/{descriptor}"
    try:
        target = os.readlink("", dir_fd=descriptor)
    except OSError:
        # Not a link.
        target = ""
    with _run_as_user(uid):
        if target:
            os.symlink(target, path)
            return
        if os.path.isdir(source):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        mount_point = os.open(path, os.O_PATH | os.O_CLOEXEC)
    system.mount(source, f"/proc/self/fd/{mount_point}", "", system.MS_BIND | system.MS_REC)
    os.close(mount_point)
    with _run_as_user(uid):
        # Open the mounted file, not the one that it covers.
        mount_point = os.open(path, os.O_PATH | os.O_CLOEXEC)
    # Mounts further below are read-only already, but the folders on the way belong to the fork server.
    read_only = system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY | _LOCKED
    system.mount("", f"/proc/self/fd/{mount_point}", "", read_only)
    os.close(mount_point)


@contextmanager
def _run_as_user(uid: int) -> Iterator[None]:
    """Make files as the console's user, because the fork server has no right to write into another user's folder."""
    if uid:
        os.seteuid(uid)
    try:
        yield
    finally:
        if uid:
            os.seteuid(0)
