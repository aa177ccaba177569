"""CPU cores of this machine."""

import os
from pathlib import Path


def cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def denied_s() -> float:
    """Return the seconds so far in which this thread waited for a core; 0 if Linux does not report them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0
