"""Batches of groups that workers play: they share the workers' concurrency, with their calls and results."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from repl_rl.errors import BrokenDown
from repl_rl.rollout.again import Part
from repl_rl.rollout.fleet.messages import Group
from repl_rl.rollout.fleet.schedule import Attempt, Schedule

MOST_BEGUN = 6
"""Attempts per group. A group that has lost this many workers ends the run, because it is probably the cause."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Group, and the place of its result."""

    group: Group
    parts: dict[int, Part]
    place: int


@dataclass(slots=True)
class Batch:
    """Groups of one or several callers, started in the order of the requests."""

    schedule: Schedule
    early: bool
    """True for groups of later steps; callers may add more meanwhile."""
    asked: dict[int, _Asked] = field(default_factory=dict)
    """Groups without a result, by number."""
    callers: int = 0
    calls: set["asyncio.Task[None]"] = field(default_factory=set)
    error: Exception | None = None
    news: bool = True

    def ask(self, groups: Sequence[Group], parts: dict[int, Part]) -> None:
        """Add groups. The result of each appears in `parts`, under the index of the group."""
        self.callers += 1
        numbers = self.schedule.add([group.size for group in groups])
        for place, (number, group) in enumerate(zip(numbers, groups, strict=True)):
            self.asked[number] = _Asked(group, parts, place)
        self.news = True

    def group(self, attempt: Attempt) -> Group:
        """Return the group of an attempt; it has no result yet."""
        return self.asked[attempt.group].group

    def played(self, attempt: Attempt, part: Part) -> bool:
        """Record a result. Return False if it is too late, because another attempt counts."""
        if not self.schedule.finish(attempt):
            return False
        asked = self.asked.pop(attempt.group)
        asked.parts[asked.place] = part
        return True

    def begun(self, call: "asyncio.Task[None]") -> None:
        """Track a call of a worker until it ends."""
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    async def end(self) -> None:
        """Cancel the calls that no caller waits for any more."""
        calls = list(self.calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class Batches:
    """Running batches, and the workers that can play them."""

    def __init__(self, places: int, within_s: float) -> None:
        """Start without workers and batches.

        Args:
            places: number of concurrent rollouts per worker (>= 1).
            within_s: timeout of a group, seconds (> 0).
        """
        self._places, self._within_s = places, within_s
        self._nodes: list[str] = []
        self._batches: list[Batch] = []
        self.replayed = 0
        """Number of groups that were started again."""

    def join(self, node: str) -> None:
        """Add a worker to all batches."""
        self._nodes.append(node)
        for batch in self._batches:
            batch.schedule.join(node, self._places)

    def leave(self, node: str, why: str) -> None:
        """Remove a lost worker; its groups wait again."""
        if node in self._nodes:
            self._nodes.remove(node)
        for batch in self._batches:
            lost = batch.schedule.leave(node)
            self.replayed += len(lost)
            # A group that keeps losing workers is probably the cause: end its batch.
            for attempt in lost:
                if attempt.number >= MOST_BEGUN:
                    task = batch.group(attempt).task.id
                    gone = f"{task}, under which {MOST_BEGUN} nodes have gone, the last one so: {why}"
                    batch.error = BrokenDown("task", gone, "see what its rollouts do to a node")
        self.news()

    def news(self) -> None:
        """Mark all batches as changed."""
        for batch in self._batches:
            batch.news = True

    def overdue(self, now_s: float) -> Iterator[tuple[Attempt, str]]:
        """Yield overdue attempts, with the task id of each."""
        for batch in self._batches:
            for attempt in batch.schedule.overdue(now_s):
                yield attempt, batch.group(attempt).task.id

    def taking(self, early: bool) -> Batch:
        """Return the batch for new groups: prefetched groups share one, other groups get a new one."""
        for batch in self._batches:
            # A batch with an error takes no more groups.
            if early and batch.early and batch.error is None:
                return batch
        batch = Batch(Schedule((), self._within_s), early)
        for node in self._nodes:
            batch.schedule.join(node, self._places)
        self._batches.append(batch)
        return batch

    async def left(self, batch: Batch) -> None:
        """Remove one caller of a batch. The batch ends with its last caller."""
        batch.callers -= 1
        if not batch.callers:
            self._batches.remove(batch)
            await batch.end()
