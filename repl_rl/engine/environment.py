"""Environment variables for vLLM's processes, set for a while and then taken back."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from repl_rl.engine.options import EngineOptions


def log_level(options: EngineOptions) -> Mapping[str, str]:
    """What vLLM and torch read when they are imported."""
    if options.verbose:
        return {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1"}
    return {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def cores() -> int:
    """Cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_ALONE = threading.RLock()
"""Two blocks that overlapped would each restore what the other had set."""


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, then restore all, those that vLLM itself set included.

    vLLM leaves LD_PRELOAD and thread counts behind, which the consoles' processes would inherit. A block waits for
    another thread's to end, so it belongs into a worker thread.
    """
    with _ALONE:
        before = dict(os.environ)
        os.environ.update(values)
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
