"""Rewards from a sampler: per line, and for the whole rollout."""

from repl_rl.record.outcome import Claims
from repl_rl.record.record import Record


class Earning:
    """Reward methods of an episode."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.claims = Claims()
        """Claims on the outcome so far."""

    def reward(self, value: float, name: str = "sampler", line: int = -1) -> None:
        """Add a reward (dimensionless, finite) to a sampled line, under a name for the metrics.

        Args:
            value: added unchanged to the other rewards of the line; it is neither bounded nor scaled.
            name: purpose of the reward; a line may have several rewards of one name.
            line: index among all sampled lines; -1 is the last one.

        Raises:
            ConfigError: the line does not exist, or `value` is not finite.
        """
        self._record.reward(value, name, line)

    def outcome(self, value: float, name: str = "sampler", add: bool = False) -> None:
        """Set or increase the outcome of the whole rollout, under a name for the metrics.

        A submitted answer is still graded, and the grade decides if the task is solved.

        Args:
            value: finite number on any scale. It replaces the outcome of the task's judge. The last value that is set
                wins.
            name: purpose of the value.
            add: add `value` to the outcome (the judge's, or one that was set) instead of replacing it.

        Raises:
            ConfigError: `value` is not finite, or `name` is blank.
        """
        self.claims = self.claims.claim(value, name, add)
