"""A trajectory with its credit from training, which is kept apart because the record ends with the rollout."""

import math
from dataclasses import dataclass

from repl_rl.errors import InvariantError
from repl_rl.record.trajectory import Line, Trajectory


@dataclass(frozen=True, slots=True)
class LineCredit:
    """Credit of one line in the update."""

    reward: float
    """Reward of the line as the estimator saw it, reward units."""
    advantage: float
    """Advantage of each of its tokens, dimensionless."""
    logprobs: tuple[float, ...] = ()
    """The trainer's log probability of each of its tokens, nats; () if unknown."""

    def __post_init__(self) -> None:
        for name in ("reward", "advantage"):
            if not math.isfinite(getattr(self, name)):
                raise InvariantError(f"LineCredit.{name} is {getattr(self, name)!r}; give a finite number")


@dataclass(frozen=True, slots=True)
class Credited:
    """A stored trajectory and its credit."""

    trajectory: Trajectory
    credit_L: tuple[LineCredit, ...] = ()
    """One entry per line. () means that training did not use it (an evaluation, or a failure of ours)."""

    def __post_init__(self) -> None:
        lines = self.trajectory.lines
        if self.credit_L and len(self.credit_L) != len(lines):
            raise InvariantError(
                f"trajectory {self.trajectory.id} got credit for {len(self.credit_L)} lines and has {len(lines)}; "
                "give one entry per line, or none"
            )
        for line, credit in zip(lines, self.credit_L, strict=False):
            if credit.logprobs and len(credit.logprobs) != len(line.token_ids):
                raise InvariantError(
                    f"trajectory {self.trajectory.id}: {len(credit.logprobs)} log probabilities of the trainer for "
                    f"{len(line.token_ids)} tokens; give one per token, or none"
                )


def ratios(line: Line, credit: LineCredit) -> tuple[float, ...]:
    """Return the raw importance ratio of each token, trainer to sampler, or () if the trainer's side is unknown."""
    pairs = zip(credit.logprobs, line.logprobs, strict=False)
    return tuple(math.exp(min(trainer - sampler, 700.0)) for trainer, sampler in pairs)
