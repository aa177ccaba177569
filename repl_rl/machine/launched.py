"""Which of the processes that were started together this is, as `torchrun` and `accelerate launch` say it."""

import os

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""What they say it in. A process that is started from here and is none of them must not have it."""


def rank() -> int:
    """This process's number among all; 0: the first, or the only one."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_processes() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_gpu(visible: int) -> int:
    """Which of `visible` (>= 1) GPUs is this process's own, from 0; it trains there, and its engine samples there.

    As accelerate chooses it: processes of one machine take them in order, and each its only one where a launcher shows
    it no other.
    """
    return int(os.environ.get("LOCAL_RANK", "0")) % visible
