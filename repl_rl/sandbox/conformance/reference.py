"""Comparison of a sandbox with the reference console: both run the same transcripts, line by line."""

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.errors import ReplRLError
from repl_rl.sandbox.base import Sandbox
from repl_rl.sandbox.conformance.harvest import Transcript
from repl_rl.sandbox.local import ENVIRONMENT

SCRIPT = Path(__file__).with_name("reference_console.py")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
_CONSOLES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Line whose output differs from the reference."""

    name: str
    line: str
    expected: str
    got: str


async def reference_texts(transcripts: Sequence[Transcript], command: Sequence[str] = ()) -> list[list[str] | None]:
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


def _normal(text: str) -> str:
    return _ADDRESS.sub("0x", text)


def reproduced(first: Sequence[list[str] | None], second: Sequence[list[str] | None]) -> list[list[str] | None]:
    """Return the texts of each transcript, or None if the two runs of the reference differ in more than addresses."""

    def same(one: list[str] | None, two: list[str] | None) -> bool:
        return None not in (one, two) and [*map(_normal, one or ())] == [*map(_normal, two or ())]

    return [one if same(one, two) else None for one, two in zip(first, second, strict=True)]


async def replay(sandbox: Sandbox, transcript: Transcript) -> list[str]:
    """Return the sandbox's output for each line, including the empty output of blank and withheld lines."""
    texts = []
    async with sandbox.session() as session:
        for line in transcript.lines:
            if session.ended:
                break
            texts.append((await session.push(line)).text)
    return texts


async def compare(sandbox: Sandbox, transcripts: Sequence[Transcript], expected: Sequence[list[str]]) -> list[Mismatch]:
    """Replay all transcripts, several at a time. Return at most one mismatch per transcript: later lines depend on
    it."""
    gate = asyncio.Semaphore(_CONSOLES_AT_ONCE)

    async def one(transcript: Transcript, texts: list[str]) -> Mismatch | None:
        async with gate:
            got = await replay(sandbox, transcript)
        return _first_difference(transcript, texts, got)

    found = await asyncio.gather(*map(one, transcripts, expected))
    return [mismatch for mismatch in found if mismatch is not None]


def _first_difference(transcript: Transcript, expected: list[str], got: list[str]) -> Mismatch | None:
    for line, want, have in zip(transcript.lines, expected, got, strict=False):
        if _normal(want) != _normal(have):
            return Mismatch(transcript.name, line, want, have)
    if len(expected) != len(got):
        return Mismatch(transcript.name, "(end)", f"{len(expected)} lines", f"{len(got)} lines")
    return None
