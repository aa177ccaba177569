"""Runtime information and statistics of open rollouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from repl_rl.engine.base import Engine, Pressure
from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.doomed import lines_saved
from repl_rl.rollout.host_record import called
from repl_rl.rollout.limits import RolloutLimits
from repl_rl.rollout.renderer import Renderer
from repl_rl.rollout.sampler import ReplSampler, RolloutSampler


@dataclass(frozen=True, slots=True)
class Facts:
    """Runtime information of open rollouts; the same in every process that plays them."""

    engine: str
    engine_fallback: str | None
    """Reason why the engine runs in a slower mode than requested, or None."""
    sandbox: str
    sampler_fallback: str | None
    """Fallback that the sampler uses, or None."""
    forbidden_ids: frozenset[int]
    """Ids that the policy never samples."""

    @classmethod
    def of(cls, engine: Engine, sandbox: str, sampler: RolloutSampler, renderer: Renderer) -> "Facts":
        """Collect the runtime information."""
        return cls(engine.name, engine.fallback_reason, sandbox, sampler.fallback(renderer), engine.forbidden_ids)


@dataclass(slots=True)
class Pressed:
    """Preemption statistics of the last batch."""

    latest: Pressure = field(default_factory=Pressure)


@dataclass(frozen=True, slots=True)
class Figures:
    """Statistics of rollouts since the run began."""

    faults: Mapping[str, int] = field(default_factory=dict)
    """Fault counts by name."""
    pressure: Pressure | None = None
    """Preemption statistics; None means that the engine has no shared KV cache."""


def counted(
    sampler: RolloutSampler,
    limits: RolloutLimits,
    host: bool,
    trajectories: Sequence[Trajectory],
    preempted: int | None,
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
        preempted: number of preemptions; None means that the engine has no shared KV cache.
        faults: fault counts since the run began; left out if all are 0.
    """
    told = dict(sampler.metrics(trajectories))
    if preempted is not None:
        told["preemptions"] = preempted
    if isinstance(sampler, ReplSampler) and sampler.give_up_after:
        told["lines_saved"] = lines_saved(trajectories, limits.max_lines)
    if host:
        told |= called(trajectories)
    if any(faults.values()):
        told |= faults
    return told
