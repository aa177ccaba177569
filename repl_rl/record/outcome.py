"""What an outcome is made of: what a sampler claims while it plays, and what judges add when the rollout is over."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repl_rl.errors import ConfigError
from repl_rl.record.line import NamedReward
from repl_rl.record.trajectory import Trajectory

JUDGE = "judge"
"""Name of a lone judge's part, where others join it later."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a sampler says about the outcome, on its own scale."""

    value: NamedReward | None = None
    """The outcome, in place of what the task's judge gives; None: the judge's stands."""
    added: tuple[NamedReward, ...] = ()
    """What comes on top of either."""

    def claim(self, value: float, name: str, add: bool) -> "Claims":
        """With one claim more; of several that set the outcome the last one stands.

        Raises:
            ConfigError: the value is not finite, or it has no name.
        """
        if not math.isfinite(value):
            raise ConfigError(f"episode.outcome(name={name!r})", value, "give a finite number")
        if not name.strip():
            raise ConfigError("episode.outcome(), name", name, "say what it is for")
        reward = NamedReward(name, float(value))
        return replace(self, added=(*self.added, reward)) if add else replace(self, value=reward)

    def parts(self, judged: Sequence[NamedReward]) -> tuple[NamedReward, ...]:
        """What the outcome is the sum of, where judges gave `judged`."""
        return (*(judged if self.value is None else (self.value,)), *self.added)


def with_parts(trajectory: Trajectory, parts: Sequence[NamedReward], grade: float | None) -> Trajectory:
    """The rollout with an outcome that is the sum of `parts`, at least one."""
    total = math.fsum(part.value for part in parts)
    return replace(trajectory, outcome=total, outcomes=tuple(parts), grade=grade)


def increased(trajectory: Trajectory, more: NamedReward) -> Trajectory:
    """The rollout with one part more in its outcome; one that nobody graded has that part alone."""
    if trajectory.outcomes or trajectory.outcome is None:
        return with_parts(trajectory, (*trajectory.outcomes, more), trajectory.grade)
    before = trajectory.outcome
    return with_parts(trajectory, (NamedReward(JUDGE, before), more), before)
