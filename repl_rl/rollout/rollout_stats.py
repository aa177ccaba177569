"""Runtime information and statistics of open rollouts, and the metrics of a step that follow from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from repl_rl.engine.base import Engine, HasPreemptionStats, PreemptionStats
from repl_rl.rollout.rollout_hooks import RolloutHook
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.sampler_base import ReplSampler, RolloutSampler, count_lines_saved
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Line, Observed, Trajectory


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


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Counts of rollouts since the engine was opened.

    Of nested rollouts, which host functions play, only the lines and tokens count.
    """

    ended: int = 0
    """Rollouts that have ended, failed ones included."""
    solved: int = 0
    """Those of them that solved their task, before group judges."""
    sampled_lines: int = 0
    """Sampled lines, also of rollouts that still run."""
    sampled_tokens: int = 0
    """Tokens of these lines."""

    def subtract(self, earlier: "RolloutCounts") -> "RolloutCounts":
        """Return the counts since `earlier`."""
        return RolloutCounts(
            self.ended - earlier.ended,
            self.solved - earlier.solved,
            self.sampled_lines - earlier.sampled_lines,
            self.sampled_tokens - earlier.sampled_tokens,
        )


class ProgressCounter(RolloutHook):
    """Hook that counts rollouts and lines while they are played. Any thread may read `counts`."""

    def __init__(self) -> None:
        self._ended = self._solved = self._sampled_lines = self._sampled_tokens = 0
        self._listeners: list[Callable[[Trajectory], None]] = []

    @property
    def counts(self) -> RolloutCounts:
        """Counts so far."""
        return RolloutCounts(self._ended, self._solved, self._sampled_lines, self._sampled_tokens)

    def subscribe(self, listener: Callable[[Trajectory], None]) -> None:
        """Call `listener` with each rollout that ends, in the event loop; group judges have not seen it."""
        self._listeners.append(listener)

    def observe(self, item: Line | Observed) -> None:
        """Count a line of a running rollout. An executed line comes a second time."""
        if isinstance(item, Line) and item.execution is None:
            self._sampled_lines += 1
            self._sampled_tokens += len(item.token_ids)

    def on_rollout_end(self, task: Task, trajectory: Trajectory) -> None:
        """Count a rollout that has ended."""
        self._ended += 1
        self._solved += trajectory.solved
        for listener in self._listeners:
            listener(trajectory)


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Statistics of rollouts since the run began."""

    faults: Mapping[str, int] = field(default_factory=dict)
    """Fault counts by name."""
    preemptions: PreemptionStats | None = None
    """Preemption statistics; None means that the engine has no shared KV cache."""
    counts: RolloutCounts = RolloutCounts()
    """Counts since the engine was opened. A resumed run opens the engine again, and counts from zero."""


def get_preemptions(engine: Engine) -> PreemptionStats | None:
    """Return the preemption statistics since the engine was opened; None means that it has no shared KV cache."""
    return engine.preemptions if isinstance(engine, HasPreemptionStats) else None


def compute_step_metrics(
    sampler: RolloutSampler,
    limits: RolloutLimits,
    trajectories: Sequence[Trajectory],
    preemptions: int | None,
    faults: Mapping[str, int],
) -> dict[str, float]:
    """Return the metrics of a step, in addition to those of its records and of hooks.

    These are metrics of the sampler, preemptions, lines saved by early stopping, and faults. Each is included only if
    it applies.

    Args:
        sampler: sampler of the rollouts, with its own metrics.
        limits: limits of a rollout.
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
    if any(faults.values()):
        metrics |= faults
    return metrics
