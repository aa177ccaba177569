"""Environment variables for vLLM's processes, set for a while and then restored."""

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
"""Level of vLLM's log, unless the user sets another one."""
_SET = os.environ.get("VLLM_LOGGING_LEVEL", QUIET)
ASKED_LEVEL = "" if _SET == QUIET else _SET
"""Log level that the user has set; "" if none. It is read once, at import, since another thread may set the variable
later within a block.

The quiet level does not count as the user's choice. TRL sets it at import, and processes inherit it from there.
"""


def log_level() -> Mapping[str, str]:
    """Return the variables that vLLM and torch read at import. A VLLM_LOGGING_LEVEL of the user is kept."""
    if ASKED_LEVEL:
        return {"VLLM_LOGGING_LEVEL": ASKED_LEVEL, "VLLM_NO_USAGE_STATS": "1"}
    return {
        "VLLM_LOGGING_LEVEL": QUIET,
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore::FutureWarning",
    }


def hush() -> None:
    """Set that level on vLLM's logger before vLLM is imported, since vLLM logs before it reads its variable."""
    logging.getLogger("vllm").setLevel(log_level()["VLLM_LOGGING_LEVEL"])


_LONGEST_FOLDER = 60
"""Longest folder, in bytes, whose sockets still have a valid address of 107 bytes with their long names."""


@cache
def alias(folder: Path) -> Path:
    """Return a short path without spaces for a folder.

    This process and its children can use it while this process lives.
    """
    # The descriptor stays open, so the path stays valid.
    return Path(f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}")


def preloads(packages: Path) -> Mapping[str, str]:
    """Return paths without spaces for the libraries that vLLM preloads on CPU, or nothing if its path has no space.

    vLLM writes paths into LD_PRELOAD, in which a space or a colon separates two paths. It keeps paths that are already
    there.
    """
    if not re.search(r"[\s:]", str(packages)):
        return {}
    openmp = [*packages.glob("torch.libs/libgomp*.so*"), *packages.glob("torch/lib/libgomp*.so*")]
    allocator = [*packages.glob("vllm/libs/libtcmalloc*.so*")]
    found = [alias(packages) / path.relative_to(packages) for path in (*openmp[:1], *allocator[:1])]
    return {"LD_PRELOAD": ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), *map(str, found)])}


@contextmanager
def sockets() -> Iterator[Mapping[str, str]]:
    """Create a folder for vLLM's sockets, and yield the variable with its short path.

    vLLM leaves its sockets behind. The folder is private to this process and is removed at the end.
    """
    root = Path(tempfile.gettempdir())
    with private_folder(root, "repl-rl-sockets-") as folder:
        short = root if len(os.fsencode(folder)) <= _LONGEST_FOLDER else alias(root)
        yield {"VLLM_RPC_BASE_PATH": str(short / folder.name)}


_ALONE = threading.RLock()
"""Lock of `environment`. Two blocks that overlap would each restore the values of the other."""


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block, then restore all of them, including those that vLLM set.

    vLLM leaves LD_PRELOAD and thread counts behind, which the consoles' processes would inherit. A block waits for that
    of another thread, so call it in a worker thread.
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
