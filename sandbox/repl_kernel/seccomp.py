"""seccomp filter of consoles: system calls that a computation never needs fail with EPERM.

The list is in `denied_syscalls.json` next to this file. The Docker profile in `sandbox/seccomp.json` is made from the
same list. Numbers are those of x86_64 and aarch64; any other machine is refused.
"""

import errno
import json
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SOCKET = {"x86_64": 41, "aarch64": 198}
_NAMESPACE_FLAGS = 0x7E020000
# Socket families unix, inet, inet6 and netlink.
_FAMILIES = (1, 2, 10, 16)

_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def denied() -> dict[str, dict[str, int]]:
    """Return the number per machine of each denied system call, by name. A machine without such a call is left out."""
    table: dict[str, dict[str, int]] = json.loads((Path(__file__).parent / "denied_syscalls.json").read_text())[
        "syscalls"
    ]
    return table


def program(machine: str = platform.machine(), allowed: Sequence[str] = ()) -> bytes:
    """Return the BPF program for `machine`. The calls in `allowed` pass all the same.

    Raises:
        OSError: the numbers of this machine are unknown.
    """
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no seccomp filter for machine {machine!r}")
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    allow = _instruction(_RETURN, _ALLOW)
    # Kill a process that uses the calls of another architecture.
    code = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        # The x32 interface has its own numbers.
        code += [_instruction(_JUMP_AT_LEAST, 0x40000000, 0, 1), refuse]
    for name, numbers in denied().items():
        if machine in numbers and name not in allowed:
            code += [_instruction(_JUMP_EQUAL, numbers[machine], 0, 1), refuse]
    # The flags of clone3 are behind a pointer, so report that the call does not exist. libc then falls back to clone.
    code += [_instruction(_JUMP_EQUAL, _CLONE3, 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [
        # Refuse clone with flags for new namespaces.
        _instruction(_JUMP_EQUAL, _CLONE[machine], 0, 4),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_JUMP_SET, _NAMESPACE_FLAGS, 0, 1),
        refuse,
        allow,
    ]
    # Allow sockets of the listed families only.
    code += [_instruction(_JUMP_EQUAL, _SOCKET[machine], 1, 0), allow, _instruction(_LOAD, _FIRST_ARGUMENT_AT)]
    for position, family in enumerate(_FAMILIES):
        code.append(_instruction(_JUMP_EQUAL, family, len(_FAMILIES) - position, 0))
    return b"".join([*code, refuse, allow])
