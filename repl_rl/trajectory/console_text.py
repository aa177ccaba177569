"""Text of a console: cells, physical lines and prompts. Pure logic, without an event loop, I/O or a tokenizer.

The reference is `code.InteractiveConsole`. To save a call of the sandbox, `codeop` decides here if a cell is complete,
but only if the answer is certain. The console in the sandbox decides again about every cell that it receives.
"""

import ast
import codeop
import re
import warnings
from contextlib import suppress
from enum import StrEnum

PS1 = ">>> "
"""Prompt for the first line of a cell."""
PS2 = "... "
"""Prompt for a continuation line."""
TEXT_CHARS = 4000
"""Longest text that is shown to a person in full, characters."""

_HOST_COMPILE_CHARS = 8192
"""Largest cell that the host parses, characters. Longer ones are left to the sandboxed console, because hostile source
must not keep the host's parser busy."""
_HOST_COMPILE_TOTAL = 32 * _HOST_COMPILE_CHARS
"""Characters that the host parses for one cell. Each further line parses the cell again, so short lines cost much
work."""
_STATEMENT = re.compile(r"(?!(?:elif|else|except|finally)\b)[^\s#)\]}]")
"""Beginning of a line that may start a statement at the left margin."""


class CellStatus(StrEnum):
    """Status of a cell after one more line, as far as the host knows it without the console."""

    VOID = "void"
    """Blank or a comment at the start of a cell: the console prints nothing and prompts again."""
    INCOMPLETE = "incomplete"
    """The console would prompt for a continuation line."""
    SEND = "send"
    """Send the cell to the console: it would run or refuse the cell now, or only the console can decide."""


class CellBuffer:
    """Buffer of physical lines until the console accepts them as one cell."""

    def __init__(self, *, decide: bool = True) -> None:
        """Create an empty buffer. With `decide=False`, host and sandbox Pythons differ, so every verdict is `SEND`."""
        self._decide = decide
        self._lines: list[str] = []
        self._chars = self._parsed = 0
        self._compile = codeop.CommandCompiler()

    @property
    def source(self) -> str:
        """The cell so far, as `InteractiveConsole` would compile it."""
        return "\n".join(self._lines)

    def add(self, line: str) -> CellStatus:
        """Append one physical line without its newline, and return the status of the cell. Invalid syntax is `SEND`."""
        # Within a cell, a blank line or a comment belongs to the cell.
        if self._decide and not self._lines and (not (text := line.strip()) or text.startswith("#")):
            return CellStatus.VOID
        self._lines.append(line)
        # An empty line counts as well, as its newline.
        self._chars += len(line) + 1
        # Each further line parses the whole cell again.
        self._parsed += self._chars
        if not self._decide or self._chars > _HOST_COMPILE_CHARS or self._parsed > _HOST_COMPILE_TOTAL:
            return CellStatus.SEND
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CellStatus.INCOMPLETE if self._is_incomplete(self.source) else CellStatus.SEND

    def _is_incomplete(self, source: str) -> bool:
        """Return True if the console certainly prompts for a continuation line."""
        try:
            if "__future__" not in source:
                # Source that parses is complete, even if it does not compile. Most cells do, and codeop would compile
                # them twice. Source with `__future__` needs codeop, which keeps compiler flags for later cells.
                with suppress(SyntaxError):
                    compile(source, "<stdin>", "single", self._compile.compiler.flags | ast.PyCF_ONLY_AST, True)
                    return False
            return self._compile(source, "<stdin>", "single") is None
        except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
            return False

    def reset(self) -> None:
        """Start a new cell. Compiler flags set by `from __future__` lines stay, as in the console."""
        self._lines.clear()
        self._chars = self._parsed = 0


class LineBuffer:
    """Buffer that splits a stream of decoded text into physical lines, at newlines only.

    A token may have text after its newline, or several newlines. The text after the last one is carried into the next
    line.
    """

    def __init__(self, carry: str = "") -> None:
        self.carry = carry
        """Text after the last newline so far."""

    def feed(self, text: str) -> tuple[str, ...]:
        """Append decoded text and return the physical lines that it closed, without their newlines."""
        *closed, self.carry = (self.carry + text).split("\n")
        return tuple(closed)


class TypedLineTracker:
    """Matcher of a rollout's lines with the physical lines that its console ran."""

    def __init__(self) -> None:
        self._buffer = LineBuffer()

    @property
    def carry(self) -> str:
        """Text that was written after a newline so far, and that the console has not received yet."""
        return self._buffer.carry

    def check_typed(self, text: str, ran: tuple[str, ...], at_end: bool = False) -> bool:
        """Return True if the console ran the physical lines that `text`, the policy's next line, completes.

        The console may have accepted only the first of these, so `ran` may be shorter. `at_end` means that an end token
        ended the line, which also closes an open cell. The result is False if no part of the line ran, or if other
        text ran, such as the code between two fences.
        """
        # Work on a copy, so that a mismatch changes nothing.
        next_buffer = LineBuffer(self._buffer.carry)
        if not ran or next_buffer.feed(f"{text}\n\n" if at_end else text)[: len(ran)] != ran:
            return False
        self._buffer = next_buffer
        return True


def is_noop(line: str) -> bool:
    """Return True for a line that computes nothing at the start of a cell: blank, a comment, or `pass`."""
    text = line.strip()
    return not text or text.startswith("#") or text == "pass"


def is_open_block(cell: str) -> bool:
    """Return True if `cell` ends with a block statement that is complete and that the console keeps open.

    In a program, the next statement at the left margin ends the block. The console needs a blank line.
    """
    # A blank line at the end has closed the block already.
    if not cell or cell.endswith("\n") or len(cell) > _HOST_COMPILE_CHARS:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            last_statements = ast.parse(f"{cell}\n").body[-1:]
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return False
    # Every block statement has a `body`, except `match`, which has `cases`.
    return any(hasattr(statement, field) for statement in last_statements for field in ("body", "cases"))


def begins_statement(line: str) -> bool:
    """Return True if a line at the left margin may begin a new statement."""
    return _STATEMENT.match(line) is not None


def choose_prompt(more: bool) -> str:
    """Return the prompt that the console prints next; `more` means that the cell is incomplete."""
    return PS2 if more else PS1


def split_into_typed_lines(source: str) -> tuple[str, ...]:
    """Return the physical lines that a person types for one statement. A blank line closes a block."""
    lines = tuple(source.rstrip("\n").split("\n"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            open_block = codeop.compile_command("\n".join(lines), "<stdin>", "single") is None
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):
        return lines
    return (*lines, "") if open_block else lines


def clip_middle(text: str, max_chars: int = TEXT_CHARS) -> str:
    """Return `text`, or its two ends around a visible marker if it has more than `max_chars` characters."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters not shown ...]\n{text[len(text) - half :]}"
