"""How a rollout ended: the first reason stands, and a failure stands above all."""

from repl_rl.errors import ConfigError, SandboxLost
from repl_rl.record.trajectory import Failure, Stop

_NOTED = frozenset({Stop.ANSWERED, Stop.EOS, Stop.LINE_TOO_LONG, Stop.FAULT})
"""Stops that go with something in the record."""


class Ending:
    """Why nothing further can be sampled, once that is so."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.failure: Failure | None = None
        self.unwanted = False
        """Whoever follows it wants the line sampled last not to run."""
        self.lost: SandboxLost | None = None
        """How its console was lost, where it was: nobody can go on with it."""

    def end(self, reason: Stop) -> None:
        """End it, if it has not ended."""
        self.stop = self.stop or reason

    def finish(self, reason: Stop) -> None:
        """End it for a reason that a sampler may give.

        Raises:
            ConfigError: `reason` is one that only what happened can give.
        """
        if reason in _NOTED:
            raise ConfigError("episode.finish(), reason", str(reason), "it is noted where it happens; leave it out")
        self.end(reason)

    def refuse(self) -> None:
        """Whoever follows it wants no more, from the line sampled last on."""
        self.unwanted = True
        self.end(Stop.FINISHED)

    def answer(self) -> None:
        """Its last line gave the answer, which counts for more than the token that closed that line."""
        if self.stop is Stop.EOS:
            self.stop = Stop.ANSWERED

    def fail(self, failure: Exception) -> None:
        """Note a failure, the first one: whatever else ended it, it is no trajectory to learn from."""
        self.stop = Stop.FAULT
        self.failure = self.failure or Failure.of(failure)
        if isinstance(failure, SandboxLost):
            self.lost = failure
