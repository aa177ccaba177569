"""Linux calls without a function in Python 3.11. Each raises `OSError` if the kernel refuses it."""

import ctypes
import fcntl
import os
import socket
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 22, 38, 47
_PR_SET_CHILD_SUBREAPER, _PR_CAPBSET_READ = 36, 23
_CAPABILITY_VERSION_3 = 0x20080522
_FALLOC_FL_PUNCH_HOLE_KEEP_SIZE = 3
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
# Its calls keep the interpreter's lock, as a fork must.
_interpreter = ctypes.PyDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Filter(ctypes.Structure):
    """seccomp BPF program (8 bytes per instruction) in the form of the Linux kernel, `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    def __init__(self, program: bytes) -> None:
        """Point to `program`."""
        super().__init__(len(program) // 8, program)


# Made once by the fork server, because all work in a console itself delays its start.
_THIS_PROCESS = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()
_CAP_NET_ADMIN = 12
_NETWORK_ONLY = (ctypes.c_uint32 * 6)(*(1 << _CAP_NET_ADMIN,) * 2)
with open("/proc/sys/kernel/cap_last_cap") as _file:
    _LAST_CAPABILITY = int(_file.read())


def _raise_on_error(result: int, call_name: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call_name}: {os.strerror(number)}")


def _prctl(option: int, *arguments: int) -> None:
    _raise_on_error(_libc.prctl(option, *(*arguments, 0, 0, 0, 0)[:4]), f"prctl({option})")


def fork() -> int:
    """Fork as `os.fork` does, without the functions that modules have registered for a fork.

    They prepare locks of threads and random numbers, which takes milliseconds. The child of the fork server uses
    neither before it forks again by `os.fork`.
    """
    pid: int = _interpreter.fork()
    _raise_on_error(pid, "fork")
    return pid


def unshare_namespaces(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its future children) into new namespaces."""
    _raise_on_error(_libc.unshare(flags), "unshare")


def enter_namespace(fd: int, namespace_type: int) -> None:
    """Move this process (for CLONE_NEWPID: its future children) into the namespace that `fd` refers to."""
    _raise_on_error(_libc.setns(fd, namespace_type), "setns")


def mount(source: str, target: str, filesystem_type: str, flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    _raise_on_error(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), filesystem_type.encode(), ctypes.c_ulong(flags), options.encode()
        ),
        f"mount {filesystem_type or source} on {target}",
    )


def bring_up_loopback() -> None:
    """Bring up the interface `lo` of this network namespace: 127.0.0.1, and ::1 where the kernel has IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        name, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        if not flags & _IFF_UP:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", name, flags | _IFF_UP))


def prefer_oom_kill() -> None:
    """Make the Linux kernel end this process, or one that it forks, first if the machine is out of memory."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def overwrite_arguments(name: bytes) -> None:
    """Replace the arguments that /proc shows of this process, and of processes that it forks, by `name`."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    # Fields 48 and 49 of proc(5): addresses of the arguments.
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, name, min(len(name), end - start - 1))


def set_parent_death_signal() -> None:
    """Let the Linux kernel kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def become_subreaper() -> None:
    """Become the parent of descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(flag: bool) -> None:
    """Allow or forbid other processes of this user to trace this one and to read its memory."""
    _prctl(_PR_SET_DUMPABLE, int(flag))


def drop_capabilities(*, keep_network: bool = False) -> None:
    """Give up every capability, for this process and for all programs that it executes.

    `keep_network`: this process alone keeps CAP_NET_ADMIN, until `drop_remaining_capabilities`.
    """
    drop_bounding_set()
    _prctl(_PR_CAP_AMBIENT, 4)
    _raise_on_error(_libc.capset(_THIS_PROCESS, _NETWORK_ONLY if keep_network else _NO_CAPABILITIES), "capset")


def drop_bounding_set() -> None:
    """Prevent every program that this process executes from gaining a capability. The process keeps those it has."""
    for capability in range(_LAST_CAPABILITY + 1):
        # If bubblewrap left none, as for a user other than root, the process has no right to drop any.
        result = _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        if result == -1 and _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) != 0:
            _raise_on_error(-1, f"prctl({_PR_CAPBSET_DROP})")


def become_user(uid: int) -> None:
    """Change from root to a user without capabilities, for good."""
    # Only root may empty the bounding set.
    drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_remaining_capabilities() -> None:
    """Give up the capability that `drop_capabilities` has kept."""
    _raise_on_error(_libc.capset(_THIS_PROCESS, _NO_CAPABILITIES), "capset")


def forbid_new_privileges() -> None:
    """Prevent every later execve from gaining privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_seccomp_filter(program: Filter) -> None:
    """Install a seccomp filter on this process. It requires `forbid_new_privileges`."""
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(program))


def punch_hole(fd: int, start: int, end: int) -> None:
    """Free the storage of bytes [start, end) of a file without changing its size."""
    _raise_on_error(_libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE_KEEP_SIZE, start, end - start), "fallocate")
