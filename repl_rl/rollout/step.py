"""Rollouts of a step while they run, in groups. Some of them may have ended earlier."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from repl_rl.engine.base import Pressure
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.again import Part, weigh
from repl_rl.tasks import Task

Places = tuple[int, Sequence[int]]
"""Group of rollouts: the policy step that it was started for, and the numbers of its rollouts in that step."""


class Step:
    """Rollouts of a step, one group per task.

    Numbers, ids and seeds are those that a single process would give.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Sequence[int],
        before: Mapping[int, Trajectory] = MappingProxyType({}),
        pressure: Pressure = Pressure(),  # noqa: B008
    ) -> None:
        """Group the rollouts by task.

        Args:
            tasks: one task per rollout.
            order: numbers of the rollouts; groups start in the order of their first rollout in it.
            before: rollouts that ended earlier, by number.
            pressure: preemption statistics of the engine at the start of the step.
        """
        self.tasks, self._before, self.pressure = tasks, before, pressure
        found: dict[str, tuple[Task, list[int]]] = {}
        # The first loop fixes the order of the groups. The second one adds the rollouts in the order of the step.
        for number in order:
            found.setdefault(tasks[number].id, (tasks[number], []))
        for number, task in enumerate(tasks):
            found[task.id][1].append(number)
        self.groups = list(found.values())
        """Task of each group, and the numbers of its rollouts in the step."""
        self.parts: dict[int, Part] = {}
        """Results of the groups that have ended, by index of the group."""
        self.over = False
        """True once no further group will end: all have ended, or something failed."""

    def before(self, places: Sequence[int]) -> Mapping[int, Trajectory]:
        """Return the rollouts of a group that ended earlier, by number in the group."""
        return {n: self._before[place] for n, place in enumerate(places) if place in self._before}

    @property
    def ended(self) -> Mapping[int, Trajectory]:
        """Rollouts of groups that have ended as a whole, by number in the step.

        Failed ones are included. Group judges have already seen all of them.
        """
        parts = list(self.parts.items())  # a copy, because an event loop adds to it
        return {
            place: t
            for number, part in parts
            for place, t in zip(self.groups[number][1], part.trajectories, strict=True)
        }

    def has_ended(self, places: Sequence[int]) -> bool:
        """Return True if a wait for these rollouts, numbered as in the step, is over.

        That is so once all of them have ended, or once no further group will end.
        """
        ended = self.ended
        return self.over or all(place in ended for place in places)

    @property
    def finished(self) -> Mapping[int, Trajectory]:
        """Rollouts that ended without a failure, by number in the step, as they were before group judges."""
        ended = dict(self._before)
        for number, part in list(self.parts.items()):  # a copy, because the event loop adds to it
            ended |= dict(zip(self.groups[number][1], part.unjudged or part.trajectories, strict=True))
        return {number: t for number, t in ended.items() if t.failure is None}

    def played(self, parts: Sequence[Part], sandbox: str) -> list[Trajectory]:
        """Return the rollouts of all groups in the order of the step. Raises the errors of `weigh`."""
        # Sort by position in the step, so that the reported error does not depend on the start order.
        by_number = sorted(range(len(parts)), key=lambda number: self.groups[number][1][0])
        weigh(Part.of([parts[number] for number in by_number]), sandbox)
        told = {
            number: t
            for (_, places), part in zip(self.groups, parts, strict=True)
            for number, t in zip(places, part.trajectories, strict=True)
        }
        return [told[number] for number in range(len(self.tasks))]


def first_ended(groups: Sequence[Places], step: Callable[[int], Step]) -> int | None:
    """Return the index of the first of these groups that has ended, or None if none has.

    `step` is a function from a policy step to its `Step`.
    """
    return next((n for n, (policy_step, places) in enumerate(groups) if step(policy_step).has_ended(places)), None)
