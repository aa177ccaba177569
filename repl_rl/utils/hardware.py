"""CPU cores and GPU that this process uses, and its settings of the memory allocator and the garbage collector."""

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

from repl_rl.utils.processes import choose_gpu

_BFLOAT16_PROBE = (
    "import sys, torch; torch.cuda.set_device(int(sys.argv[1])); print(torch.cuda.is_bf16_supported(False))"
)
"""Program that prints True if the GPU of the given index computes in bfloat16."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in glibc's malloc.h."""
KEPT = 512 * 2**20
"""Free memory that the process keeps at the end of the heap, bytes."""
_LARGEST_BLOCK = 32 * 2**20
"""Largest block that comes from the heap, bytes. It is the largest value that glibc accepts on 64 bits."""
_GC_THRESHOLDS = 20_000, 10, 10
"""Thresholds of the garbage collector: new objects before it looks at the youngest generation, and collections of a
generation before it looks at the next older one."""


def count_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_cpu_wait_s() -> float:
    """Return the seconds so far in which this thread waited for a core; 0 if Linux does not report them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class GpuInfo(Protocol):
    """Properties of the GPU that a process trains on."""

    def exists(self) -> bool:
        """Return True if this process has a GPU."""

    def supports_bfloat16(self) -> bool:
        """Return True if the GPU computes in bfloat16."""


class LocalGpuInfo:
    """Properties of the GPU on this machine."""

    def exists(self) -> bool:
        """See `GpuInfo.exists`."""
        return _count_visible_gpus() > 0

    def supports_bfloat16(self) -> bool:
        """See `GpuInfo.supports_bfloat16`. A child process asks, because asking would initialise CUDA here."""
        return _count_visible_gpus() > 0 and _probe_bfloat16(choose_gpu(_count_visible_gpus()))


@cache
def _count_visible_gpus() -> int:
    # The import takes seconds, which verbs that need no GPU should not spend.
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@cache
def _probe_bfloat16(number: int) -> bool:
    result = subprocess.run(
        [sys.executable, "-P", "-c", _BFLOAT16_PROBE, str(number)], capture_output=True, text=True, check=False
    )
    return result.returncode == 0 and result.stdout.strip() == "True"


def retain_freed_memory() -> bool:
    """Keep up to `KEPT` bytes of freed memory in this process for later allocations.

    By default, glibc returns the end of its heap as soon as twice its largest block is free there. Code that keeps
    allocating and freeing blocks of a few MiB, such as a tiled loss, may then pay for the same pages repeatedly.
    The effect depends on the blocks that happen to lie behind them.

    Returns:
        True if the C library accepts the settings; libraries other than glibc may not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return (
        mallopt is not None and bool(mallopt(_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK))
    )


@contextmanager
def reduce_gc_frequency() -> Iterator[None]:
    """Run the garbage collector less often during a `with` block.

    A process that receives tens of thousands of records creates many objects and hardly any reference cycles. By
    default, Python's collector walks those objects and all modules repeatedly. Here it skips the objects that exist at
    the start, and looks at the rest far less often. `repl-rl bench fleet` measures the effect on a fleet's owner.
    """
    thresholds = gc.get_threshold()
    # Collect once, then move all current objects out of the collector's reach.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
