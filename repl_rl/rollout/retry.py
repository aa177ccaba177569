"""Retry of a rollout after a crash of the engine or the loss of its console.

A retry starts from the beginning, with the same id, seed and position. Nothing of the failed attempt is kept, because
the state of a dead engine's session or of a lost console cannot be restored.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

from repl_rl.engine.base import HasRestarts
from repl_rl.errors import EngineDied
from repl_rl.rollout.concurrent_rollouts import Rollouts
from repl_rl.rollout.rollout_hooks import BatchNotes, RolloutContext, RolloutHook, RunRollout, find_hook
from repl_rl.trajectory.trajectory import Trajectory

MAX_ATTEMPTS = 3
"""Attempts of a rollout whose console is lost. After the last one it is dropped, as after any other fault of ours."""


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


class FaultRetries(RolloutHook):
    """Hook that retries a rollout after a fault of ours, and counts the faults.

    A top-level rollout is retried after each crash of an engine that is restarted. A crash during a nested rollout ends
    the calling rollout, which starts again as a whole.
    """

    def __init__(self) -> None:
        self.counts = FaultCounts()
        """Fault counts of this process and of those that the run was resumed from."""

    def wrap_rollout(self, context: RolloutContext, run: RunRollout) -> RunRollout:
        """See `RolloutHook.wrap_rollout`."""
        retry_crashes = context.depth == 0 and isinstance(context.rollouts.engine, HasRestarts)
        return partial(run_with_retries, run, fault_counts=self.counts, retry_crashes=retry_crashes)


def get_fault_counts(rollouts: Rollouts) -> Mapping[str, int]:
    """Return the fault counts of rollouts since the run began, with the crashes of their engine.

    Without `FaultRetries`, only the crashes are counted.
    """
    retries = find_hook(rollouts.hooks, FaultRetries)
    counts = retries.counts if retries is not None else FaultCounts()
    return counts.with_engine_crashes(rollouts.engine.crash_count if isinstance(rollouts.engine, HasRestarts) else 0)


async def run_with_retries(
    run: RunRollout, batch: BatchNotes, fault_counts: FaultCounts, *, retry_crashes: bool
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
            trajectory = await run(attempt)
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
            batch.attempts = MAX_ATTEMPTS
            return trajectory
        _count_retry(batch, fault_counts)


def _count_retry(batch: BatchNotes, fault_counts: FaultCounts) -> None:
    batch.retries += 1
    fault_counts.rollouts_replayed += 1
