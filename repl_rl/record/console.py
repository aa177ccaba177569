"""Pure logic of the console: lines, cells and prompts. No event loop, no I/O, no tokenizer.

The reference is `code.InteractiveConsole`. Completeness is decided here with `codeop` only where the answer is
certain, to save a trip to the kernel; whatever is sent on is decided again by the console inside the sandbox.
"""

import ast
import codeop
import warnings
from contextlib import suppress
from enum import StrEnum

PS1 = ">>> "
PS2 = "... "

_HOST_COMPILE_CHARS = 8192
"""Longer cells are judged by the sandboxed console alone: a hostile source must not keep the host's parser busy."""


class Verdict(StrEnum):
    """What the host knows about a cell after one more line."""

    VOID = "void"
    """Blank or a comment where a cell would start: the console prints nothing and asks again."""
    INCOMPLETE = "incomplete"
    """The console would ask for a continuation line."""
    SEND = "send"
    """Only the console can tell, or it would run (or refuse) the cell now."""


class CellBuffer:
    """Collects physical lines until the console would take them as one cell."""

    def __init__(self, *, decide: bool = True) -> None:
        """`decide=False`: host and sandbox Pythons differ, so every verdict is `SEND`."""
        self._decide = decide
        self._lines: list[str] = []
        self._compile = codeop.CommandCompiler()

    @property
    def source(self) -> str:
        """The cell so far, as `InteractiveConsole` would compile it."""
        return "\n".join(self._lines)

    def add(self, line: str) -> Verdict:
        """Append one physical line (without its newline) and say what is known now."""
        if self._decide and not self._lines and (not (text := line.strip()) or text.startswith("#")):
            return Verdict.VOID
        self._lines.append(line)
        if not self._decide or sum(map(len, self._lines)) > _HOST_COMPILE_CHARS:
            return Verdict.SEND
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Verdict.INCOMPLETE if self._incomplete(self.source) else Verdict.SEND

    def _incomplete(self, source: str) -> bool:
        try:
            if "__future__" not in source:
                # What parses is complete, whether or not it compiles. That is most cells, and codeop compiles them
                # twice; only what it compiles can leave it flags for the cells after it.
                with suppress(SyntaxError):
                    compile(source, "<stdin>", "single", self._compile.compiler.flags | ast.PyCF_ONLY_AST, True)
                    return False
            return self._compile(source, "<stdin>", "single") is None
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return False

    def reset(self) -> None:
        """Start a new cell. Compiler flags set by `from __future__` lines stay, as in the console."""
        self._lines.clear()


class LineBuffer:
    """Cuts a stream of decoded text into physical lines at each newline, and at nothing else.

    A token may hold text after its newline, or several newlines: the text after the last one is carried into
    the next line.
    """

    def __init__(self, carry: str = "") -> None:
        self.carry = carry
        """Text after the last newline so far."""

    def feed(self, text: str) -> tuple[str, ...]:
        """Append decoded text and return the physical lines that it closed, without their newlines."""
        *closed, self.carry = (self.carry + text).split("\n")
        return tuple(closed)


class Typist:
    """Follows the lines of a rollout: which of them were given to a console as they were written?"""

    def __init__(self) -> None:
        self._buffer = LineBuffer()

    @property
    def carry(self) -> str:
        """Text of the lines so far that was written after a newline, and not given to the console yet."""
        return self._buffer.carry

    def typed(self, text: str, ran: tuple[str, ...], at_end: bool = False) -> bool:
        """Take the next line; True where what ran are the physical lines that it closed, as many as the console took.

        `at_end`: an end token closed it, and with it a cell that was open. False: nothing of it ran, or something else
        did, such as the code between two fences.
        """
        ahead = LineBuffer(self._buffer.carry)
        if not ran or ahead.feed(f"{text}\n\n" if at_end else text)[: len(ran)] != ran:
            return False
        self._buffer = ahead
        return True


def is_void(line: str) -> bool:
    """True for a line that computes nothing where a cell would start: blank, a comment, or `pass`."""
    text = line.strip()
    return not text or text.startswith("#") or text == "pass"


def prompt(more: bool) -> str:
    """The prompt that the console prints next."""
    return PS2 if more else PS1


def typed_lines(source: str) -> tuple[str, ...]:
    """The physical lines that a person types for one statement: a block is closed by a blank line."""
    lines = tuple(source.rstrip("\n").split("\n"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            open_block = codeop.compile_command("\n".join(lines), "<stdin>", "single") is None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return lines
    return (*lines, "") if open_block else lines
