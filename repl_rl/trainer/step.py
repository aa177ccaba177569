"""What the trainer holds of the step at hand."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from repl_rl.credit.credited import LineCredit
from repl_rl.credit.group import line_credit
from repl_rl.record.trajectory import Trajectory
from repl_rl.trainer.correction import Gap


@dataclass(frozen=True, slots=True)
class StepState:
    """The rollouts of a step on this process, and what they earned."""

    trajectories: tuple[Trajectory, ...]
    """As they were played."""
    learned: tuple[Trajectory, ...]
    """The same, as training sees them: see `StopPolicy`."""
    rows: tuple[Trajectory, ...]
    """Those of the update, B of them: `learned`, then what was sampled for host functions and is trained, then idle
    ones that fill it up."""
    advantages: Tensor
    """Of each token, float32, shape (B, T)."""
    credit: tuple[tuple[Sequence[float], Sequence[float]], ...]
    """Rewards and advantages of the lines of each rollout."""
    metrics: dict[str, float]
    """How line rewards stand to outcomes, and lengths to both, over all processes."""
    named: dict[str, float]
    """Mean sum of a rollout's line rewards, by who gave them, over all processes."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What the trainer's policy makes of these rollouts, and how far that is from the sampler's."""

    gap: Gap
    logprobs: Tensor
    """Of each token, nats, float32 on the CPU, shape (B, T)."""
    metrics: dict[str, float]
    """Metrics of shared prefixes and of the age of lines, by name; empty without either."""


def line_credits(state: StepState, scored: Scored) -> list[tuple[LineCredit, ...]]:
    """What each line of this process's rollouts was worth in the step."""
    rows = zip(state.learned, state.credit, scored.logprobs[: len(state.learned)].tolist(), strict=True)
    return [line_credit(t, *credit, logprobs[: len(t.completion_ids)]) for t, credit, logprobs in rows]


def outcome(trajectory: Sequence[Trajectory], **_: object) -> list[float | None]:
    """TRL's reward function: the outcome of each rollout; None leaves it out of every baseline."""
    return [t.outcome if t.trainable else None for t in trajectory]
