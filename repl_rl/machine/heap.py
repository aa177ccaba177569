"""What the C library does with memory that this process gives back to it."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt` in glibc's malloc.h."""
KEPT = 512 * 2**20
"""Bytes at the end of the heap that stay with the process."""
_LARGEST = 32 * 2**20
"""Bytes of a block that comes from the heap at most: the largest number that glibc takes on 64 bits."""


def keep_freed() -> bool:
    """Keep up to `KEPT` bytes of freed memory for what is allocated next, in this process, from now on.

    By itself glibc gives the end of its heap back as soon as twice its largest block lies free there. Code that
    allocates and frees blocks of a few MiB without end, as a loss that is formed tile by tile does, then pays for the
    same pages again and again, or not, depending on what happens to lie behind them.

    Returns:
        Whether the C library can be told so; others than glibc decide for themselves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
