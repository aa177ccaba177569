"""Which node plays which group: pure, without a clock and without a network.

Groups are begun in their order. A group whose node has left is begun again, from its start, before all that have not
been begun. An answer counts if it is that of the group's latest attempt: nothing counts twice, however late it comes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class Attempt:
    """A group that is being played on a node."""

    group: int
    number: int
    """How often it was begun, this time included."""
    node: str
    due_s: float
    """When it has taken too long."""


@dataclass(slots=True)
class _Member:
    places: int
    held: int = 0


class Schedule:
    """The groups of a batch, and the nodes that are there."""

    def __init__(self, sizes: Sequence[int], within_s: float) -> None:
        """
        Args:
            sizes: rollouts of each group (>= 1).
            within_s: how long an attempt may take (> 0).
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
        """More groups, which are begun after those that are there. Returns their numbers."""
        numbers = range(len(self._sizes), len(self._sizes) + len(sizes))
        self._sizes += sizes
        self._begun += [0] * len(sizes)
        self._waiting += numbers  # still a heap: each is larger than all before it
        return numbers

    @property
    def finished(self) -> bool:
        """Whether every group has been played."""
        return len(self._done) == len(self._sizes)

    @property
    def running(self) -> Mapping[int, Attempt]:
        """By group."""
        return self._running

    @property
    def waiting(self) -> int:
        """Groups that no node plays yet, or any more."""
        return len(self._waiting)

    def join(self, node: str, places: int) -> None:
        """A node is there, with room for as many rollouts (>= 1). Its name has not been used before."""
        assert node not in self._members, node
        self._members[node] = _Member(places)

    def leave(self, node: str) -> list[Attempt]:
        """A node is gone. Returns what it was playing: those groups wait again."""
        lost = [attempt for attempt in self._running.values() if attempt.node == node]
        for attempt in lost:
            del self._running[attempt.group]
            heappush(self._waiting, attempt.group)
        self._members.pop(node, None)
        return lost

    def assign(self, now_s: float) -> Iterator[Attempt]:
        """Begin what there is room for: the first group that waits goes where most room is.

        A group that is larger than any node's room is played by a node that plays nothing else.
        """
        while self._waiting and (node := self._roomiest(self._sizes[self._waiting[0]])) is not None:
            group = heappop(self._waiting)
            self._begun[group] += 1
            self._members[node].held += self._sizes[group]
            attempt = self._running[group] = Attempt(group, self._begun[group], node, now_s + self._within_s)
            yield attempt

    def finish(self, attempt: Attempt) -> bool:
        """An answer has come. False: it is too late, another attempt counts."""
        if self._running.get(attempt.group) != attempt:
            return False
        del self._running[attempt.group]
        self._members[attempt.node].held -= self._sizes[attempt.group]
        self._done.add(attempt.group)
        return True

    def overdue(self, now_s: float) -> list[Attempt]:
        """Attempts that have taken too long: their nodes are no good."""
        return [attempt for attempt in self._running.values() if attempt.due_s <= now_s]

    def _roomiest(self, size: int) -> str | None:
        fit = [
            (member.held - member.places, name)
            for name, member in self._members.items()
            if not member.held or member.held + size <= member.places
        ]
        return min(fit)[1] if fit else None
