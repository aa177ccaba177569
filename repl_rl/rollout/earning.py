"""What a sampler may give: a reward to a line, and the outcome of the whole rollout."""

from repl_rl.record.outcome import Claims
from repl_rl.record.record import Record


class Earning:
    """The part of an episode that rewards."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.claims = Claims()
        """What was said of the outcome so far."""

    def reward(self, value: float, name: str = "sampler", line: int = -1) -> None:
        """Give a sampled line a reward of its own (dimensionless, finite), under a name for the metrics.

        Args:
            value: it is added to what the line earns otherwise, and arrives as it is: nothing bounds or scales it.
            name: what it is for; a line may have several rewards of one name.
            line: which sampled line, as an index into all of them; -1: the last one.

        Raises:
            ConfigError: there is no such line, or `value` is not finite.
        """
        self._record.reward(value, name, line)

    def outcome(self, value: float, name: str = "sampler", add: bool = False) -> None:
        """Say what the whole rollout is worth (finite, on any scale), under a name for the metrics.

        An answer that was submitted is still graded, and the grade says whether the task is solved.

        Args:
            value: it stands in place of what the task's judge gives. The last one stands, where it is said again.
            name: what it is for.
            add: add `value` to the outcome instead, whether that is the judge's or one that was set.

        Raises:
            ConfigError: `value` is not finite, or `name` is blank.
        """
        self.claims = self.claims.claim(value, name, add)
