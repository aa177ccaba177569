"""What the system refused, and what to do about it: a disk, or this process's files."""

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
    errno.EIO: "the disk reports errors: mend it, or choose a folder elsewhere",
    errno.EACCES: "get the right to write there, or choose a folder elsewhere",
    errno.ENOTDIR: "a part of that path is a file: give another",
    errno.ENFILE: "this machine has no file left to open: end what holds them",
}
_PROBE = bytes(1 << 20)
"""Written where whoever could not write did not say what the system said."""


def remedy(code: int | None) -> str | None:
    """What to do where the system refused with that `errno`; None: it is none that a person mends."""
    if code == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"give this process more than {soft} open files (ulimit -n, here up to {hard}), or a lower --concurrency"
    return _REMEDIES.get(code or 0)


def cause(error: BaseException, path: Path | None = None) -> int | None:
    """The `errno` behind an error, wrapped by libraries or not; None: it is another error.

    Where writing to `path` failed and nobody says why, that is tried.
    """
    code: object = getattr(error, "errno", None)
    if isinstance(code, int):
        return code
    text = str(error)
    known = next((code for code in (*_REMEDIES, errno.EMFILE) if os.strerror(code) in text), None)
    if known is None and path is not None and isinstance(error, RuntimeError):  # torch does not say why
        return _probed(path)
    return known


@contextmanager
def writing(thing: str, path: Path, what: str = "it", then: str = "") -> Iterator[None]:
    """Have what the system refuses within the block told in one line: `thing` at `path`, why, what to do, and `then`.

    Raises:
        ConfigError: it was refused.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        code = cause(error, path)
        mending = remedy(code)
        if code is None or (mending is None and not isinstance(error, OSError)):
            raise
        told = f"{what} cannot be written there: {os.strerror(code)}; {mending or 'mend that'}{then}"
        raise ConfigError(thing, str(path), told) from error


def _probed(path: Path) -> int | None:
    """The `errno` of writing to the folder of `path`; None: it can be written."""
    folder = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None
