"""History of the cells that ran in this kernel, for `history_request`. It is in memory and ends with the kernel."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

SESSION = 1
"""Number of the only session. Clients may also use 0, which means "this one"."""


@dataclass(frozen=True)
class Entry:
    """One cell."""

    line: int
    """Execution count."""
    source: str
    output: str | None
    """Result as text. None means no result."""


class History:
    """Cells in the order in which they ran."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Add a cell."""
        self._entries.append(entry)

    def tail(self, n: int | None) -> list[Entry]:
        """Return the last `n` cells, or all if `n` is None."""
        return _last(self._entries, n)

    def between(self, session: int, start: int, stop: int | None) -> list[Entry]:
        """Return the cells of a session from the count `start` up to `stop`, without `stop`."""
        if session not in (0, SESSION):
            return []
        return [entry for entry in self._entries if start <= entry.line and (stop is None or entry.line < stop)]

    def search(self, pattern: str, n: int | None, *, unique: bool) -> list[Entry]:
        """Return the last `n` cells whose source matches a glob pattern. `unique`: each source once, at its last
        run."""
        found: Iterable[Entry] = [e for e in self._entries if fnmatch.fnmatchcase(e.source, pattern)]
        if unique:
            found = sorted({entry.source: entry for entry in found}.values(), key=lambda entry: entry.line)
        return _last(list(found), n)


def _last(entries: list[Entry], n: int | None) -> list[Entry]:
    return entries if n is None else entries[max(0, len(entries) - n) :]
