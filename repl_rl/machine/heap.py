"""Settings of the memory allocator and of Python's garbage collector in this process."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in glibc's malloc.h."""
KEPT = 512 * 2**20
"""Free memory that the process keeps at the end of the heap, bytes."""
_LARGEST = 32 * 2**20
"""Largest block that comes from the heap, bytes. It is the largest value that glibc accepts on 64 bits."""

_COLLECTIONS = 20_000, 10, 10
"""Thresholds of the garbage collector: new objects before it looks at the youngest generation, and collections of a
generation before it looks at the next older one."""


def keep_freed() -> bool:
    """Keep up to `KEPT` bytes of freed memory in this process for later allocations.

    By default, glibc returns the end of its heap as soon as twice its largest block is free there. Code that keeps
    allocating and freeing blocks of a few MiB, such as a tiled loss, may then pay for the same pages repeatedly.
    Whether it does depends on the blocks that happen to lie behind them.

    Returns:
        True if the C library accepts the settings; libraries other than glibc may not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))


@contextmanager
def rare_collections() -> Iterator[None]:
    """Run the garbage collector less often during a `with` block.

    A process that receives tens of thousands of records creates many objects and hardly any reference cycles. By
    default, Python's collector walks those objects and all modules repeatedly. Here it skips the objects that exist at
    the start, and looks at the rest far less often. `repl-rl bench fleet` measures the effect on a fleet's owner.
    """
    before = gc.get_threshold()
    # Collect once, then move all current objects out of the collector's reach.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
