"""Data of the current step: rollouts, their credit, and their log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from repl_rl.credit.credited import LineCredit
from repl_rl.credit.group import line_credit
from repl_rl.record.trajectory import Trajectory
from repl_rl.trainer.correction import Gap


@dataclass(frozen=True, slots=True)
class StepState:
    """Rollouts of a step on this process, with their advantages and credit."""

    trajectories: tuple[Trajectory, ...]
    """Trajectories as they were played."""
    learned: tuple[Trajectory, ...]
    """The same trajectories after the `StopPolicy`, as training uses them."""
    rows: tuple[Trajectory, ...]
    """Rows of the update, B of them: `learned`, then trained children and alternatives, then idle rows as padding."""
    advantages: Tensor
    """Advantage of each token, float32, (B, T)."""
    credit: tuple[tuple[Sequence[float], Sequence[float]], ...]
    """Rewards and advantages of the lines, one pair per rollout."""
    metrics: dict[str, float]
    """Metrics of reward shaping, lengths, groups and curriculum, over all processes."""
    named: dict[str, float]
    """Mean sum of a rollout's line rewards per name of a reward, over all processes."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Log probabilities of these rollouts under the trainer's policy, and their mismatch with the sampler's."""

    gap: Gap
    logprobs: Tensor
    """Log probability of each token, nats, float32 on the CPU, (B, T)."""
    metrics: dict[str, float]
    """Metrics of prefix sharing and staleness, by name; empty without either."""


def line_credits(state: StepState, scored: Scored) -> list[tuple[LineCredit, ...]]:
    """Return the credit of each line of this process's rollouts in the step."""
    # The first rows of the update are the rollouts themselves.
    rows = zip(state.learned, state.credit, scored.logprobs[: len(state.learned)].tolist(), strict=True)
    return [line_credit(t, *credit, logprobs[: len(t.completion_ids)]) for t, credit, logprobs in rows]


def outcome(trajectory: Sequence[Trajectory], **_: object) -> list[float | None]:
    """Return the outcome of each rollout, as TRL's reward function; None leaves a rollout out of every baseline."""
    return [t.outcome if t.trainable else None for t in trajectory]
