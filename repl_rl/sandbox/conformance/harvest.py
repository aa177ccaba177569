"""Console transcripts: hand-written edge cases, and doctests of installed modules, which are not imported."""

import ast
import doctest
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.machine.docstrings import docstrings
from repl_rl.record.console import typed_lines

_SESSIONS = Path(__file__).with_name("edges.txt")
"""File with sessions, separated by lines of four dashes."""

_FORM_FEED = ("x = 1\x0c", "x", "if True:\r    1", "1\x00", "\x0c1", "'a\x85b'", "'line\u2028end'", "1\r")
_LONG = ("x = " + "+".join(["1"] * 500), "x", "(" * 150 + ")" * 150, "-" * 50 + "1", "[" * 90 + "]" * 90)

_SIMPLE = re.compile(r"[A-Za-z_(\[{'\"0-9-]")
_COMPOUND = re.compile(r"\s*(if|for|while|def|class|with|try|async|match|@|from __future__)")


@dataclass(frozen=True, slots=True)
class Transcript:
    """Lines for one fresh console."""

    name: str
    lines: tuple[str, ...]
    examples: int
    """Number of doctest examples that they come from."""


def edge_transcripts() -> list[Transcript]:
    """Return the hand-written transcripts."""
    sessions = [tuple(text.strip("\n").split("\n")) for text in _SESSIONS.read_text("utf-8").split("----\n")]
    sessions += [_FORM_FEED, _LONG]
    return [Transcript(f"edge {number}", lines, len(lines)) for number, lines in enumerate(sessions)]


def transcripts(paths: Iterable[Path]) -> Iterator[Transcript]:
    """Yield one transcript per docstring."""
    for path in paths:
        for name, text in docstrings(path):
            try:
                examples = doctest.DocTestParser().get_examples(text)
            except ValueError:
                continue
            lines = [line for example in examples for line in typed_lines(example.source)]
            if lines and max(map(len, lines)) < 2000:
                yield Transcript(name, tuple(lines), len(examples))


def _single_statements(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if _SIMPLE.match(line) and not _COMPOUND.match(line) and _parses(line)]


def _parses(line: str) -> bool:
    try:
        return len(ast.parse(line).body) == 1 and "#" not in line
    except (SyntaxError, ValueError):
        return False


def in_blocks(transcript: Transcript) -> Transcript:
    """Return its one-line statements, each moved into an `if True:` block."""
    simple = _single_statements(transcript.lines)
    lines = [part for line in simple for part in ("if True:", "    " + line, "")]
    return Transcript(transcript.name + " in blocks", tuple(lines), len(simple))


def joined(transcript: Transcript) -> Transcript:
    """Return its one-line statements, joined with `;` in pairs."""
    simple = _single_statements(transcript.lines)
    lines = ["; ".join(simple[start : start + 2]) for start in range(0, len(simple), 2)]
    return Transcript(transcript.name + " joined", tuple(lines), len(simple))
