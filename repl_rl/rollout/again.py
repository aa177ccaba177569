"""Retry of a rollout after a crash of the engine or the loss of its console.

A retry starts from the beginning, with the same id, seed and position. Nothing of the failed attempt is kept, because
the state of a dead engine's session or of a lost console cannot be restored.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from repl_rl.errors import BrokenDown, ConfigError, EngineDied, ReplRLError, SandboxFault, SandboxLost
from repl_rl.record.record import Origin, Record
from repl_rl.record.trajectory import Failure, FailureKind, Stop, Trajectory

_log = logging.getLogger(__name__)

MOST_PLAYED = 3
"""Attempts of a rollout whose console is lost. After the last one it is dropped, as after any other fault of ours."""


@dataclass(slots=True)
class Notes:
    """Errors and retries, of a batch of rollouts or of one attempt."""

    errors: list[ReplRLError] = field(default_factory=list)
    """Errors of samplers and prompts; each dropped one rollout."""
    lost: list[SandboxLost] = field(default_factory=list)
    """Lost consoles. For an attempt: its own. For a batch: those of the rollouts that were dropped."""
    replayed: int = 0
    """Number of retries in a batch."""


@dataclass(slots=True)
class Broken:
    """Fault counts since the run began, for metrics only."""

    engine_deaths: int = 0
    consoles_lost: int = 0
    """Number of attempts that ended with the loss of their console."""
    rollouts_replayed: int = 0
    rollouts_given_up: int = 0
    """Number of rollouts that were dropped after their last attempt. Nothing replaces them."""

    def with_deaths(self, deaths: int) -> Mapping[str, int]:
        """Return all counts, including the crashes of the engine that is open now."""
        return {**asdict(self), "engine_deaths": self.engine_deaths + deaths}


@dataclass(frozen=True, slots=True)
class Part:
    """Rollouts that were played together (a batch or part of one), with their errors."""

    trajectories: tuple[Trajectory, ...]
    notes: Notes = field(default_factory=Notes)
    unjudged: tuple[Trajectory, ...] = ()
    """Trajectories before group judges, for callers that need them. Empty means that they are the same."""

    @classmethod
    def of(cls, parts: "Sequence[Part]") -> "Part":
        """Merge several results into one."""
        errors = [error for part in parts for error in part.notes.errors]
        lost = [fault for part in parts for fault in part.notes.lost]
        trajectories = tuple(t for part in parts for t in part.trajectories)
        return cls(trajectories, Notes(errors, lost, sum(part.notes.replayed for part in parts)))


async def again(
    play: Callable[[Notes], Awaitable[Trajectory]], batch: Notes, broken: Broken, *, outlived: bool
) -> Trajectory:
    """Play a rollout, and retry it after each crash of the engine if `outlived` is set.

    A rollout whose console is lost is played at most `MOST_PLAYED` times.

    Raises:
        EngineDied: the engine died, and `outlived` is not set.
    """
    lost = 0
    while True:
        attempt = Notes()
        try:
            trajectory = await play(attempt)
        except EngineDied:
            if not outlived:
                raise
            # The number of these retries is not limited here: an engine that keeps crashing raises `BrokenDown`.
            _replayed(batch, broken)
            continue
        # Errors count only for an attempt that is kept.
        if not attempt.lost:
            batch.errors += attempt.errors
            return trajectory
        lost += 1
        broken.consoles_lost += 1
        if lost == MOST_PLAYED:
            broken.rollouts_given_up += 1
            batch.lost.append(attempt.lost[0])
            return trajectory
        _replayed(batch, broken)


def _replayed(batch: Notes, broken: Broken) -> None:
    batch.replayed += 1
    broken.rollouts_replayed += 1


async def settling(grading: Awaitable[Trajectory], trajectory: Trajectory, notes: Notes) -> Trajectory:
    """Grade a rollout that has ended; a console that fails during grading drops the rollout."""
    try:
        return await grading
    except SandboxFault as fault:
        if isinstance(fault, SandboxLost):
            notes.lost.append(fault)
        return replace(trajectory, stop=Stop.FAULT, failure=Failure.of(fault))


def too_long(origin: Origin, context_tokens: int, notes: Notes) -> Trajectory:
    """Return the failed record of a rollout whose prompt fills the context, and note the error."""
    what = f"prompt of task {origin.task.id}, ids"
    remedy = f"the context holds {context_tokens}; leave the task out, or use a longer context"
    notes.errors.append(ConfigError(what, len(origin.prompt.token_ids), remedy))
    failure = Failure(FailureKind.PROMPT_TOO_LONG, str(notes.errors[-1]))
    return Record(origin).trajectory(Stop.FAULT, 0.0, failure, None)


def weigh(batch: Part, sandbox: str) -> None:
    """Log the errors of a batch, and raise one if it is pointless to continue.

    Raises:
        BrokenDown: every rollout lost its console in each attempt.
        ReplRLError: the sampler failed in most rollouts, or most prompts are too long.
    """
    errors, lost = batch.notes.errors, batch.notes.lost
    rollouts = len(batch.trajectories)
    if batch.notes.replayed:
        _log.warning("%d rollouts played again: the engine died, or their consoles were lost", batch.notes.replayed)
    if lost and len(lost) == rollouts:
        gone = f"gone under each of {rollouts} rollouts, {MOST_PLAYED} times ({lost[0]})"
        raise BrokenDown(f"sandbox {sandbox}", gone, "see that it runs (repl-rl sandbox check)") from lost[0]
    if 2 * len(errors) > rollouts:
        raise errors[0]
    if errors or lost:
        _log.warning("%d of %d rollouts dropped: %s", len(errors) + len(lost), rollouts, [*errors, *lost][0])
