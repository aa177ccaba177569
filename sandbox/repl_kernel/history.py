"""What has been run in this kernel, for `history_request`. It is kept in memory and ends with the kernel."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

SESSION = 1
"""The only session there is; clients may also call it 0, "this one"."""


@dataclass(frozen=True)
class Entry:
    """One cell."""

    line: int
    """Its execution count."""
    source: str
    output: str | None
    """Its result as text; None: it had none."""


class History:
    """Cells in the order in which they ran."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Remember one more cell."""
        self._entries.append(entry)

    def tail(self, n: int | None) -> list[Entry]:
        """The last `n` cells; all without."""
        return _last(self._entries, n)

    def between(self, session: int, start: int, stop: int | None) -> list[Entry]:
        """Cells of a session from the count `start` up to, but not with, `stop`."""
        if session not in (0, SESSION):
            return []
        return [entry for entry in self._entries if start <= entry.line and (stop is None or entry.line < stop)]

    def search(self, pattern: str, n: int | None, *, unique: bool) -> list[Entry]:
        """The last `n` cells whose source matches a glob pattern; `unique`: each source once, where it ran last."""
        found: Iterable[Entry] = [e for e in self._entries if fnmatch.fnmatchcase(e.source, pattern)]
        if unique:
            found = sorted({entry.source: entry for entry in found}.values(), key=lambda entry: entry.line)
        return _last(list(found), n)


def _last(entries: list[Entry], n: int | None) -> list[Entry]:
    return entries if n is None else entries[max(0, len(entries) - n) :]
