"""Hooks: optional features of rollouts. `Rollouts` calls each of `Rollouts.hooks` at fixed points of a rollout.

- the interface `RolloutHook`, and what its methods receive
- the hook of group judges

The other shipped hooks are next to their features: `FaultRetries`, `HostFunctions` and `ProgressCounter`.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from repl_rl.engine.base import Engine
from repl_rl.errors import ReplRLError, SandboxLost
from repl_rl.judges import GroupJudge, apply_group_judges
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Line, Observed, Prompt, Trajectory
from repl_rl.trajectory.trajectory_builder import RolloutSpec

H = TypeVar("H")


@dataclass(slots=True)
class BatchNotes:
    """Errors and retries, of a batch of rollouts or of one attempt."""

    errors: list[ReplRLError] = field(default_factory=list)
    """Errors of samplers and prompts; each dropped one rollout."""
    lost_consoles: list[SandboxLost] = field(default_factory=list)
    """Errors of lost consoles. For one attempt: all of them. For a batch: one per rollout that was dropped for this."""
    retries: int = 0
    """Number of retries in a batch."""
    attempts: int = 1
    """Number of attempts after which a rollout without a console is dropped."""


RunRollout = Callable[[BatchNotes], Awaitable[Trajectory]]
"""Function that plays one rollout from its start. It adds errors to the notes."""


class RolloutRunner(Protocol):
    """Part of `Rollouts` that hooks use."""

    @property
    def engine(self) -> Engine:
        """Engine of the policy."""

    @property
    def renderer(self) -> Renderer:
        """Renderer of the policy."""

    def build_prompt(self, task: Task, depth: int = 0) -> Prompt:
        """Return the prompt of every rollout of `task` at a nesting `depth`; a top-level rollout has depth 0."""

    async def run_nested(self, spec: RolloutSpec, temperature: float, depth: int) -> Trajectory:
        """Play a rollout within another one, in a separate console and without a grade."""


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Rollout that is about to be played."""

    rollouts: RolloutRunner
    spec: RolloutSpec
    temperature: float
    depth: int = 0
    """Nesting depth: 0 is top-level, 1 was requested by a call at depth 0."""


class RolloutHook:
    """Base class of hooks, whose methods do nothing. Override those that a feature needs.

    One instance serves all rollouts concurrently. All methods but `metrics` run in the event loop of the rollouts, so
    they must not block. An error that a method raises stops the run.
    """

    def declare(self, task: Task, depth: int) -> Task:
        """Return the task as the prompt shows it. Called for each prompt, before the sampler builds it.

        Grading and the record use the original task. A top-level rollout has `depth` 0.
        """
        return task

    def wrap_rollout(self, context: RolloutContext, run: RunRollout) -> RunRollout:
        """Return a function that plays the rollout in place of `run`, which it may call several times.

        Called once per top-level or nested rollout, before it starts. The first hook is the innermost wrapper. Rollouts
        that a client follows live are not wrapped.
        """
        return run

    def on_rollout_start(self, context: RolloutContext, episode: Episode) -> None:
        """Prepare the episode. Called at the start of each attempt, before `RolloutSampler.on_start`."""

    def observe(self, item: Line | Observed) -> None:
        """Receive a line when it is sampled, and again when it is executed, and each observation.

        Nested rollouts are included, and those that a client follows live are not. Called only if a subclass overrides
        it.
        """

    def on_rollout_end(self, task: Task, trajectory: Trajectory) -> None:
        """Receive a top-level rollout after its last attempt. It is graded, and no group judge has seen it."""

    async def on_group_end(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the trajectories of one or more whole groups, given one task each, with changes of this hook.

        Called after the last rollout of a batch. Failed rollouts are included.
        """
        return trajectories

    def metrics(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Return metrics of a step, name to value. Called in the thread of the trainer, once per step.

        Workers on a Ray cluster do not call it.
        """
        return {}


def find_hook(hooks: Sequence[RolloutHook], kind: type[H]) -> H | None:
    """Return the first hook of a class, or None."""
    return next((hook for hook in hooks if isinstance(hook, kind)), None)


class GroupJudging(RolloutHook):
    """Hook of judges that see all rollouts of a task collected in one call, and add to their outcomes."""

    def __init__(self, judges: Sequence[GroupJudge]) -> None:
        self._judges = tuple(judges)

    async def on_group_end(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """See `RolloutHook.on_group_end`. Raises UserCodeError: a judge broke its contract."""
        return await apply_group_judges(self._judges, tasks, trajectories)
