"""Rank of this process among those that `torchrun` or `accelerate launch` started together."""

import os

VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Environment variables of the launchers. A child process that is not one of their ranks must not inherit them."""


def rank() -> int:
    """Return the rank of this process; 0 is the first, or the only one."""
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    """Return the number of processes that were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_processes() -> int:
    """Return the number of those processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_gpu(visible: int) -> int:
    """Return the index of this process's GPU among `visible` (>= 1) ones. Its trainer and its engine use that GPU.

    As in accelerate, the processes of one machine take GPUs in order. A process that sees only one GPU takes that one.
    """
    return int(os.environ.get("LOCAL_RANK", "0")) % visible
