"""Standard streams that are closed, full, or read by nobody."""

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
"""Given the reason, once, when a stream takes no more. What it raises, the writer gets."""


class _Forgiving(io.FileIO):
    """A descriptor that takes /dev/null's place as soon as nothing can be written to it."""

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
    """Make standard streams safe to use, whatever they are.

    Closed ones are opened on /dev/null: else the next file that is opened has their number, and gets what is printed.
    What cannot be written to standard error is dropped.

    Args:
        outlast: what cannot be written to standard output is dropped, with one warning; else the writer gets an error.
    """
    sys.stdin = _opened(0, sys.stdin, "r")
    sys.stdout = _forgiving(_opened(1, sys.stdout, "w"), _warn if outlast else _refuse)
    sys.stderr = _forgiving(_opened(2, sys.stderr, "w"), lambda error: None)


def _opened(number: int, stream: TextIO | None, mode: Literal["r", "w"]) -> TextIO:
    """`stream`; or /dev/null, under its number unless another file has that, where it was closed as we began.

    Python has a stream for a number that was closed if it had a file open under it for a moment.
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
    if not isinstance(stream, io.TextIOWrapper):  # a notebook's, for instance
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Forgiving(stream.fileno(), lost)),
        encoding=stream.encoding,
        errors=stream.errors,
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
