"""seccomp filter of consoles: system calls that a computation never needs fail with EPERM.

The list is in `denied_syscalls.json` next to this file. Some other calls are refused for certain arguments only. The
Docker profile in `sandbox/seccomp.json` has the same list and the same arguments. Numbers are those of x86_64 and
aarch64; any other machine is refused.
"""

import errno
import json
import platform
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_NAMESPACE_FLAGS = 0x7E020000
# Socket families unix, inet, inet6 and netlink.
_FAMILIES = (1, 2, 10, 16)
_PAIR_FAMILIES = (1,)

_ON_SUPERVISOR: dict[int, tuple[int, ...]] = {0: (1,)}
REFUSED_ARGUMENTS: dict[str, tuple[dict[str, int], dict[int, tuple[int, ...]]]] = {
    # F_SETLEASE and F_SETDELEG delay the host's opening of a file, F_NOTIFY and F_SETPIPE_SZ use what is counted per
    # user.
    "fcntl": ({"x86_64": 72, "aarch64": 25}, {1: (1024, 1040, 1026, 1031)}),
    # A supervisor is process 1. If it ran rarely or never, nothing would count the CPU time of its console.
    "sched_setscheduler": ({"x86_64": 144, "aarch64": 119}, _ON_SUPERVISOR),
    "sched_setparam": ({"x86_64": 142, "aarch64": 118}, _ON_SUPERVISOR),
    "sched_setattr": ({"x86_64": 314, "aarch64": 274}, _ON_SUPERVISOR),
    "sched_setaffinity": ({"x86_64": 203, "aarch64": 122}, _ON_SUPERVISOR),
    # PRIO_USER means all processes of the user, so the supervisor, too.
    "setpriority": ({"x86_64": 141, "aarch64": 140}, {0: (2,), 1: (1,)}),
}
"""Calls that are refused if an argument has one of the listed values: number per machine, values per argument."""

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT, _ARGUMENT_BYTES = 0, 4, 16, 8


def _encode_instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


_REFUSE = _encode_instruction(_RETURN, _ERRNO | errno.EPERM)
_PERMIT = _encode_instruction(_RETURN, _ALLOW)


def _compare(number: int, values: Mapping[int, Sequence[int]], if_listed: bytes, if_other: bytes) -> list[bytes]:
    """Return the code that ends call `number` with `if_listed` if an argument has a listed value, else with `if_other`.

    Only the low 32 bits are compared, because the Linux kernel reads no more of these arguments.
    """
    body: list[bytes] = []
    for argument, listed_values in values.items():
        body.append(_encode_instruction(_LOAD, _FIRST_ARGUMENT_AT + _ARGUMENT_BYTES * argument))
        for value in listed_values:
            body += [_encode_instruction(_JUMP_EQUAL, value, 0, 1), if_listed]
    body.append(if_other)
    return [_encode_instruction(_JUMP_EQUAL, number, 0, len(body)), *body]


def list_denied_calls() -> dict[str, dict[str, int]]:
    """Return the number per machine of each denied system call, by name. A machine without such a call is left out."""
    table: dict[str, dict[str, int]] = json.loads((Path(__file__).parent / "denied_syscalls.json").read_text())[
        "syscalls"
    ]
    return table


def build_filter(machine: str = platform.machine(), allowed: Sequence[str] = ()) -> bytes:
    """Return the BPF program for `machine`. The calls in `allowed` pass all the same.

    Raises:
        OSError: the numbers of this machine are unknown.
    """
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp filter for machine {machine!r}")
    # Kill a process that uses the calls of another architecture.
    code = [
        _encode_instruction(_LOAD, _ARCH_AT),
        _encode_instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _encode_instruction(_RETURN, _KILL),
        _encode_instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        # The x32 interface has its own numbers.
        code += [_encode_instruction(_JUMP_AT_LEAST, 0x40000000, 0, 1), _REFUSE]
    for name, numbers in list_denied_calls().items():
        if machine in numbers and name not in allowed:
            code += [_encode_instruction(_JUMP_EQUAL, numbers[machine], 0, 1), _REFUSE]
    # The flags of clone3 are behind a pointer, so report that the call does not exist. libc then falls back to clone.
    code += [_encode_instruction(_JUMP_EQUAL, _CLONE3, 0, 1), _encode_instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [
        # Refuse clone with flags for new namespaces.
        _encode_instruction(_JUMP_EQUAL, _CLONE[machine], 0, 4),
        _encode_instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _encode_instruction(_JUMP_SET, _NAMESPACE_FLAGS, 0, 1),
        _REFUSE,
        _PERMIT,
    ]
    for numbers, values in REFUSED_ARGUMENTS.values():
        code += _compare(numbers[machine], values, _REFUSE, _PERMIT)
    # Allow sockets of the listed families only.
    code += _compare(_SOCKET[machine], {0: _FAMILIES}, _PERMIT, _REFUSE)
    code += _compare(_SOCKETPAIR[machine], {0: _PAIR_FAMILIES}, _PERMIT, _REFUSE)
    return b"".join([*code, _PERMIT])
