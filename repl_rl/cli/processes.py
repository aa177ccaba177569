"""Runs of several processes, as `torchrun` and `accelerate launch` start them: only rank 0 prints and writes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from repl_rl.errors import BrokenDown, ConfigError
from repl_rl.machine.launched import processes, rank

_PATIENCE_S = 60.0
"""Time that other ranks wait for rank 0 to end the run, seconds."""


def hush() -> None:
    """Log errors only, on ranks above 0. Their other messages would repeat those of rank 0."""
    if rank():
        logging.getLogger().setLevel(logging.ERROR)


def who() -> str:
    """Return the prefix of this process's error messages."""
    return f"repl-rl: process {rank()}" if rank() else "repl-rl"


@contextmanager
def led() -> Iterator[None]:
    """Let rank 0 report its ConfigError first, in a block that raises one on every rank.

    The launcher stops all processes as soon as one ends. A faster rank would stop rank 0 before its message.
    """
    try:
        yield
    except ConfigError:
        if rank():
            threading.Event().wait(_PATIENCE_S)
        raise


def explained_by_others(error: BaseException) -> BaseException:
    """Return `error`, or a BrokenDown if it is a lost connection to a process that has ended."""
    # torch raises a plain RuntimeError for a lost connection, so its text decides.
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    if not (processes() > 1 and lost):
        return error
    return BrokenDown("process of this run", "one that has ended", f"see what it said ({error}), repair that")
