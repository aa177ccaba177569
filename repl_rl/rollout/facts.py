"""What is told of open rollouts: what they turned out to be, and figures of what they play."""

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
    """What was opened; the same wherever a world is."""

    engine: str
    engine_fallback: str | None
    """Why it is driven in a slower way than asked for; None: it is not."""
    sandbox: str
    sampler_fallback: str | None
    """What the sampler does in place of what was asked for; None: it does that."""
    forbidden_ids: frozenset[int]
    """Ids that the policy never samples."""

    @classmethod
    def of(cls, engine: Engine, sandbox: str, sampler: RolloutSampler, renderer: Renderer) -> "Facts":
        """What is told of these."""
        return cls(engine.name, engine.fallback_reason, sandbox, sampler.fallback(renderer), engine.forbidden_ids)


@dataclass(slots=True)
class Pressed:
    """What the engine's cache was too small for, in the last batch."""

    latest: Pressure = field(default_factory=Pressure)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of rollouts since the run began."""

    faults: Mapping[str, int] = field(default_factory=dict)
    """What broke under rollouts, by its name."""
    pressure: Pressure | None = None
    """What a cache that was too small cost; None: the engine has no such cache."""


def counted(
    sampler: RolloutSampler,
    limits: RolloutLimits,
    host: bool,
    trajectories: Sequence[Trajectory],
    preempted: int | None,
    faults: Mapping[str, int],
) -> dict[str, float]:
    """A step's figures beside those of its records: what the sampler counts, what giving up early saved where that is
    on, what lines called where they can call something, lost places in the engine's cache, and what broke.

    Args:
        sampler: what played the rollouts; it counts too.
        limits: of a rollout.
        host: whether lines may call functions of the host.
        trajectories: the step's.
        preempted: how often a session lost its place in the engine's cache; None: there is no such cache.
        faults: what broke since the run began; left out where nothing did.
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
