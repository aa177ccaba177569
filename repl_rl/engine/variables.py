"""Environment variables for vLLM's processes, set for a while and then taken back."""

import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from repl_rl.machine.folders import private_folder

QUIET = "ERROR"
"""The level that vLLM's log has here, unless a person asks for another."""
_SET = os.environ.get("VLLM_LOGGING_LEVEL", QUIET)
ASKED_LEVEL = "" if _SET == QUIET else _SET
"""What a person has set; "": nothing. Read here, once: later another thread may be within a block that sets it.

The quiet level is nobody's wish to see more: TRL sets it when it is imported, and processes inherit it from there.
"""


def log_level() -> Mapping[str, str]:
    """What vLLM and torch read when they are imported. VLLM_LOGGING_LEVEL is heeded where a person has set it."""
    if ASKED_LEVEL:
        return {"VLLM_LOGGING_LEVEL": ASKED_LEVEL, "VLLM_NO_USAGE_STATS": "1"}
    return {
        "VLLM_LOGGING_LEVEL": QUIET,
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def hush() -> None:
    """Hold vLLM to that level from its import on, whoever imports it: it logs before it reads its variable."""
    logging.getLogger("vllm").setLevel(log_level()["VLLM_LOGGING_LEVEL"])


_LONGEST_FOLDER = 60
"""Bytes of a folder in which sockets with long names still have an address: 107 in all."""


@cache
def alias(folder: Path) -> Path:
    """A short name of a folder without spaces, for this process and its children, while this process lives."""
    return Path(f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")


def preloads(packages: Path) -> Mapping[str, str]:
    """For an installation whose path has a space: where the loader finds what vLLM preloads on CPU.

    vLLM writes paths into LD_PRELOAD, where a space or a colon separates two. It leaves alone what is there already.
    """
    if not re.search(r"[\s:]", str(packages)):
        return {}
    openmp = [*packages.glob("torch.libs/libgomp*.so*"), *packages.glob("torch/lib/libgomp*.so*")]
    allocator = [*packages.glob("vllm/libs/libtcmalloc*.so*")]
    found = [alias(packages) / path.relative_to(packages) for path in (*openmp[:1], *allocator[:1])]
    return {"LD_PRELOAD": ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), *map(str, found)])}


@contextmanager
def sockets() -> Iterator[Mapping[str, str]]:
    """Where vLLM's sockets go, which it leaves behind: a private folder, by a short name, removed at the end."""
    root = Path(tempfile.gettempdir())
    with private_folder(root, "repl-rl-sockets-") as folder:
        short = root if len(os.fsencode(folder)) <= _LONGEST_FOLDER else alias(root)
        yield {"VLLM_RPC_BASE_PATH": str(short / folder.name)}


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
