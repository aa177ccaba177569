"""Retry of a rollout after a crash of the engine or the loss of its console.

A retry starts from the beginning, with the same id, seed and position. Nothing of the failed attempt is kept, because
the state of a dead engine's session or of a lost console cannot be restored.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from repl_rl.errors import ConfigError, EngineDied, ReplRLError, SandboxFault, SandboxLost, UnrecoverableError
from repl_rl.trajectory.trajectory import Failure, FailureKind, Stop, Trajectory
from repl_rl.trajectory.trajectory_builder import EpisodeRecorder, RolloutSpec

_log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts of a rollout whose console is lost. After the last one it is dropped, as after any other fault of ours."""


@dataclass(slots=True)
class BatchNotes:
    """Errors and retries, of a batch of rollouts or of one attempt."""

    errors: list[ReplRLError] = field(default_factory=list)
    """Errors of samplers and prompts; each dropped one rollout."""
    lost_consoles: list[SandboxLost] = field(default_factory=list)
    """Lost consoles. For an attempt: its own. For a batch: those of the rollouts that were dropped."""
    retries: int = 0
    """Number of retries in a batch."""


@dataclass(slots=True)
class FaultCounts:
    """Fault counts since the run began, for metrics only."""

    engine_deaths: int = 0
    consoles_lost: int = 0
    """Number of attempts that ended with the loss of their console."""
    rollouts_replayed: int = 0
    rollouts_given_up: int = 0
    """Number of rollouts that were dropped after their last attempt. Nothing replaces them."""

    def with_engine_crashes(self, deaths: int) -> Mapping[str, int]:
        """Return all counts, including the crashes of the engine that is open now."""
        return {**asdict(self), "engine_deaths": self.engine_deaths + deaths}


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Rollouts that were played together (a batch or part of one), with their errors."""

    trajectories: tuple[Trajectory, ...]
    notes: BatchNotes = field(default_factory=BatchNotes)
    ungraded_trajectories: tuple[Trajectory, ...] = ()
    """Trajectories before group judges, for callers that need them. Empty means that they are the same."""

    @classmethod
    def merge(cls, results: "Sequence[BatchResult]") -> "BatchResult":
        """Merge several results into one."""
        errors = [error for result in results for error in result.notes.errors]
        losses = [fault for result in results for fault in result.notes.lost_consoles]
        trajectories = tuple(t for result in results for t in result.trajectories)
        return cls(trajectories, BatchNotes(errors, losses, sum(result.notes.retries for result in results)))


async def play_with_retries(
    play: Callable[[BatchNotes], Awaitable[Trajectory]],
    batch: BatchNotes,
    fault_counts: FaultCounts,
    *,
    retry_crashes: bool,
) -> Trajectory:
    """Play a rollout, and retry it after each crash of the engine if `retry_crashes` is set.

    A rollout whose console is lost is played at most `MAX_ATTEMPTS` times.

    Raises:
        EngineDied: the engine died, and `retry_crashes` is not set.
    """
    losses = 0
    while True:
        attempt = BatchNotes()
        try:
            trajectory = await play(attempt)
        except EngineDied:
            if not retry_crashes:
                raise
            # The number of these retries is not limited here: an engine that keeps crashing raises
            # `UnrecoverableError`.
            _count_retry(batch, fault_counts)
            continue
        # Errors count only for an attempt that is kept.
        if not attempt.lost_consoles:
            batch.errors += attempt.errors
            return trajectory
        # The console is lost: play again, up to the limit.
        losses += 1
        fault_counts.consoles_lost += 1
        if losses == MAX_ATTEMPTS:
            fault_counts.rollouts_given_up += 1
            batch.lost_consoles.append(attempt.lost_consoles[0])
            return trajectory
        _count_retry(batch, fault_counts)


def _count_retry(batch: BatchNotes, fault_counts: FaultCounts) -> None:
    batch.retries += 1
    fault_counts.rollouts_replayed += 1


async def grade_or_fail(grading: Awaitable[Trajectory], trajectory: Trajectory, notes: BatchNotes) -> Trajectory:
    """Grade a rollout that has ended; a console that fails during grading drops the rollout."""
    try:
        return await grading
    except SandboxFault as fault:
        if isinstance(fault, SandboxLost):
            notes.lost_consoles.append(fault)
        return replace(trajectory, stop=Stop.FAULT, failure=Failure.from_error(fault))


def make_overlong_trajectory(spec: RolloutSpec, context_tokens: int, notes: BatchNotes) -> Trajectory:
    """Return the failed record of a rollout whose prompt fills the context, and note the error."""
    thing = f"prompt of task {spec.task.id}, ids"
    remedy = f"the context holds {context_tokens}; leave the task out, or use a longer context"
    # The error of the batch and the failure of the record have the same message.
    notes.errors.append(ConfigError(thing, len(spec.prompt.token_ids), remedy))
    failure = Failure(FailureKind.PROMPT_TOO_LONG, str(notes.errors[-1]))
    return EpisodeRecorder(spec).build_trajectory(Stop.FAULT, 0.0, failure, None)


def check_failures(batch: BatchResult, sandbox: str) -> None:
    """Log the errors of a batch, and raise one if it is pointless to continue.

    Raises:
        UnrecoverableError: every rollout lost its console in each attempt.
        ReplRLError: the sampler failed in most rollouts, or most prompts are too long.
    """
    errors, losses = batch.notes.errors, batch.notes.lost_consoles
    rollouts = len(batch.trajectories)
    if batch.notes.retries:
        _log.warning("%d rollouts played again: the engine died, or their consoles were lost", batch.notes.retries)
    if losses and len(losses) == rollouts:
        state = f"lost in each of {rollouts} rollouts, {MAX_ATTEMPTS} times ({losses[0]})"
        raise UnrecoverableError(f"sandbox {sandbox}", state, "check it with `repl-rl sandbox check`") from losses[0]
    # A few errors only drop their rollouts. If most rollouts have one, the sampler or the prompts are wrong.
    if 2 * len(errors) > rollouts:
        raise errors[0]
    if errors or losses:
        _log.warning("%d of %d rollouts dropped: %s", len(errors) + len(losses), rollouts, [*errors, *losses][0])
