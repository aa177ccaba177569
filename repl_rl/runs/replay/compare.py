"""What a line printed when it was recorded, and what it prints now: the difference, and what probably caused it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from repl_rl.record.trajectory import LineStatus
from repl_rl.rollout.blocks import printed_in
from repl_rl.sandbox.base import PushResult


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
    HOST = "host"
    """The line calls functions of the host otherwise than it did; answers come from the record."""
    EDIT = "edit"
    """A line was typed before it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a console showed for a line."""

    text: str
    """Output and next prompt, as it would be spliced in."""
    status: LineStatus
    cut: bool = False
    """The middle of the text gave way to a marker."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A line that shows something else than recorded."""

    line: int
    """Its number in the trajectory, from 0."""
    recorded: Shown
    now: Shown
    cause: Cause


_CUT = re.compile(r"\n\[\.\.\. \d+ (?:tokens|characters) cut \.\.\.\]\n")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]*")
_TORN_ADDRESS = re.compile(r"(?<= cut \.\.\.\]\n)[0-9a-fA-Fx]{1,16}(?=>)")
"""Of an object, where a cut lies within it."""
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
    if recorded.text == now.text or not recorded.cut:
        return recorded.text == now.text
    # A program may have printed what looks like the marker, so any place may be the cut. One between two tokens may lie
    # within a character, which then stands there as a replacement mark.
    for cut in _CUT.finditer(recorded.text):
        head, tail = recorded.text[: cut.start()].rstrip("\ufffd"), recorded.text[cut.end() :].lstrip("\ufffd")
        if len(head) + len(tail) <= len(now.text) and now.text.startswith(head) and now.text.endswith(tail):
            return True
    return False


def held(recorded: Shown, result: PushResult) -> bool:
    """True when an observation that a sampler made of the console's output holds what is printed now.

    Between the fences of the shipped sampler the whole text is compared. In another text of a sampler's own, what is
    printed must occur; where that was cut, only the status is compared.
    """
    printed = printed_in(recorded.text)
    if printed is not None:
        end = "\n" if result.text and not result.text.endswith("\n") else ""
        return same(replace(recorded, text=printed), Shown(result.text + end, result.status, result.cut))
    occurs = recorded.cut or result.text.rstrip("\n") in recorded.text
    return recorded.status is result.status and occurs


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
    text = _TORN_ADDRESS.sub("", shown.text) if shown.cut else shown.text
    return Shown(_ADDRESS.sub("", text), shown.status, shown.cut)


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
