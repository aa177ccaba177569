"""Termination of a rollout: its stop reason and its failure.

The first stop reason wins. A failure overrides any reason.
"""

from repl_rl.errors import ConfigError, SandboxLost
from repl_rl.record.trajectory import Failure, Stop

_NOTED = frozenset({Stop.ANSWERED, Stop.EOS, Stop.LINE_TOO_LONG, Stop.FAULT})
"""Stops that the episode itself records; a sampler cannot give them."""


class Ending:
    """Termination state of one rollout."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.failure: Failure | None = None
        self.unwanted = False
        """True if the client that follows this rollout does not want the last sampled line to run."""
        self.lost: SandboxLost | None = None
        """Error that reports the loss of the console, or None. Such a rollout cannot continue."""

    def end(self, reason: Stop) -> None:
        """End the rollout with `reason` if it has not ended yet."""
        self.stop = self.stop or reason

    def finish(self, reason: Stop) -> None:
        """End the rollout for a reason that a sampler may give.

        Raises:
            ConfigError: only the episode itself records `reason`.
        """
        if reason in _NOTED:
            raise ConfigError("episode.finish(), reason", str(reason), "it is noted where it happens; leave it out")
        self.end(reason)

    def refuse(self) -> None:
        """End the rollout because the client wants no more. The last sampled line does not run."""
        self.unwanted = True
        self.end(Stop.FINISHED)

    def answer(self) -> None:
        """Record that the last line gave the answer.

        The answer takes precedence over the end token that closed the line.
        """
        if self.stop is Stop.EOS:
            self.stop = Stop.ANSWERED

    def fail(self, failure: Exception) -> None:
        """Record a failure; only the first one is kept.

        It overrides any stop reason, because the trajectory must not be trained on.
        """
        self.stop = Stop.FAULT
        self.failure = self.failure or Failure.of(failure)
        # The runner retries a rollout that lost its console.
        if isinstance(failure, SandboxLost):
            self.lost = failure
