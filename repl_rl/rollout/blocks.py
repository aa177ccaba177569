"""Blocks of code that are executed as a whole or line by line: their results, and the text spliced in after them."""

import re
from dataclasses import replace

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import PushResult

OUTPUT = "```output\n{}```\n"
"""Text spliced in after a block, with a place for its output."""
COMMENT = "# {}"
"""Form of a printed line that is spliced in within a block, with a place for its text."""
_FRAMES = re.compile(
    r"^Traceback \(most recent call last\):\n(?:  .*\n)+|^  File \"<stdin>\", line \d+\n(?:    .*\n)*", re.MULTILINE
)
"""Position of an error in a traceback or in the text of a syntax error."""
_CALLER = '  File "<stdin>", line 1, in <module>\n'
_FRAME = re.compile(r'^  File "<block>", line \d+, in ', re.MULTILINE)
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError): [^\n]*\n\Z", re.MULTILINE)


def printed_in(observed: str) -> str | None:
    """Return the output of a block from the text spliced in after it.

    None means that this text is not between the usual fences.
    """
    before, _, after = OUTPUT.partition("{}")
    text = observed.removeprefix("\n")
    fenced = len(text) >= len(before + after) and text.startswith(before) and text.endswith(after)
    return text[len(before) : len(text) - len(after)] if fenced else None


def error_message(result: PushResult) -> str:
    """Return the printed text of a line; of an error only its message, without the position."""
    return _FRAMES.sub("", result.text) if result.status.is_error else result.text


def as_comments(result: PushResult, form: str = COMMENT) -> str:
    """Return the output of a line as comments within the block that it belongs to. `form` is that of each line."""
    before, _, after = form.partition("{}")
    printed = error_message(result)
    return "".join(f"{before}{line}{after}\n" for line in printed.removesuffix("\n").split("\n")) if printed else ""


def as_block(result: PushResult) -> PushResult:
    """Convert the result of the line that executes a block to that of the block itself.

    This affects its traceback frames and its syntax errors.
    """
    text = result.text.replace(_CALLER, "", 1)
    # The console saw an exception of `compile`; the real cause is that the block is not valid Python.
    unparsed = result.status is LineStatus.EXCEPTION and _SYNTAX.search(text) and not _FRAME.search(text)
    return replace(result, text=text, status=LineStatus.SYNTAX_ERROR if unparsed else result.status)
