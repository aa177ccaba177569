"""Trajectories with the credit that training gave them, and the extra rows of an update.

`CreditedTrajectory` stores the credit separately from the trajectory, because credit is computed after the rollout.

Extra rows are of two kinds. Children are trajectories that were sampled for calls of host functions. Alternatives are
candidates for a line that were sampled, but not chosen. Each sampled token of a child, or of a child of that child,
gets the advantage of the calling line. Children are therefore in no baseline. An alternative becomes a row if the
sampler gave it an advantage. The prompt of that row is everything before the line.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from repl_rl.errors import InvariantError
from repl_rl.trajectory.trajectory import Failure, FailureKind, Line, Observed, Prompt, Sampled, Stop, Trajectory


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
class CreditedTrajectory:
    """A stored trajectory and its credit."""

    trajectory: Trajectory
    credit_L: tuple[LineCredit, ...] = ()
    """One entry per line. () means that training did not use it (an evaluation, or a failure of ours)."""

    def __post_init__(self) -> None:
        # Each log probability belongs to one token of the record.
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


def compute_importance_ratios(line: Line, credit: LineCredit) -> tuple[float, ...]:
    """Return the raw importance ratio of each token, trainer to sampler, or () if the trainer's side is unknown."""
    pairs = zip(credit.logprobs, line.logprobs, strict=False)
    # `math.exp` raises OverflowError above about 709.
    return tuple(math.exp(min(trainer - sampler, 700.0)) for trainer, sampler in pairs)


UpdateRow = tuple[Trajectory, tuple[float, ...]]
"""A trajectory, and one advantage per line."""


def add_child_rows(
    rollouts: Sequence[Trajectory], advantages_B_L: Sequence[Sequence[float]]
) -> tuple[list[Trajectory], list[Sequence[float]]]:
    """Return the rows of an update, the rollouts and then the extra rows of each; and an advantage for each line."""
    rows, values = list(rollouts), list(advantages_B_L)
    for rollout, advantages_L in zip(rollouts, advantages_B_L, strict=True):
        if rollout.trainable:
            children = list(iterate_trained_children(rollout, advantages_L))
            # Lines of children may have alternatives, too.
            alternatives = (
                advantages
                for t in (rollout, *(child for child, _ in children))
                for advantages in iterate_trained_alternatives(t)
            )
            for trajectory, advantages in (*children, *alternatives):
                rows.append(trajectory)
                values.append(advantages)
    return rows, values


def iterate_trained_children(trajectory: Trajectory, advantages_L: Sequence[float]) -> Iterator[UpdateRow]:
    """Yield the trained children of a trajectory, with one advantage per line. `advantages_L` are the parent's."""
    by_id = {child.id: child for child in trajectory.children}
    for line, advantage in zip(trajectory.lines, advantages_L, strict=True):
        for call in line.execution.calls if line.execution is not None else ():
            # A child that failed on our side was sampled, but may not be trained on.
            if call.trained and call.child in by_id and by_id[call.child].trainable:
                child = by_id[call.child]
                # All lines of the child share the advantage of the calling line.
                advantages = (advantage,) * len(child.lines)
                yield child, advantages
                yield from iterate_trained_children(child, advantages)


def iterate_trained_alternatives(trajectory: Trajectory) -> Iterator[UpdateRow]:
    """Yield each trained alternative of a line as a one-line trajectory. Its prompt is all ids before that line."""
    ids_before, line_number = list(trajectory.prompt.token_ids), 0
    for segment in trajectory.segments:
        for line in segment.lines if isinstance(segment, Sampled) else ():
            for index, alternative in enumerate(line.alternatives):
                if alternative.advantage is not None:
                    # The id names the line, and the alternative at that line.
                    ids, step = alternative.token_ids, alternative.policy_step
                    alternative_line = Line(
                        ids, alternative.logprobs, alternative.text, alternative.end, policy_step=step
                    )
                    prompt = Prompt(trajectory.prompt.text, tuple(ids_before))
                    row = _make_single_line_trajectory(
                        trajectory, f"{trajectory.id}~{line_number}.{index}", prompt, alternative_line
                    )
                    yield row, (alternative.advantage,)
            # Later alternatives follow the line that the rollout kept.
            ids_before += line.token_ids
            line_number += 1
        if isinstance(segment, Observed):
            ids_before += segment.token_ids


def _make_single_line_trajectory(like: Trajectory, id: str, prompt: Prompt, line: Line) -> Trajectory:
    segments = (Sampled((line,)),)
    return Trajectory(id, like.task_id, prompt, segments, Stop.FINISHED, like.policy_step, like.seed, 0.0)


def pad_with_idle_rows(
    rows: Sequence[Trajectory], advantages_B_L: Sequence[Sequence[float]], count: int
) -> tuple[list[Trajectory], list[Sequence[float]]]:
    """Return both lists, padded with idle rows to `count` rows."""
    idle = count - len(rows)
    return [*rows, *[make_idle_row(rows[0])] * idle], [*advantages_B_L, *[()] * idle]


def make_idle_row(like: Trajectory) -> Trajectory:
    """Return a row without any trained token, to pad a batch. Its prompt is that of `like`."""
    failure = Failure(FailureKind.OTHER, "no rollout: it fills up a batch")
    return Trajectory("idle", like.task_id, like.prompt, (), Stop.FAULT, like.policy_step, 0, 0.0, failure=failure)
