"""Which tasks to train on next: most often those that are solved now and then, since only they teach anything."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from repl_rl.errors import ConfigError
from repl_rl.tasks.model import Task


@dataclass(frozen=True, slots=True)
class CurriculumConfig:
    """How a curriculum chooses."""

    floor: float = 0.2
    """Share of draws that goes to all families alike, however often they are solved, in (0, 1]."""
    memory: float = 0.98
    """What an outcome weighs after one more outcome of its family, in (0, 1]; 1 forgets nothing."""

    def __post_init__(self) -> None:
        for name in ("floor", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"curriculum.{name}", getattr(self, name), "give a number above 0, at most 1")


class Curriculum:
    """Draws tasks by their family's solve rate p, with a weight of p (1 - p) above a floor.

    A group of rollouts has an advantage only where some are solved and some are not, and p (1 - p) is how often two
    rollouts differ. Levels of difficulty are families of their own (`dates/1`, `dates/2`), so harder ones come by
    themselves as the easier ones are solved. Equal seeds and equal calls give equal draws.
    """

    def __init__(self, tasks: Sequence[Task], seed: int = 0, config: CurriculumConfig | None = None) -> None:
        if not tasks:
            raise ConfigError("number of tasks", 0, "a curriculum needs at least 1")
        self._config = config or CurriculumConfig()
        self._rng = random.Random(f"{seed}/curriculum")
        self._family_of = {task.id: task.family for task in tasks}
        self._tasks: dict[str, list[Task]] = {}
        for task in tasks:
            self._tasks.setdefault(task.family, []).append(task)
        self._left: dict[str, list[Task]] = {family: [] for family in self._tasks}
        # Before anything is known, one rollout solved and one not: every family is worth a try.
        self._solved = dict.fromkeys(self._tasks, 1.0)
        self._seen = dict.fromkeys(self._tasks, 2.0)

    @property
    def solve_rates(self) -> Mapping[str, float]:
        """By family, in (0, 1): recent outcomes weigh more."""
        return {family: self._solved[family] / self._seen[family] for family in self._tasks}

    @property
    def weights(self) -> Mapping[str, float]:
        """By family: the probability that the next task is one of it. They sum to 1."""
        spread = {family: rate * (1 - rate) for family, rate in self.solve_rates.items()}
        total, floor = sum(spread.values()), self._config.floor
        return {family: floor / len(spread) + (1 - floor) * value / total for family, value in spread.items()}

    def levels(self, task_ids: Iterable[str]) -> float:
        """Mean level of difficulty of tasks of this curriculum: the number in `dates/2`; 0 where there is none."""
        levels = [_level(self._family_of[task_id]) for task_id in task_ids]
        return sum(levels) / max(len(levels), 1)

    def draw(self, count: int) -> tuple[Task, ...]:
        """The next `count` (>= 1) tasks. No task of a family comes again before all others of it have come.

        Raises:
            ConfigError: `count` < 1.
        """
        if count < 1:
            raise ConfigError("number of tasks", count, "draw at least 1")
        weights = self.weights
        families = self._rng.choices(list(weights), list(weights.values()), k=count)
        return tuple(self._next(family) for family in families)

    def record(self, outcomes: Iterable[tuple[str, float]]) -> None:
        """Take in (task id, outcome reward) pairs; an outcome of at least 1 is a solved task.

        Raises:
            ConfigError: there is no task of that id.
        """
        for task_id, outcome in outcomes:
            if task_id not in self._family_of:
                raise ConfigError("task id", task_id, "record outcomes of the curriculum's own tasks")
            family, memory = self._family_of[task_id], self._config.memory
            # The two outcomes of the beginning never fade, so a rate stays within (0, 1).
            self._solved[family] = 1 + memory * (self._solved[family] - 1) + (outcome >= 1)
            self._seen[family] = 2 + memory * (self._seen[family] - 2) + 1

    def memory(self) -> str:
        """Everything that its next draws depend on, as JSON: the dice, the solve rates, and which tasks are left."""
        left = {family: [task.id for task in tasks] for family, tasks in self._left.items()}
        return json.dumps(
            {"dice": self._rng.getstate(), "solved": self._solved, "seen": self._seen, "left": left}, sort_keys=True
        )

    def remember(self, memory: str) -> None:
        """Draw on from where `memory` was asked for, of a curriculum of the same tasks.

        Raises:
            ConfigError: its tasks were others.
        """
        told = json.loads(memory)
        tasks = {task.id: task for family in self._tasks.values() for task in family}
        if other := sorted({id for ids in told["left"].values() for id in ids} - tasks.keys()):
            raise ConfigError("task id", other[0], "the curriculum that was saved had it; give the same tasks")
        version, words, gauss = told["dice"]
        self._rng.setstate((version, tuple(words), gauss))
        # In the order of the families: `choices` adds up weights in it.
        self._solved = {family: float(told["solved"][family]) for family in self._tasks}
        self._seen = {family: float(told["seen"][family]) for family in self._tasks}
        self._left = {family: [tasks[id] for id in told["left"][family]] for family in self._tasks}

    def _next(self, family: str) -> Task:
        if not self._left[family]:
            self._left[family] = self._rng.sample(self._tasks[family], len(self._tasks[family]))
        return self._left[family].pop()


def _level(family: str) -> int:
    _, _, level = family.rpartition("/")
    return int(level) if level.isdecimal() else 0


def assigned(
    curriculum: Curriculum, slots: Sequence[str], group_size: int, process: int = 0, processes: int = 1
) -> Sequence[str]:
    """Task ids for the rollouts of this process, in place of `slots`: one drawn task a group of the whole step.

    Rollouts of all processes stand in one row, process by process, and a group may straddle two. Every process draws
    for the whole step, so curricula that were made and told alike stay alike.
    """
    drawn = curriculum.draw(processes * len(slots) // group_size)
    first = process * len(slots)
    return [drawn[(first + place) // group_size].id for place in range(len(slots))]
