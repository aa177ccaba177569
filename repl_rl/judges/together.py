"""Group judges, which see all rollouts of a task, as a ranking needs."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.machine.threads import InThread
from repl_rl.record.line import NamedReward
from repl_rl.record.outcome import increased
from repl_rl.record.trajectory import Trajectory
from repl_rl.settings.named import imported
from repl_rl.tasks import Task
from repl_rl.tasks.weights import weighed

Together = Callable[[Task, Sequence[Trajectory]], Sequence[float]]
"""Function of a task and its rollouts that returns one finite number per rollout, in reward units."""

TIME_LIMIT_S = 60.0
"""Time limit of a group judge per group, wall clock seconds."""


@dataclass(frozen=True, slots=True)
class GroupJudge:
    """A `Together` function with a weight and checks of its result. It runs in a separate thread of this process."""

    name: str
    function: Together
    weight: float = 1.0
    time_limit_s: float = TIME_LIMIT_S

    def __call__(self, task: Task, group: Sequence[Trajectory]) -> tuple[float, ...]:
        """Return the addition to the outcome of each rollout, shape (G,).

        Raises:
            UserCodeError: the function raised, took too long, or did not return one finite number per rollout.
        """
        who = f"group judge {self.name}: on task {task.id} it"
        call = InThread(lambda: tuple(float(value) for value in self.function(task, tuple(group))), who)
        call.join(self.time_limit_s)
        if not call.outcome.done():
            raise UserCodeError(f"{who} took longer than {self.time_limit_s:g} s; make it faster")
        error = call.outcome.exception()
        if error is not None:
            raise UserCodeError(f"{who} raised {error!r}; correct it") from error
        values = call.outcome.result()
        if len(values) != len(group) or not all(map(math.isfinite, values)):
            raise UserCodeError(f"{who} gave {values!r:.200} for {len(group)} rollouts; give a finite number for each")
        return tuple(self.weight * value for value in values)


def group_judges(text: str) -> tuple[GroupJudge, ...]:
    """Return the group judges of an expression such as `my_judges:shortest + 0.5*my_judges:rank`; none for "".

    Raises:
        ConfigError: the syntax is different, or a function does not exist.
        UserCodeError: a module raised while it was imported.
    """
    return tuple(GroupJudge(j.name, _imported(j.name), j.weight) for j in weighed(text)) if text else ()


def _imported(name: str) -> Together:
    found = imported("group judge", name)
    if not callable(found):
        raise ConfigError("group judge", name, "it is not a function")
    function: Together = found
    return function


async def judged_together(
    judges: Sequence[GroupJudge], tasks: Sequence[Task], played: Sequence[Trajectory]
) -> list[Trajectory]:
    """Return the rollouts, given one task each, with the additions of group judges.

    No judge sees a failed rollout, which stays unchanged.

    Raises:
        UserCodeError: a judge broke its contract.
    """
    found = list(played)
    # Group the rollouts by task, without the failed ones.
    groups: dict[str, list[int]] = {}
    for at, (task, trajectory) in enumerate(zip(tasks, played, strict=True)):
        if trajectory.failure is None:
            groups.setdefault(task.id, []).append(at)
    for judge in judges:
        for places in groups.values():
            # A judge sees the additions of earlier judges.
            values = await asyncio.to_thread(judge, tasks[places[0]], [found[at] for at in places])
            for at, value in zip(places, values, strict=True):
                found[at] = increased(found[at], NamedReward(judge.name, value))
    return found
