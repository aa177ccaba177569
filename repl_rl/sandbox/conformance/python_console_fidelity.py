"""Fidelity checks: transcripts of console lines, and the comparison of a sandbox with the reference console.

Transcripts are hand-written edge cases, and doctests of installed modules, which are not imported. The sandbox and the
reference console (`python_console_oracle.py`) run the same transcripts, line by line.
"""

import ast
import asyncio
import doctest
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.errors import ReplRLError
from repl_rl.sandbox.base import Sandbox
from repl_rl.sandbox.isolated_subprocess import ENVIRONMENT
from repl_rl.trajectory.console_text import split_into_typed_lines
from repl_rl.utils.installed_versions import iterate_doctest_docstrings

SCRIPT = Path(__file__).with_name("python_console_oracle.py")
"""Program of the reference console."""
_SESSIONS = Path(__file__).with_name("edges.txt")
"""File with sessions, separated by lines of four dashes."""
# Sessions that are not in the file: control characters and line separators, and long lines.
_FORM_FEED = ("x = 1\x0c", "x", "if True:\r    1", "1\x00", "\x0c1", "'a\x85b'", "'line\u2028end'", "1\r")
_LONG = ("x = " + "+".join(["1"] * 500), "x", "(" * 150 + ")" * 150, "-" * 50 + "1", "[" * 90 + "]" * 90)
_SIMPLE = re.compile(r"[A-Za-z_(\[{'\"0-9-]")
_COMPOUND = re.compile(r"\s*(if|for|while|def|class|with|try|async|match|@|from __future__)")
"""Patterns for the beginning of a line. `_SIMPLE` selects single statements; `_COMPOUND` excludes compound ones."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
"""Address of an object, which differs between two runs."""
_CONSOLES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Transcript:
    """Lines for one fresh console."""

    name: str
    lines: tuple[str, ...]
    example_count: int
    """Number of doctest examples that they come from."""


def load_edge_transcripts() -> list[Transcript]:
    """Return the hand-written transcripts."""
    sessions = [tuple(text.strip("\n").split("\n")) for text in _SESSIONS.read_text("utf-8").split("----\n")]
    sessions += [_FORM_FEED, _LONG]
    return [Transcript(f"edge {number}", lines, len(lines)) for number, lines in enumerate(sessions)]


def iterate_transcripts(paths: Iterable[Path]) -> Iterator[Transcript]:
    """Yield one transcript per docstring."""
    for path in paths:
        for name, text in iterate_doctest_docstrings(path):
            try:
                examples = doctest.DocTestParser().get_examples(text)
            except ValueError:
                continue
            lines = [line for example in examples for line in split_into_typed_lines(example.source)]
            if lines and max(map(len, lines)) < 2000:
                yield Transcript(name, tuple(lines), len(examples))


def wrap_in_blocks(transcript: Transcript) -> Transcript:
    """Return its one-line statements, each moved into an `if True:` block."""
    simple = _select_single_statements(transcript.lines)
    lines = [part for line in simple for part in ("if True:", "    " + line, "")]
    return Transcript(transcript.name + " in blocks", tuple(lines), len(simple))


def join_statements(transcript: Transcript) -> Transcript:
    """Return its one-line statements, joined with `;` in pairs."""
    simple = _select_single_statements(transcript.lines)
    lines = ["; ".join(simple[start : start + 2]) for start in range(0, len(simple), 2)]
    return Transcript(transcript.name + " joined", tuple(lines), len(simple))


def _select_single_statements(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if _SIMPLE.match(line) and not _COMPOUND.match(line) and _is_parsable(line)]


def _is_parsable(line: str) -> bool:
    try:
        return len(ast.parse(line).body) == 1 and "#" not in line
    except (SyntaxError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Line whose output differs from the reference."""

    name: str
    line: str
    expected: str
    actual: str


async def run_reference(transcripts: Sequence[Transcript], command: Sequence[str] = ()) -> list[list[str] | None]:
    """Return the reference's output for each line of each transcript. None means that the reference itself fails on it.

    Args:
        command: command that starts the sandbox's Python, unbuffered, with the script as its last argument; empty means
            this Python.
    """
    request = json.dumps({"transcripts": [transcript.lines for transcript in transcripts]}).encode()
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            *(command or (sys.executable, "-u", str(SCRIPT))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath), "HOME": folder},
        )
        output, _ = await process.communicate(request)
    if process.returncode:
        raise ReplRLError(f"the reference console ended with code {process.returncode}")
    texts: list[list[str] | None] = json.loads(output)
    return texts


def select_reproducible(
    first: Sequence[list[str] | None], second: Sequence[list[str] | None]
) -> list[list[str] | None]:
    """Return the texts of each transcript, or None if the two runs of the reference differ in more than addresses."""

    def is_same(one: list[str] | None, two: list[str] | None) -> bool:
        return None not in (one, two) and [*map(_normalize_addresses, one or ())] == [
            *map(_normalize_addresses, two or ())
        ]

    return [one if is_same(one, two) else None for one, two in zip(first, second, strict=True)]


def _normalize_addresses(text: str) -> str:
    return _ADDRESS.sub("0x", text)


async def replay_transcript(sandbox: Sandbox, transcript: Transcript) -> list[str]:
    """Return the sandbox's output per line; "" for a blank line, or one that waits for the rest of its cell."""
    texts = []
    async with sandbox.session() as session:
        for line in transcript.lines:
            if session.ended:
                break
            texts.append((await session.push(line)).text)
    return texts


async def compare_with_reference(
    sandbox: Sandbox, transcripts: Sequence[Transcript], expected: Sequence[list[str]]
) -> list[Mismatch]:
    """Replay all transcripts, several at a time. Return at most one mismatch per transcript: later lines depend on
    it."""
    gate = asyncio.Semaphore(_CONSOLES_AT_ONCE)

    async def compare_one(transcript: Transcript, texts: list[str]) -> Mismatch | None:
        async with gate:
            actual = await replay_transcript(sandbox, transcript)
        return _find_first_difference(transcript, texts, actual)

    differences = await asyncio.gather(*map(compare_one, transcripts, expected))
    return [mismatch for mismatch in differences if mismatch is not None]


def _find_first_difference(transcript: Transcript, expected: list[str], actual: list[str]) -> Mismatch | None:
    for line, expected_text, have in zip(transcript.lines, expected, actual, strict=False):
        if _normalize_addresses(expected_text) != _normalize_addresses(have):
            return Mismatch(transcript.name, line, expected_text, have)
    if len(expected) != len(actual):
        return Mismatch(transcript.name, "(end)", f"{len(expected)} lines", f"{len(actual)} lines")
    return None
