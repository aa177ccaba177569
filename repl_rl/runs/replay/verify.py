"""Verification: replay stored trajectories and count those that show what was recorded."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from repl_rl.errors import ConfigError, SandboxFault, StoreError
from repl_rl.record.trajectory import LineStatus, Trajectory
from repl_rl.runs.replay.compare import Cause, Difference, Shown, cause
from repl_rl.runs.replay.session import Step, open_replay
from repl_rl.sandbox.base import Sandbox


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of replaying one trajectory."""

    id: str
    lines: int
    """Lines that ran and were compared."""
    difference: Difference | None
    """First line that shows something else; None means that all compared lines agree.

    Later lines are not compared, because they may differ for the same reason.
    """
    skipped: str = ""
    """Reason why it could not be replayed; "" if it was."""


@dataclass(frozen=True, slots=True)
class Determinism:
    """Verifications of a run's trajectories."""

    verifications: tuple[Verification, ...]

    @property
    def verified(self) -> int:
        """Number of trajectories that were replayed."""
        return sum(not v.skipped for v in self.verifications)

    @property
    def divergent(self) -> tuple[Verification, ...]:
        return tuple(v for v in self.verifications if v.difference is not None)

    @property
    def score(self) -> float | None:
        """Share of the replayed trajectories whose lines all showed what was recorded; None if none was replayed."""
        return 1.0 - len(self.divergent) / self.verified if self.verified else None

    @property
    def causes(self) -> Counter[str]:
        """Number of divergent trajectories per cause."""
        return Counter(v.difference.cause.value for v in self.divergent if v.difference)


async def verify(trajectory: Trajectory, sandbox: Sandbox) -> Verification:
    """Replay one trajectory up to its first difference. Failures of ours are reasons to skip it."""
    if trajectory.failure is not None:
        return Verification(trajectory.id, 0, None, "our failure ended it when it was recorded")
    try:
        steps = await _played(trajectory, sandbox, None)
        last = steps[-1] if steps else None
        if last is None or last.difference is None:
            return Verification(trajectory.id, len(steps), None)
        # Run the same lines again: two replays that differ show randomness.
        again = await _played(trajectory, sandbox, len(steps))
    except (ConfigError, SandboxFault, StoreError) as error:
        return Verification(trajectory.id, 0, None, str(error))
    now = again[-1].shown if len(again) == len(steps) else None
    return Verification(trajectory.id, len(steps), _judged(steps, last.difference, now))


def _judged(steps: Sequence[Step], difference: Difference, again: Shown | None) -> Difference:
    sources = [step.text for step in steps]
    # Changed calls are a known cause; only a guessed cause profits from the second replay.
    if difference.cause is Cause.HOST:
        return difference
    return replace(difference, cause=cause(sources, difference.recorded, difference.now, again))


async def _played(trajectory: Trajectory, sandbox: Sandbox, most: int | None) -> list[Step]:
    """Run lines until one differs (`most` None), or until `most` of them have run."""
    async with open_replay(trajectory, sandbox) as replay:
        while not replay.ended and (most is None or len(replay.steps) < most):
            step = await replay.step()
            if step is None:
                continue
            if step.result.status is LineStatus.SANDBOX_FAULT:
                raise SandboxFault(step.result.text or "the console did not answer")
            if most is None and step.difference is not None:
                break
        return replay.steps


async def verify_all(
    trajectories: Iterable[Trajectory],
    sandbox: Sandbox,
    concurrency: int = 16,
    on_each: Callable[[Verification], None] | None = None,
) -> Determinism:
    """Replay trajectories, `concurrency` (>= 1) at once; call `on_each` with each result as it arrives."""
    places = asyncio.Semaphore(concurrency)

    async def one(trajectory: Trajectory) -> Verification:
        async with places:
            verification = await verify(trajectory, sandbox)
        if on_each is not None:
            on_each(verification)
        return verification

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(t)) for t in trajectories]
    return Determinism(tuple(task.result() for task in running))
