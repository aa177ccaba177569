"""Safe output to the terminal. Untrusted text (of tasks, runs, programs) cannot control it.

A terminal obeys escape sequences: OSC 52 sets the clipboard, others move the cursor over earlier output. Every control
character is written as its escape (`\\x1b`), in output, logs, warnings and tracebacks.
"""

import re
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from repl_rl.runs.store import printable

_LINE_START = re.compile("(\r)")
"""Carriage return. It passes unescaped, because progress bars of libraries go back to the start of their line."""


class SafeStream:
    """Text stream that writes control characters as their escapes.

    Rich writes control codes for its styles, so it uses the stream behind this one. `terminal` filters its text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write `text` and return its length, as text streams do."""
        parts = _LINE_START.split(text)
        self.rich_proxied_file.write("".join(part if part == "\r" else printable(part) for part in parts))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.rich_proxied_file, name)


def guard_streams() -> None:
    """Send all output, logs, warnings and tracebacks of this program through `SafeStream`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # The stream is None if it was closed before the program started.
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


class _Filtered:
    """Renderable with escaped control characters. Control codes that Rich itself adds stay."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _Filter(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Filter all renderables that a console prints."""
        return [_Filtered(renderable) for renderable in renderables]


class _Terminal(Console):
    """Console that raises BrokenPipeError when its reader leaves. Rich would exit with 1, the code of a failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal(*, quiet: bool = False) -> Console:
    """Return a console for the terminal that prints text literally: `repl_rl[ray]` is an extra, and no markup.

    Only a `Text` has a style. Numbers and paths are not coloured. Control characters are escaped.

    Args:
        quiet: print nothing.
    """
    console = _Terminal(highlight=False, markup=False, quiet=quiet)
    console.push_render_hook(_Filter())
    return console
