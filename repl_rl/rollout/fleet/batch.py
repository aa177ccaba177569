"""What a fleet is playing: groups that share the nodes' room, with their calls and what came of them."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from repl_rl.errors import BrokenDown
from repl_rl.rollout.again import Part
from repl_rl.rollout.fleet.messages import Group
from repl_rl.rollout.fleet.schedule import Attempt, Schedule

MOST_BEGUN = 6
"""A group under which so many nodes have gone ends the run: it is probably why."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A group, and where its part goes."""

    group: Group
    parts: dict[int, Part]
    place: int


@dataclass(slots=True)
class Batch:
    """Groups that are begun in the order in which they were asked for, by one call or by several."""

    schedule: Schedule
    early: bool
    """They are of steps to come, and more may be asked for meanwhile."""
    asked: dict[int, _Asked] = field(default_factory=dict)
    """Groups that have not been played, by their number."""
    callers: int = 0
    calls: set["asyncio.Task[None]"] = field(default_factory=set)
    error: Exception | None = None
    news: bool = True

    def ask(self, groups: Sequence[Group], parts: dict[int, Part]) -> None:
        """Play these too. The part of each is in `parts` under its place among them, once it has come."""
        self.callers += 1
        numbers = self.schedule.add([group.size for group in groups])
        for place, (number, group) in enumerate(zip(numbers, groups, strict=True)):
            self.asked[number] = _Asked(group, parts, place)
        self.news = True

    def group(self, attempt: Attempt) -> Group:
        """What it plays; it has not been played."""
        return self.asked[attempt.group].group

    def played(self, attempt: Attempt, part: Part) -> bool:
        """An answer has come. False: it is too late, another attempt counts."""
        if not self.schedule.finish(attempt):
            return False
        asked = self.asked.pop(attempt.group)
        asked.parts[asked.place] = part
        return True

    def begun(self, call: "asyncio.Task[None]") -> None:
        """A node was called."""
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

    async def end(self) -> None:
        """Cancel what nobody waits for any more."""
        calls = list(self.calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


class Batches:
    """Those that are being played, and the nodes that can play."""

    def __init__(self, places: int, within_s: float) -> None:
        """
        Args:
            places: rollouts under way at once on a node (>= 1).
            within_s: how long a group may take (> 0).
        """
        self._places, self._within_s = places, within_s
        self._nodes: list[str] = []
        self._batches: list[Batch] = []
        self.replayed = 0
        """Groups that were begun again."""

    def join(self, node: str) -> None:
        """A node can play."""
        self._nodes.append(node)
        for batch in self._batches:
            batch.schedule.join(node, self._places)

    def leave(self, node: str, why: str) -> None:
        """A node is lost: what it was to play waits again."""
        if node in self._nodes:
            self._nodes.remove(node)
        for batch in self._batches:
            lost = batch.schedule.leave(node)
            self.replayed += len(lost)
            for attempt in lost:
                if attempt.number >= MOST_BEGUN:
                    task = batch.group(attempt).task.id
                    gone = f"{task}, under which {MOST_BEGUN} nodes have gone, the last one so: {why}"
                    batch.error = BrokenDown("task", gone, "see what its rollouts do to a node")
        self.news()

    def news(self) -> None:
        """Something has happened."""
        for batch in self._batches:
            batch.news = True

    def overdue(self, now_s: float) -> Iterator[tuple[Attempt, str]]:
        """What has taken too long, with the task of each."""
        for batch in self._batches:
            for attempt in batch.schedule.overdue(now_s):
                yield attempt, batch.group(attempt).task.id

    def taking(self, early: bool) -> Batch:
        """Where more groups go: those of steps to come to one another, others apart."""
        for batch in self._batches:
            if early and batch.early and batch.error is None:
                return batch
        batch = Batch(Schedule((), self._within_s), early)
        for node in self._nodes:
            batch.schedule.join(node, self._places)
        self._batches.append(batch)
        return batch

    async def left(self, batch: Batch) -> None:
        """Who asked for groups of it does not wait any more."""
        batch.callers -= 1
        if not batch.callers:
            self._batches.remove(batch)
            await batch.end()
