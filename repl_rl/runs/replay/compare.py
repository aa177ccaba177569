"""Comparison of a line's recorded and replayed output: the difference and its probable cause."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from repl_rl.record.trajectory import LineStatus
from repl_rl.rollout.blocks import as_comments, error_message, printed_in
from repl_rl.sandbox.base import PushResult


class Cause(StrEnum):
    """Probable cause of a difference, guessed from the output and from the names in the line."""

    ADDRESSES = "addresses"
    """Only addresses of objects differ."""
    TIME = "time"
    """The line depends on a clock, or only one of the two runs reached its time limit."""
    RANDOMNESS = "randomness"
    """The line depends on a random source, or two replays differ."""
    ENVIRONMENT = "environment"
    """Replays agree with each other, so the environment of the console has changed."""
    HOST = "host"
    """The line makes other calls of host functions than recorded; answers come from the record."""
    EDIT = "edit"
    """A line was typed before it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Text that a console showed for a line, and the line's status."""

    text: str
    """Output and next prompt, as an observation would hold them."""
    status: LineStatus
    cut: bool = False
    """True if a marker replaces the middle of the text."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Line that shows something else than recorded."""

    line: int
    """Number of the line in the trajectory, from 0."""
    recorded: Shown
    now: Shown
    cause: Cause


_CUT = re.compile(r"\n\[\.\.\. \d+ (?:tokens|characters) cut \.\.\.\]\n")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]*")
_TORN_ADDRESS = re.compile(r"(?<= cut \.\.\.\]\n)[0-9a-fA-Fx]{1,16}(?=>)")
"""Rest of an object's address that a truncation cuts in two."""
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
    """Return True if a line shows what is recorded. If the record's middle is cut, its two ends must agree."""
    if recorded.status is not now.status:
        return False
    if recorded.text == now.text or not recorded.cut:
        return recorded.text == now.text
    # A program may have printed text that looks like the marker, so try every match. A cut between two tokens may split
    # a character, which decodes to replacement characters.
    for cut in _CUT.finditer(recorded.text):
        head, tail = recorded.text[: cut.start()].rstrip("\ufffd"), recorded.text[cut.end() :].lstrip("\ufffd")
        if len(head) + len(tail) <= len(now.text) and now.text.startswith(head) and now.text.endswith(tail):
            return True
    return False


def held(recorded: Shown, result: PushResult) -> bool:
    """Return True if a sampler's observation of console output contains the output of the replay.

    Between the fences of the shipped sampler, and in comments, the whole text is compared. In any other text, each line
    of the output must occur, in order. If that text was cut, only the status is compared.
    """
    printed = printed_in(recorded.text)
    if printed is not None:
        end = "\n" if result.text and not result.text.endswith("\n") else ""
        return same(replace(recorded, text=printed), Shown(result.text + end, result.status, result.cut))
    if recorded.status is not result.status or is_shown_as_comments(recorded, result):
        return recorded.status is result.status
    return recorded.cut or _occurs(error_message(result).rstrip("\n"), recorded.text)


def is_shown_as_comments(recorded: Shown, result: PushResult) -> bool:
    """Return True if an observation is the output of a line as comments within its block."""
    return same(recorded, Shown(as_comments(result), result.status, result.cut))


def _occurs(printed: str, text: str) -> bool:
    """Return True if `text` has each line of `printed`, in order."""
    at = 0
    for line in printed.split("\n"):
        found = text.find(line, at)
        if found < 0:
            return False
        at = found + len(line)
    return True


def cause(sources: Sequence[str], recorded: Shown, now: Shown, again: Shown | None) -> Cause:
    """Return the probable cause of a difference.

    `sources` are the executed lines, this one last; `again` is a second replay.
    """
    if same(_without_addresses(recorded), _without_addresses(now)):
        return Cause.ADDRESSES
    if LineStatus.TIMEOUT in (recorded.status, now.status) and recorded.status is not now.status:
        return Cause.TIME
    # Look for clocks, random sources and the like in every line that this one depends on.
    words = _reached(sources)
    for found, names in _SOURCES.items():
        if words & names:
            return found
    return Cause.ENVIRONMENT if again is None or again == now else Cause.RANDOMNESS


def _without_addresses(shown: Shown) -> Shown:
    text = _TORN_ADDRESS.sub("", shown.text) if shown.cut else shown.text
    return Shown(_ADDRESS.sub("", text), shown.status, shown.cut)


def _reached(sources: Sequence[str]) -> set[str]:
    """Collect the words of the last line, and of each earlier line that binds one of the words so far."""
    words = set(_WORD.findall(sources[-1]))
    for source in reversed(sources[:-1]):
        for physical in source.split("\n"):
            found = _BINDS.match(physical)
            bound = _WORD.findall(found[1] if found and found[1] is not None else physical) if found else []
            if words.intersection(bound):
                words.update(_WORD.findall(source))
    return words
