"""Operating system errors, such as a full disk or too many open files, and their remedies."""

import errno
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repl_rl.errors import ConfigError

_REMEDIES = {
    errno.ENOSPC: "free some room there",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "have it mounted to be written, or choose a folder elsewhere",
    errno.EIO: "the disk reports errors: repair it, or choose a folder elsewhere",
    errno.EACCES: "get the right to write there, or choose a folder elsewhere",
    errno.ENOTDIR: "a part of that path is a file: give another",
    errno.ENFILE: "this machine has no file left to open: end what holds them",
}
_PROBE = bytes(1 << 20)
"""Content of a test write, for errors that do not carry the system's reason."""


def get_errno_remedy(code: int | None) -> str | None:
    """Return the remedy for an `errno`, or None if a user cannot fix it."""
    if code == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"give this process more than {soft} open files (ulimit -n, here up to {hard}), or a lower --concurrency"
    return _REMEDIES.get(code or 0)


def find_errno(error: BaseException, path: Path | None = None) -> int | None:
    """Return the `errno` behind an error, even if a library wrapped it. Return None for other errors.

    If writing to `path` failed for an unknown reason, a test write finds the reason.
    """
    code: object = getattr(error, "errno", None)
    if isinstance(code, int):
        return code
    text = str(error)
    known = next((code for code in (*_REMEDIES, errno.EMFILE) if os.strerror(code) in text), None)
    # torch does not pass the reason on.
    if known is None and path is not None and isinstance(error, RuntimeError):
        return _probe_write_errno(path)
    return known


@contextmanager
def catch_os_errors(thing: str, path: Path, what: str = "it", then: str = "") -> Iterator[None]:
    """Turn operating system errors in the block into a `ConfigError` of one line.

    The message names `thing`, `path`, the cause, the remedy and `then`.

    Raises:
        ConfigError: the system refused an operation.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        code = find_errno(error, path)
        advice = get_errno_remedy(code)
        if code is None or (advice is None and not isinstance(error, OSError)):
            raise
        message = f"{what} cannot be written there: {os.strerror(code)}; {advice or 'repair that'}{then}"
        raise ConfigError(thing, str(path), message) from error


def _probe_write_errno(path: Path) -> int | None:
    """Return the `errno` of a test write to the folder of `path`, or None if it succeeds."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None
