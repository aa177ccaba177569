"""What this process does with memory that is given back: by the C library, and by Python's own collector."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of `mallopt` in glibc's malloc.h."""
KEPT = 512 * 2**20
"""Bytes at the end of the heap that stay with the process."""
_LARGEST = 32 * 2**20
"""Bytes of a block that comes from the heap at most: the largest number that glibc takes on 64 bits."""

_COLLECTIONS = 20_000, 10, 10
"""Objects that are made before the collector looks at the youngest, and how often at those before it goes on to older
ones."""


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


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search less for objects that only refer to one another, for the length of a `with`.

    Whoever receives records by the ten thousand makes many objects and no such garbage. By itself Python's collector
    walks those and all of this process's modules again and again; here it leaves out what was there at the beginning,
    and looks at the rest far less often. `repl-rl bench fleet` measures what a fleet's owner takes with it.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
