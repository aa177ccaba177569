"""AMX tile registers of x86 processors: Linux gives them only to processes that ask."""

import ctypes
import platform
import sys

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XTILEDATA = 18
"""Numbers from Linux: Documentation/arch/x86/xstate.rst."""


def request_amx_tiles() -> bool:
    """Ask for the AMX tile registers, for this process and those it forks. Return True if it may use them.

    vLLM 0.32 multiplies bfloat16 matrices below 1 MiB with these registers and does not ask, so that the first forward
    pass of a small model kills its process.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)
