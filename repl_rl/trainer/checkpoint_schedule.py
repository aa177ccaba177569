"""Checkpoint schedule: a limit on lost work, and a limit on the time that saving takes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.settings.component_registry import NameWithOptions, get_options
from repl_rl.settings.value_bounds import Above, AtLeast


@keeps_old_names
@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """Settings of the checkpoint schedule: the limits, and the number of states to keep."""

    every_s: float = 60.0
    """Largest training time that a crash may lose, seconds, or one step if a step takes longer. 0 saves after each
    step, as far as `max_time_share` allows."""
    max_time_share: float = 0.01
    """Largest share of wall clock time for saving, in (0, 1]. It can delay saves, so that more work is lost."""
    keep_last: int = 2
    """Number of newest states to keep; the second one is for the case that the newest is damaged."""


def build_schedule(
    *,
    every_s: Annotated[float, AtLeast(0)] = 60.0,
    max_time_share: Annotated[float, Above(0, at_most=1)] = 0.01,
    keep_last: Annotated[int, AtLeast(1)] = 2,
) -> CheckpointSchedule:
    """Return a schedule that loses at most `every_s` or one step, as far as `max_time_share` allows.

    It keeps the newest `keep_last` states.
    """
    return CheckpointSchedule(every_s, max_time_share, keep_last)


def save_never() -> None:
    """Save no states."""
    return


_SCHEDULES: Mapping[str, Callable[..., CheckpointSchedule | None]] = {"within": build_schedule, "never": save_never}
"""Function of each schedule, by its name in the setting. Its keyword arguments are the options."""


def get_checkpoint_options(name: str) -> Mapping[str, object]:
    """Return the options of a schedule by name, each with its annotation. Raises ConfigError for an unknown name."""
    if name not in _SCHEDULES:
        raise ConfigError("checkpoint", name, f"choose {' or '.join(_SCHEDULES)}")
    return get_options(_SCHEDULES[name])


def parse_checkpoint_schedule(text: str) -> CheckpointSchedule | None:
    """Parse the setting: `within`, which may have options, or `never`, for which None is returned.

    Raises:
        ConfigError: the schedule or an option is unknown, or a value is out of bounds.
    """
    choice = NameWithOptions.parse("checkpoint", text)
    if choice.name not in _SCHEDULES:
        raise ConfigError("checkpoint", text, f"choose {' or '.join(_SCHEDULES)}")
    return choice.bind_options("checkpoint", _SCHEDULES[choice.name])()


class CheckpointTimer:
    """Timer of the checkpoint schedule, read at the end of each step.

    A save is due if both conditions hold. The time since the last save, plus one more step, reaches
    `CheckpointSchedule.every_s`. The cost of the last save is at most `CheckpointSchedule.max_time_share` of the time
    since that save.
    """

    def __init__(self, schedule: CheckpointSchedule, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedule = schedule
        self._clock = clock
        self._saved_s = self._stepped_s = clock()
        self._cost_s = 0.0

    def is_due(self) -> bool:
        """Return True if the step that has just ended is to be saved."""
        now_s = self._clock()
        step_s, self._stepped_s = now_s - self._stepped_s, now_s
        since_s = now_s - self._saved_s
        # The next step is expected to take as long as this one.
        return since_s + step_s >= self._schedule.every_s and since_s * self._schedule.max_time_share >= self._cost_s

    def mark_saved(self) -> None:
        """Record the time of a save."""
        self._saved_s = self._clock()

    def record_cost(self, seconds: float) -> None:
        """Record the cost of the last save, seconds: wall clock time of copying plus processor time of writing."""
        self._cost_s = seconds
