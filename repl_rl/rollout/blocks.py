"""Blocks of code that are executed as a whole: what the console made of one, and what was spliced in after it."""

import re
from dataclasses import replace

from repl_rl.record.trajectory import LineStatus
from repl_rl.sandbox.base import PushResult

OUTPUT = "```output\n{}```\n"
"""What is spliced in after a block."""
_CALLER = '  File "<stdin>", line 1, in <module>\n'
_FRAME = re.compile(r'^  File "<block>", line \d+, in ', re.MULTILINE)
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError): [^\n]*\n\Z", re.MULTILINE)


def printed_in(observed: str) -> str | None:
    """What a block printed, from what was spliced in after it; None: it does not stand between the usual fences."""
    before, _, after = OUTPUT.partition("{}")
    text = observed.removeprefix("\n")
    fenced = len(text) >= len(before + after) and text.startswith(before) and text.endswith(after)
    return text[len(before) : len(text) - len(after)] if fenced else None


def as_block(result: PushResult) -> PushResult:
    """What the console made of the line that executes a block, as the block's own: its frames, its syntax errors."""
    text = result.text.replace(_CALLER, "", 1)
    # The console saw an exception of `compile`; what went wrong is that the block is no Python.
    unparsed = result.status is LineStatus.EXCEPTION and _SYNTAX.search(text) and not _FRAME.search(text)
    return replace(result, text=text, status=LineStatus.SYNTAX_ERROR if unparsed else result.status)
