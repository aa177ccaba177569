"""Curriculum that prefers tasks that are solved only sometimes, because equal rollouts have no advantage."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.tasks.task import Task


@keeps_old_names
@dataclass(frozen=True, slots=True)
class CurriculumConfig:
    """Settings of a curriculum."""

    uniform_share: float = 0.2
    """Share of draws that is uniform over all families, regardless of their solve rates, in (0, 1]."""
    decay: float = 0.98
    """Factor that multiplies the weight of a family's earlier outcomes at each new outcome, in (0, 1]. 1 weighs all
    outcomes equally."""

    def __post_init__(self) -> None:
        for name in ("uniform_share", "decay"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"curriculum.{name}", getattr(self, name), "give a number above 0, at most 1")


@keeps_old_names
class Curriculum:
    """Sampler that draws tasks by their family's solve rate p, with a weight of p (1 - p) above a floor.

    A group of rollouts has an advantage only if some are solved and some are not. The probability that two rollouts
    differ is proportional to p (1 - p). Each level of difficulty is a family (`dates/1`, `dates/2`), so harder ones are
    drawn more often as the easier ones are solved. Equal seeds and equal calls give equal draws.
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
        self._remaining: dict[str, list[Task]] = {family: [] for family in self._tasks}
        # Prior of one solved and one unsolved rollout, so that every family is worth a try.
        self._solved = dict.fromkeys(self._tasks, 1.0)
        self._counted = dict.fromkeys(self._tasks, 2.0)

    @property
    def solve_rates(self) -> Mapping[str, float]:
        """Solve rate per family, in (0, 1). Recent outcomes weigh more."""
        return {family: self._solved[family] / self._counted[family] for family in self._tasks}

    @property
    def weights(self) -> Mapping[str, float]:
        """Probability per family that the next task belongs to it. They sum to 1."""
        spread = {family: rate * (1 - rate) for family, rate in self.solve_rates.items()}
        total, floor = sum(spread.values()), self._config.uniform_share
        return {family: floor / len(spread) + (1 - floor) * value / total for family, value in spread.items()}

    def compute_mean_level(self, task_ids: Iterable[str]) -> float:
        """Return the mean level of difficulty of tasks of this curriculum.

        The level is the number in `dates/2`, or 0 for families without one.
        """
        levels = [_parse_level(self._family_of[task_id]) for task_id in task_ids]
        return sum(levels) / max(len(levels), 1)

    def draw(self, count: int) -> tuple[Task, ...]:
        """Draw the next `count` (>= 1) tasks. A task is drawn again only after all others of its family.

        Raises:
            ConfigError: `count` < 1.
        """
        if count < 1:
            raise ConfigError("number of tasks", count, "draw at least 1")
        weights = self.weights
        families = self._rng.choices(list(weights), list(weights.values()), k=count)
        return tuple(self._draw_from_family(family) for family in families)

    def record(self, outcomes: Iterable[tuple[str, float]]) -> None:
        """Record (task id, outcome reward) pairs. An outcome of 1 or more means that the task is solved.

        Raises:
            ConfigError: no task has that id.
        """
        for task_id, outcome in outcomes:
            if task_id not in self._family_of:
                raise ConfigError("task id", task_id, "record outcomes of the curriculum's own tasks")
            family, decay = self._family_of[task_id], self._config.decay
            # The prior never fades, so a rate stays within (0, 1).
            self._solved[family] = 1 + decay * (self._solved[family] - 1) + (outcome >= 1)
            self._counted[family] = 2 + decay * (self._counted[family] - 2) + 1

    def state_dict(self) -> str:
        """Return the state of the curriculum as JSON: the random state, the solve rates and the remaining tasks."""
        remaining = {family: [task.id for task in tasks] for family, tasks in self._remaining.items()}
        return json.dumps(
            {"dice": self._rng.getstate(), "solved": self._solved, "seen": self._counted, "left": remaining},
            sort_keys=True,
        )

    def load_state_dict(self, memory: str) -> None:
        """Restore a state that `state_dict` returned for a curriculum of the same tasks.

        Raises:
            ConfigError: the state names other tasks.
        """
        saved = json.loads(memory)
        tasks = {task.id: task for family in self._tasks.values() for task in family}
        if unknown := sorted({id for ids in saved["left"].values() for id in ids} - tasks.keys()):
            raise ConfigError("task id", unknown[0], "the saved curriculum has this task; resume with the same tasks")
        version, words, gauss = saved["dice"]
        self._rng.setstate((version, tuple(words), gauss))
        # Keep the order of the families, because `choices` adds up the weights in it.
        self._solved = {family: float(saved["solved"][family]) for family in self._tasks}
        self._counted = {family: float(saved["seen"][family]) for family in self._tasks}
        self._remaining = {family: [tasks[id] for id in saved["left"][family]] for family in self._tasks}

    def _draw_from_family(self, family: str) -> Task:
        if not self._remaining[family]:
            # Every task was drawn: shuffle the family again.
            self._remaining[family] = self._rng.sample(self._tasks[family], len(self._tasks[family]))
        return self._remaining[family].pop()


def _parse_level(family: str) -> int:
    _, _, level = family.rpartition("/")
    return int(level) if level.isdecimal() else 0


def assign_tasks(
    curriculum: Curriculum, slots: Sequence[str], group_size: int, process: int = 0, processes: int = 1
) -> Sequence[str]:
    """Draw one task per group of the step, and return the task ids of this process's rollouts in place of `slots`.

    The rollouts of all processes form one sequence, process by process, and a group may span two processes. Every
    process draws for the whole step. Curricula that are built alike and record the same outcomes therefore stay equal.
    """
    tasks = curriculum.draw(processes * len(slots) // group_size)
    # Position of this process's first rollout in the whole step.
    start = process * len(slots)
    return [tasks[(start + index) // group_size].id for index in range(len(slots))]
