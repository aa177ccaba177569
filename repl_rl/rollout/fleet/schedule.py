"""Assignment of groups to workers, without a clock and without a network.

Groups start in order. A group of a lost worker starts again from its beginning, before all groups that have not
started. Only the result of a group's latest attempt counts, so a late result never counts twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt to play a group on a worker."""

    group: int
    number: int
    """Number of the attempt for this group, from 1."""
    node: str
    due_s: float
    """Time after which the attempt is overdue."""


@dataclass(slots=True)
class _Member:
    places: int
    held: int = 0


class Schedule:
    """Groups of a batch, and the workers that can play them."""

    def __init__(self, sizes: Sequence[int], within_s: float) -> None:
        """Add the first groups.

        Args:
            sizes: rollouts per group (>= 1).
            within_s: timeout of an attempt, seconds (> 0).
        """
        self._sizes: list[int] = []
        self._within_s = within_s
        self._waiting: list[int] = []
        self._begun: list[int] = []
        self._running: dict[int, Attempt] = {}
        self._done: set[int] = set()
        self._members: dict[str, _Member] = {}
        self.add(sizes)

    def add(self, sizes: Sequence[int]) -> range:
        """Add groups that start after the present ones, and return their numbers."""
        numbers = range(len(self._sizes), len(self._sizes) + len(sizes))
        self._sizes += sizes
        self._begun += [0] * len(sizes)
        self._waiting += numbers  # still a heap: each number is larger than all before it
        return numbers

    @property
    def finished(self) -> bool:
        """True if every group has a result."""
        return len(self._done) == len(self._sizes)

    @property
    def running(self) -> Mapping[int, Attempt]:
        """Running attempt of each group."""
        return self._running

    @property
    def waiting(self) -> int:
        """Number of groups that wait for a worker."""
        return len(self._waiting)

    def join(self, node: str, places: int) -> None:
        """Add a worker with room for `places` rollouts (>= 1). Its name must be new."""
        assert node not in self._members, node
        self._members[node] = _Member(places)

    def leave(self, node: str) -> list[Attempt]:
        """Remove a worker, and return its attempts. Their groups wait again."""
        lost = [attempt for attempt in self._running.values() if attempt.node == node]
        for attempt in lost:
            del self._running[attempt.group]
            # Lower numbers come first in the heap, so these groups start before newer ones.
            heappush(self._waiting, attempt.group)
        self._members.pop(node, None)
        return lost

    def assign(self, now_s: float) -> Iterator[Attempt]:
        """Yield attempts to start: the first waiting group goes to the worker with most room.

        A group that is larger than the room of any worker goes to an idle worker.
        """
        while self._waiting and (node := self._roomiest(self._sizes[self._waiting[0]])) is not None:
            group = heappop(self._waiting)
            self._begun[group] += 1
            self._members[node].held += self._sizes[group]
            attempt = self._running[group] = Attempt(group, self._begun[group], node, now_s + self._within_s)
            yield attempt

    def finish(self, attempt: Attempt) -> bool:
        """Record a result. Return False if it is too late, because another attempt counts."""
        if self._running.get(attempt.group) != attempt:
            return False
        del self._running[attempt.group]
        self._members[attempt.node].held -= self._sizes[attempt.group]
        self._done.add(attempt.group)
        return True

    def overdue(self, now_s: float) -> list[Attempt]:
        """Return the attempts that are overdue."""
        return [attempt for attempt in self._running.values() if attempt.due_s <= now_s]

    def _roomiest(self, size: int) -> str | None:
        # The smallest pair is the worker with most free room; ties go by name.
        fit = [
            (member.held - member.places, name)
            for name, member in self._members.items()
            if not member.held or member.held + size <= member.places
        ]
        return min(fit)[1] if fit else None
