"""Runtime information and statistics of open rollouts, and the metrics of a step that follow from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from repl_rl.engine.base import Engine, PreemptionStats
from repl_rl.rollout.host_functions import compute_call_metrics
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.sampler_base import ReplSampler, RolloutSampler, count_lines_saved
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class RuntimeInfo:
    """Runtime information of open rollouts; the same in every process that plays them."""

    engine: str
    """Name of the engine."""
    engine_fallback: str | None
    """Reason why the engine runs in a slower mode than requested, or None."""
    sandbox: str
    """Name of the sandbox."""
    sampler_fallback: str | None
    """Fallback that the sampler uses, or None."""
    forbidden_ids: frozenset[int]
    """Ids that the policy never samples."""

    @classmethod
    def from_components(
        cls, engine: Engine, sandbox: str, sampler: RolloutSampler, renderer: Renderer
    ) -> "RuntimeInfo":
        """Collect the runtime information."""
        return cls(engine.name, engine.fallback_reason, sandbox, sampler.fallback(renderer), engine.forbidden_ids)


@dataclass(slots=True)
class PreemptionTracker:
    """Preemption statistics of the last batch."""

    last_batch: PreemptionStats = field(default_factory=PreemptionStats)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Statistics of rollouts since the run began."""

    faults: Mapping[str, int] = field(default_factory=dict)
    """Fault counts by name."""
    preemptions: PreemptionStats | None = None
    """Preemption statistics; None means that the engine has no shared KV cache."""


def compute_step_metrics(
    sampler: RolloutSampler,
    limits: RolloutLimits,
    host: bool,
    trajectories: Sequence[Trajectory],
    preemptions: int | None,
    faults: Mapping[str, int],
) -> dict[str, float]:
    """Return the metrics of a step, in addition to those of its records.

    These are metrics of the sampler, preemptions, lines saved by early stopping, host function calls, and faults. Each
    is included only if it applies.

    Args:
        sampler: sampler of the rollouts, with its own metrics.
        limits: limits of a rollout.
        host: True if lines may call host functions.
        trajectories: trajectories of the step.
        preemptions: number of preemptions; None means that the engine has no shared KV cache.
        faults: fault counts since the run began; left out if all are 0.
    """
    metrics = dict(sampler.metrics(trajectories))
    if preemptions is not None:
        metrics["preemptions"] = preemptions
    # Early stopping is an option of this sampler.
    if isinstance(sampler, ReplSampler) and sampler.max_error_streak:
        metrics["lines_saved"] = count_lines_saved(trajectories, limits.max_lines)
    if host:
        metrics |= compute_call_metrics(trajectories)
    if any(faults.values()):
        metrics |= faults
    return metrics
