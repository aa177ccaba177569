"""A verb in several processes, as `torchrun` and `accelerate launch` start it: the first one speaks and writes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from repl_rl.errors import BrokenDown, ConfigError
from repl_rl.machine.launched import processes, rank

_PATIENCE_S = 60.0
"""How long others wait for the end that the first process brings."""


def hush() -> None:
    """Say only what went wrong, in a process that is not the first: the others say the rest alike."""
    if rank():
        logging.getLogger().setLevel(logging.ERROR)


def who() -> str:
    """What this process's errors begin with."""
    return f"repl-rl: process {rank()}" if rank() else "repl-rl"


@contextmanager
def led() -> Iterator[None]:
    """A block in which every process finds the same faults of the command: the first one is left the time to say so,
    and to end. Whoever ended sooner would have it stopped before it speaks."""
    try:
        yield
    except ConfigError:
        if rank():
            threading.Event().wait(_PATIENCE_S)
        raise


def explained_by_others(error: BaseException) -> BaseException:
    """`error`; or what it means: the connection to a process that has ended is all that is left of it."""
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    if not (processes() > 1 and lost):
        return error
    return BrokenDown("process of this run", "one that has ended", f"see what it said ({error}), mend that")
