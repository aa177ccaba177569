"""Doctests of the standard library and of installed packages, as console transcripts. Nothing of theirs is imported."""

import ast
import doctest
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.record.console import typed_lines

_SIMPLE = re.compile(r"[A-Za-z_(\[{'\"0-9-]")
_COMPOUND = re.compile(r"\s*(if|for|while|def|class|with|try|async|match|@|from __future__)")


@dataclass(frozen=True, slots=True)
class Transcript:
    """Lines for one fresh console."""

    name: str
    lines: tuple[str, ...]
    examples: int
    """How many doctest examples they come from."""


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line, text) of every text with a prompt in a Python file; nothing where it cannot be parsed."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ">>> " in node.value:
            yield f"{path.name}:{node.lineno}", node.value


def transcripts(paths: Iterable[Path]) -> Iterator[Transcript]:
    """One transcript a docstring."""
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
    """Its one-line statements, each moved into an `if True:` block."""
    simple = _single_statements(transcript.lines)
    lines = [part for line in simple for part in ("if True:", "    " + line, "")]
    return Transcript(transcript.name + " in blocks", tuple(lines), len(simple))


def joined(transcript: Transcript) -> Transcript:
    """Its one-line statements, joined with `;` in pairs."""
    simple = _single_statements(transcript.lines)
    lines = ["; ".join(simple[start : start + 2]) for start in range(0, len(simple), 2)]
    return Transcript(transcript.name + " joined", tuple(lines), len(simple))
