"""A rollout under which something of ours broke is played again, from its start: same id, same seed, same place.

Nothing of a broken attempt is kept: a session of a dead engine, or the console of a dead fork server, has state that
nobody can give back.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from repl_rl.errors import BrokenDown, ConfigError, EngineDied, ReplRLError, SandboxFault, SandboxLost
from repl_rl.record.record import Origin, Record
from repl_rl.record.trajectory import Failure, FailureKind, Stop, Trajectory

_log = logging.getLogger(__name__)

MOST_PLAYED = 3
"""A rollout that has lost its console so often is given up: it is dropped, as after any other fault of ours."""


@dataclass(slots=True)
class Notes:
    """What is noted while rollouts are played, those of a batch or one attempt at one."""

    errors: list[ReplRLError] = field(default_factory=list)
    """Of samplers and prompts: a rollout that was dropped for each."""
    lost: list[SandboxLost] = field(default_factory=list)
    """Of an attempt: how it lost its console. Of a batch: those of the rollouts that were given up."""
    replayed: int = 0
    """Of a batch: how often one was played again."""


@dataclass(slots=True)
class Broken:
    """What broke under rollouts since the run began. Figures only."""

    engine_deaths: int = 0
    consoles_lost: int = 0
    """Rollouts that were dropped because their console was lost, each time that one was."""
    rollouts_replayed: int = 0
    rollouts_given_up: int = 0
    """Of those dropped, the ones that were not played again: their places stay empty."""

    def with_deaths(self, deaths: int) -> Mapping[str, int]:
        """All figures, with those of an engine that is open now."""
        return {**asdict(self), "engine_deaths": self.engine_deaths + deaths}


@dataclass(frozen=True, slots=True)
class Part:
    """Rollouts that were played together, a batch or a part of one, and what went wrong meanwhile."""

    trajectories: tuple[Trajectory, ...]
    notes: Notes = field(default_factory=Notes)
    unjudged: tuple[Trajectory, ...] = ()
    """As they were before group judges looked at them, where somebody may need that; none: they are the same."""

    @classmethod
    def of(cls, parts: "Sequence[Part]") -> "Part":
        """All of these as one."""
        errors = [error for part in parts for error in part.notes.errors]
        lost = [fault for part in parts for fault in part.notes.lost]
        trajectories = tuple(t for part in parts for t in part.trajectories)
        return cls(trajectories, Notes(errors, lost, sum(part.notes.replayed for part in parts)))


async def again(
    play: Callable[[Notes], Awaitable[Trajectory]], batch: Notes, broken: Broken, *, outlived: bool
) -> Trajectory:
    """What `play` makes of a rollout, which is played again each time that the engine dies, where that is `outlived`.

    Where its console is lost it is played `MOST_PLAYED` times at most.

    Raises:
        EngineDied: the engine died, and is not outlived.
    """
    lost = 0
    while True:
        attempt = Notes()
        try:
            trajectory = await play(attempt)
        except EngineDied:
            if not outlived:
                raise
            _replayed(batch, broken)
            continue
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
    """What `grading` makes of a rollout that has ended; a console that fails in it drops the rollout."""
    try:
        return await grading
    except SandboxFault as fault:
        if isinstance(fault, SandboxLost):
            notes.lost.append(fault)
        return replace(trajectory, stop=Stop.FAULT, failure=Failure.of(fault))


def too_long(origin: Origin, context_tokens: int, notes: Notes) -> Trajectory:
    """A rollout whose prompt fills the context: it is not played, and noted."""
    what = f"prompt of task {origin.task.id}, ids"
    remedy = f"the context holds {context_tokens}; leave the task out, or use a longer context"
    notes.errors.append(ConfigError(what, len(origin.prompt.token_ids), remedy))
    failure = Failure(FailureKind.PROMPT_TOO_LONG, str(notes.errors[-1]))
    return Record(origin).trajectory(Stop.FAULT, 0.0, failure, None)


def weigh(batch: Part, sandbox: str) -> None:
    """Say what went wrong in a batch of rollouts, and stop where going on would come to nothing.

    Raises:
        BrokenDown: every rollout has lost its consoles.
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
