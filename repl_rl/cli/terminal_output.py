"""Output to the terminal: escaped text, standard streams in any state, and messages of several processes.

- Untrusted text (of tasks, runs, programs) cannot control the terminal. A terminal obeys escape sequences: OSC 52 sets
  the clipboard, others move the cursor over earlier output. Every control character is written as its escape
  (`\\x1b`), in output, logs, warnings and tracebacks.
- Standard streams may be closed, full, or no longer read.
- Of the processes that `torchrun` or `accelerate launch` starts, only rank 0 prints and writes.
"""

import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment
from typing_extensions import Buffer

from repl_rl.errors import ConfigError, UnrecoverableError
from repl_rl.runs.store import escape_control_characters
from repl_rl.utils.processes import get_rank, get_world_size

log = logging.getLogger(__name__)
_RANK_ZERO_WAIT_S = 60.0
"""Time that other ranks wait for rank 0 to end the run, seconds."""
_LINE_START = re.compile("(\r)")
"""Carriage return. It passes unescaped, because progress bars of libraries go back to the start of their line."""
OnStreamLost = Callable[[OSError], None]
"""Callback that is called once, with the error, when a stream accepts no more output. An exception that the callback
raises reaches the code that writes to the stream."""


def guard_streams() -> None:
    """Send all output, logs, warnings and tracebacks of this program through `SafeStream`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # The stream is None if it was closed before the program started.
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


class SafeStream:
    """Text stream that writes control characters as their escapes.

    Rich needs control codes for its styles, so it writes to the wrapped stream. `make_terminal` escapes Rich's text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write `text` and return its length, as text streams do."""
        parts = _LINE_START.split(text)
        self.rich_proxied_file.write(
            "".join(part if part == "\r" else escape_control_characters(part) for part in parts)
        )
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.rich_proxied_file, name)


def make_terminal(*, quiet: bool = False) -> Console:
    """Return a Rich console that prints text literally: the brackets in `repl_rl[ray]` are not parsed as markup.

    Styles come from `Text` objects only. Numbers and paths are not coloured. Control characters are escaped.

    Args:
        quiet: print nothing.
    """
    console = _RichTerminal(highlight=False, markup=False, quiet=quiet)
    console.push_render_hook(_ControlCharacterFilter())
    return console


class _FilteredRenderable:
    """Renderable with escaped control characters. Control codes that Rich itself adds stay."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(escape_control_characters(segment.text), segment.style)


class _ControlCharacterFilter(RenderHook):
    """Hook that escapes the control characters of all that a console prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Filter all renderables that a console prints."""
        return [_FilteredRenderable(renderable) for renderable in renderables]


class _RichTerminal(Console):
    """Console that raises BrokenPipeError when its reader leaves. Rich would exit with 1, the code of a failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_streams_safe(outlast: bool) -> None:
    """Make the standard streams safe to use in any state.

    Closed streams are opened on /dev/null. Otherwise, the next file to be opened would get their number and receive the
    output. Output that standard error does not accept is dropped. Characters that an encoding lacks are escaped.

    Args:
        outlast: drop output that standard output does not accept, with one warning; otherwise the writer gets an error.
    """
    sys.stdin = _open_or_replace(0, sys.stdin, "r")
    sys.stdout = _wrap_stream(
        _open_or_replace(1, sys.stdout, "w"), _warn_lost_stream if outlast else _raise_lost_stream
    )
    sys.stderr = _wrap_stream(_open_or_replace(2, sys.stderr, "w"), lambda error: None)


class _ForgivingFile(io.FileIO):
    """A file descriptor that is redirected to /dev/null as soon as a write fails."""

    def __init__(self, number: int, lost: OnStreamLost) -> None:
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


def _open_or_replace(number: int, stream: TextIO | None, mode: Literal["r", "w"]) -> TextIO:
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


def _wrap_stream(stream: TextIO, lost: OnStreamLost) -> TextIO:
    """Return a stream on the same file descriptor that calls `lost` when a write fails."""
    # Other kinds of streams, such as that of a notebook, stay as they are.
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_ForgivingFile(stream.fileno(), lost)),
        encoding=stream.encoding,
        # Characters that the encoding lacks are escaped, as Python does on standard error.
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _warn_lost_stream(error: OSError) -> None:
    log.warning("standard output takes no more (%s): what follows is not shown, and the work goes on", error.strerror)


def _raise_lost_stream(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise error
    remedy = f"{error.strerror}; redirect it to a file or terminal that accepts output"
    raise ConfigError("standard output", "not writable", remedy) from error


def format_duration(seconds: float) -> str:
    """Format a duration with the unit that suits it: seconds, minutes, hours or days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} d"


def silence_other_ranks() -> None:
    """Log errors only, on ranks above 0. Their other messages would repeat those of rank 0."""
    if get_rank():
        logging.getLogger().setLevel(logging.ERROR)


def get_error_prefix() -> str:
    """Return the prefix of this process's error messages."""
    return f"repl-rl: process {get_rank()}" if get_rank() else "repl-rl"


@contextmanager
def report_errors_on_rank_zero() -> Iterator[None]:
    """Delay a ConfigError on all ranks but 0, so that rank 0 reports the error first. All ranks raise the same error.

    The launcher stops all processes as soon as one exits. A faster rank would stop rank 0 before its report.
    """
    try:
        yield
    except ConfigError:
        if get_rank():
            threading.Event().wait(_RANK_ZERO_WAIT_S)
        raise


def explain_rank_error(error: BaseException) -> BaseException:
    """Return `error`, or an UnrecoverableError if it is a lost connection to a process that has ended."""
    # torch raises a plain RuntimeError for a lost connection, so its text decides.
    lost = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    if not (get_world_size() > 1 and lost):
        return error
    return UnrecoverableError("process of this run", "one that has ended", f"see what it said ({error}), repair that")
