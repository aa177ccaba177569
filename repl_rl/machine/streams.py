"""Standard streams that are closed, full, or no longer read."""

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Literal, TextIO

from typing_extensions import Buffer

from repl_rl.errors import ConfigError

log = logging.getLogger(__name__)

Lost = Callable[[OSError], None]
"""Callback for a stream that accepts no more output. It gets the reason once. The writer gets the exception that it
raises."""


class _Forgiving(io.FileIO):
    """A file descriptor that is redirected to /dev/null as soon as a write fails."""

    def __init__(self, number: int, lost: Lost) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost = lost

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            self._lost(error)
            return memoryview(data).nbytes


def settle_streams(outlast: bool) -> None:
    """Make the standard streams safe to use in any state.

    Closed streams are opened on /dev/null. Otherwise, the next file to be opened would get their number and receive the
    output. Output that standard error does not accept is dropped. Characters that an encoding lacks are escaped.

    Args:
        outlast: drop output that standard output does not accept, with one warning; otherwise the writer gets an error.
    """
    sys.stdin = _opened(0, sys.stdin, "r")
    sys.stdout = _forgiving(_opened(1, sys.stdout, "w"), _warn if outlast else _refuse)
    sys.stderr = _forgiving(_opened(2, sys.stderr, "w"), lambda error: None)


def _opened(number: int, stream: TextIO | None, mode: Literal["r", "w"]) -> TextIO:
    """Return `stream`, or a stream on /dev/null if it was closed when the process started.

    The new stream has the standard number, unless another file has it. Python creates a stream even for a closed number
    if a file was open under it for a moment.
    """
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, number)
        os.set_inheritable(number, True)
        if null != number:
            os.close(null)
        return open(number, mode, encoding="utf-8", closefd=False)
    return stream or open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8", closefd=False)


def _forgiving(stream: TextIO, lost: Lost) -> TextIO:
    # For example, the stream of a notebook.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(stream.fileno(), lost)),
        encoding=stream.encoding,
        # Characters that the encoding lacks are escaped, as Python does on standard error.
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _warn(error: OSError) -> None:
    log.warning("standard output takes no more (%s): what follows is not shown, and the work goes on", error.strerror)


def _refuse(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise error
    remedy = f"{error.strerror}; let it go where it can be written"
    raise ConfigError("standard output", "not to be written", remedy) from error
