"""Parts of an outcome: claims of a sampler during the rollout, and values of judges after it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from repl_rl.errors import ConfigError
from repl_rl.record.line import NamedReward
from repl_rl.record.trajectory import Trajectory

JUDGE = "judge"
"""Name of a single judge's part, if other parts join it later."""


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of a sampler about the outcome, on the sampler's scale."""

    value: NamedReward | None = None
    """Outcome that replaces the judges' value. None keeps the judges' value."""
    added: tuple[NamedReward, ...] = ()
    """Additions to either value."""

    def claim(self, value: float, name: str, add: bool) -> "Claims":
        """Return the claims with one more. Of several that set the outcome, the last one counts.

        Raises:
            ConfigError: the value is not finite, or the name is empty.
        """
        if not math.isfinite(value):
            raise ConfigError(f"episode.outcome(name={name!r})", value, "give a finite number")
        if not name.strip():
            raise ConfigError("episode.outcome(), name", name, "say what it is for")
        reward = NamedReward(name, float(value))
        return replace(self, added=(*self.added, reward)) if add else replace(self, value=reward)

    def parts(self, judged: Sequence[NamedReward]) -> tuple[NamedReward, ...]:
        """Return the parts that add up to the outcome, given the values of the judges."""
        return (*(judged if self.value is None else (self.value,)), *self.added)


def with_parts(trajectory: Trajectory, parts: Sequence[NamedReward], grade: float | None) -> Trajectory:
    """Return the rollout with the sum of `parts`, at least one, as its outcome."""
    total = math.fsum(part.value for part in parts)
    return replace(trajectory, outcome=total, outcomes=tuple(parts), grade=grade)


def increased(trajectory: Trajectory, more: NamedReward) -> Trajectory:
    """Return the rollout with one more part in its outcome. An ungraded rollout gets that part alone."""
    if trajectory.outcomes or trajectory.outcome is None:
        return with_parts(trajectory, (*trajectory.outcomes, more), trajectory.grade)
    # A single judge's outcome becomes a part, and stays the grade.
    before = trajectory.outcome
    return with_parts(trajectory, (NamedReward(JUDGE, before), more), before)
