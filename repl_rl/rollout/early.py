"""Prefetched rollouts: they start before the step that learns from them, while the policy is updated."""

import asyncio
import time
from dataclasses import dataclass, field

from repl_rl.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Early:
    """Prefetched rollouts of one later step."""

    policy_step: int
    """Number of optimizer steps behind the policy that will learn from them.

    It is part of their ids and seeds, so that both do not depend on the weights at the start.
    """
    places: asyncio.Semaphore
    """Concurrency slots shared by all prefetched rollouts. Those of earlier steps asked first, and get a slot first."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Rollouts that ended without a failure, by number in the step. Those present at the start are not played."""

    def note(self, number: int, rollout: "asyncio.Task[Trajectory]") -> None:
        """Record a rollout that has ended. A failed rollout is not kept, so a resumed run plays it again."""
        if not rollout.cancelled() and rollout.exception() is None and rollout.result().failure is None:
            self.finished[number] = rollout.result()


@dataclass(slots=True)
class Busy:
    """Wall-clock timer that runs while at least one operation runs."""

    _since: float = 0.0
    _under_way: int = 0
    _before: float = 0.0

    def begin(self) -> None:
        """Count one more running operation."""
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def end(self) -> None:
        """Count one running operation less."""
        self._under_way -= 1
        if not self._under_way:
            self._before += time.perf_counter() - self._since

    @property
    def elapsed_s(self) -> float:
        """Time so far, seconds."""
        return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)
