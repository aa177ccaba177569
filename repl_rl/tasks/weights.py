"""Parser for several judges with weights: `numeric + 0.2*my_judges:format`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from repl_rl.errors import ConfigError
from repl_rl.tasks.model import Task

OWN = "task"
"""Placeholder in an expression for the judge that each task names itself."""
_REMEDY = "write judges with + between, each a name or weight*name, such as numeric + 0.2*my_judges:format"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A judge and the factor on its value."""

    name: str
    weight: float = 1.0

    def __str__(self) -> str:
        return self.name if self.weight == 1.0 else f"{self.weight!r}*{self.name}".replace("e+", "e")


@lru_cache(maxsize=256)
def weighed(text: str) -> tuple[Weighed, ...]:
    """Return the judges of an expression, at least one. The value of the first one decides if a task is solved.

    Raises:
        ConfigError: the syntax is different, a weight is not a finite number, or a judge is named twice.
    """
    found = tuple(_term(text, term.strip()) for term in text.split("+"))
    if len({judge.name for judge in found}) < len(found):
        raise ConfigError("judge", text, "name each judge once, with one weight")
    return found


def _term(text: str, term: str) -> Weighed:
    weight, times, name = term.rpartition("*")
    try:
        factor = float(weight) if times else 1.0
    except ValueError:
        factor = math.nan
    if not name.strip() or not math.isfinite(factor):
        raise ConfigError("judge", text, _REMEDY)
    return Weighed(name.strip(), factor)


def judged_by(text: str, tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks with the judges of an expression, in which `task` means the task's own judge. "" changes
    nothing.

    Raises:
        ConfigError: see `weighed`.
    """
    if not text:
        return tuple(tasks)
    wanted = weighed(text)
    return tuple(replace(task, judge=_for(task, wanted)) for task in tasks)


def _for(task: Task, wanted: tuple[Weighed, ...]) -> str:
    parts: list[Weighed] = []
    for judge in wanted:
        # The placeholder expands to the task's own judges.
        own = weighed(task.judge) if judge.name == OWN else (Weighed(judge.name),)
        parts += [Weighed(one.name, one.weight * judge.weight) for one in own]
    return " + ".join(map(str, parts))
