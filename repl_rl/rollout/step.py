"""The rollouts of a step, as they are played: in groups, of which some may have ended before."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from repl_rl.engine.base import Pressure
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.again import Part, weigh
from repl_rl.tasks import Task

Places = tuple[int, Sequence[int]]
"""A group of rollouts: the policy step that it was begun for, and the numbers of its rollouts in that step."""


class Step:
    """The rollouts of a step in groups, all of a task: their numbers, ids and seeds are those of one process."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Sequence[int],
        before: Mapping[int, Trajectory] = MappingProxyType({}),
        pressure: Pressure = Pressure(),  # noqa: B008
    ) -> None:
        """
        Args:
            tasks: one a rollout.
            order: numbers of the rollouts; groups are begun in the order in which they first stand there.
            before: rollouts that have ended before, by their number.
            pressure: of what plays them, when they begin.
        """
        self.tasks, self._before, self.pressure = tasks, before, pressure
        found: dict[str, tuple[Task, list[int]]] = {}
        for number in order:
            found.setdefault(tasks[number].id, (tasks[number], []))
        for number, task in enumerate(tasks):
            found[task.id][1].append(number)
        self.groups = list(found.values())
        """The task of each, and the numbers of its rollouts in the step."""
        self.parts: dict[int, Part] = {}
        """Of groups that have ended."""
        self.over = False
        """No more of them end: all have, or something failed."""

    def before(self, places: Sequence[int]) -> Mapping[int, Trajectory]:
        """Those of a group that have ended before, by their number in it."""
        return {n: self._before[place] for n, place in enumerate(places) if place in self._before}

    @property
    def ended(self) -> Mapping[int, Trajectory]:
        """Those of groups that have ended whole, failures too, after the group judges; by their number in the step."""
        parts = list(self.parts.items())  # which an event loop adds to
        return {
            place: t
            for number, part in parts
            for place, t in zip(self.groups[number][1], part.trajectories, strict=True)
        }

    def has_ended(self, places: Sequence[int]) -> bool:
        """Whether there is nothing to wait for any more until those rollouts are known, by their number in the step."""
        ended = self.ended
        return self.over or all(place in ended for place in places)

    @property
    def finished(self) -> Mapping[int, Trajectory]:
        """Those that have ended well, by their number in the step."""
        ended = dict(self._before)
        for number, part in list(self.parts.items()):  # which the event loop adds to
            ended |= dict(zip(self.groups[number][1], part.unjudged or part.trajectories, strict=True))
        return {number: t for number, t in ended.items() if t.failure is None}

    def played(self, parts: Sequence[Part], sandbox: str) -> list[Trajectory]:
        """The rollouts of all groups, in the order of the step. Raises as `weigh`."""
        by_number = sorted(range(len(parts)), key=lambda number: self.groups[number][1][0])
        weigh(Part.of([parts[number] for number in by_number]), sandbox)
        told = {
            number: t
            for (_, places), part in zip(self.groups, parts, strict=True)
            for number, t in zip(places, part.trajectories, strict=True)
        }
        return [told[number] for number in range(len(self.tasks))]


def first_ended(groups: Sequence[Places], step: Callable[[int], Step]) -> int | None:
    """The number of the first of these groups that has ended; None: none has. `step` gives one by its policy step."""
    return next((n for n, (policy_step, places) in enumerate(groups) if step(policy_step).has_ended(places)), None)
