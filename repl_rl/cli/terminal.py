"""The one way for text to the terminal. Text of others (tasks, runs, programs) steers it nowhere.

A terminal obeys escape sequences: OSC 52 sets the clipboard, others move the cursor over what stands there. Every
control character is written as its escape (`\\x1b`), in what a verb prints, in logs, warnings and tracebacks.
"""

import re
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from repl_rl.runs.store import printable

_LINE_START = re.compile("(\r)")
"""Progress bars of libraries go back to the start of their line. Nothing else of a control character is let through."""


class SafeStream:
    """A text stream that writes control characters of other people's text as their escapes.

    Rich writes its own styles: it takes the stream behind this one, and `terminal` filters what it is given to show.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write `text`. Returns its length, as text streams do."""
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
    """Send what this program prints, logs, warns of and dies of through `SafeStream`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):  # None: it was closed before the start
            setattr(sys, name, SafeStream(stream))


class _Filtered:
    """A renderable whose text has no control characters. What Rich itself adds to steer the terminal stays."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class _Filter(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Filter all that a console is asked to print."""
        return [_Filtered(renderable) for renderable in renderables]


class _Terminal(Console):
    """A terminal whose reader may leave: rich ends the program with 1 then, as if it had failed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def terminal(*, quiet: bool = False) -> Console:
    """The terminal, in which every text is what it says: `repl_rl[ray]` names an extra, and is no markup.

    What has a style is a `Text`. Numbers and paths get no colours of their own. Control characters are escaped.

    Args:
        quiet: nothing is printed.
    """
    console = _Terminal(highlight=False, markup=False, quiet=quiet)
    console.push_render_hook(_Filter())
    return console
