"""What a line printed when it was recorded, and what it prints now: the difference, and what probably caused it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from repl_rl.record.trajectory import LineStatus


class Cause(StrEnum):
    """Why a line does not print what it printed. It is a guess from the output and from what the line refers to."""

    ADDRESSES = "addresses"
    """Only addresses of objects differ."""
    TIME = "time"
    """The line depends on a clock, or only one of the two runs reached its time limit."""
    RANDOMNESS = "randomness"
    """The line depends on a random source, or two runs of today differ."""
    ENVIRONMENT = "environment"
    """Runs of today agree with each other: what is around the console is not what it was."""
    EDIT = "edit"
    """A line was typed before it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a console showed for a line."""

    text: str
    """Output and next prompt, as it would be spliced in."""
    status: LineStatus


@dataclass(frozen=True, slots=True)
class Difference:
    """A line that shows something else than recorded."""

    line: int
    """Its number in the trajectory, from 0."""
    recorded: Shown
    now: Shown
    cause: Cause


_CUT = re.compile(r"\n\[\.\.\. \d+ (?:tokens|characters) cut \.\.\.\]\n")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]*|(?<= cut \.\.\.\]\n)[0-9a-fA-Fx]{1,16}(?=>)")
"""Of an object; a cut may lie within one."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_BINDS = re.compile(r"^\s*(?:(?:import|from|def|class|for|with|async|global)\b.*|([^=#]*?)[-+*/%|&^@<>]*=(?!=).*)")
_SOURCES = {
    Cause.TIME: {"time", "datetime", "timeit", "sched", "calendar"},
    Cause.RANDOMNESS: {"random", "secrets", "uuid", "urandom"},
    Cause.ADDRESSES: {"id", "hash"},
    Cause.ENVIRONMENT: {
        "os", "sys", "platform", "socket", "subprocess", "pathlib", "glob", "shutil", "tempfile", "getpass", "locale",
        "resource", "open",
    },
}  # fmt: skip


def same(recorded: Shown, now: Shown) -> bool:
    """True when a line shows what is recorded. Where the middle of the record was cut, its two ends must agree."""
    if recorded.status is not now.status:
        return False
    if recorded.text == now.text:
        return True
    parts = _CUT.split(recorded.text)
    if len(parts) < 2:
        return False
    # A cut between two tokens may lie within a character, which then stands there as a replacement mark.
    head, tail = parts[0].rstrip("\ufffd"), parts[-1].lstrip("\ufffd")
    return len(head) + len(tail) <= len(now.text) and now.text.startswith(head) and now.text.endswith(tail)


def cause(sources: Sequence[str], recorded: Shown, now: Shown, again: Shown | None) -> Cause:
    """Why `recorded` is not `now`. `sources` are the lines that ran, this one last; `again` is a second run now."""
    if same(_without_addresses(recorded), _without_addresses(now)):
        return Cause.ADDRESSES
    if LineStatus.TIMEOUT in (recorded.status, now.status) and recorded.status is not now.status:
        return Cause.TIME
    words = _reached(sources)
    for found, names in _SOURCES.items():
        if words & names:
            return found
    return Cause.ENVIRONMENT if again is None or again == now else Cause.RANDOMNESS


def _without_addresses(shown: Shown) -> Shown:
    return Shown(_ADDRESS.sub("", shown.text), shown.status)


def _reached(sources: Sequence[str]) -> set[str]:
    """The words of the last line, and of every line before it that binds one of the words reached so far."""
    words = set(_WORD.findall(sources[-1]))
    for source in reversed(sources[:-1]):
        for physical in source.split("\n"):
            found = _BINDS.match(physical)
            bound = _WORD.findall(found[1] if found and found[1] is not None else physical) if found else []
            if words.intersection(bound):
                words.update(_WORD.findall(source))
    return words
