"""Rollouts that begin before the step that learns from them, while the policy is updated."""

import asyncio
import time
from dataclasses import dataclass, field

from repl_rl.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Early:
    """The rollouts of one step to come."""

    policy_step: int
    """Optimizer steps behind the policy that will learn from them: part of their ids and seeds, so that both are the
    same whichever weights they begin with."""
    places: asyncio.Semaphore
    """Of all such rollouts together: those of earlier steps, which asked first, get one first."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """Those that have ended well, by their number in the step. Whatever is there before is not played."""

    def note(self, number: int, rollout: "asyncio.Task[Trajectory]") -> None:
        """A rollout has ended. Who failed on our side is not kept: a run that goes on plays it again."""
        if not rollout.cancelled() and rollout.exception() is None and rollout.result().failure is None:
            self.finished[number] = rollout.result()


@dataclass(slots=True)
class Busy:
    """How long anything was under way, on the wall clock."""

    _since: float = 0.0
    _under_way: int = 0
    _before: float = 0.0

    def begin(self) -> None:
        """One more thing is under way."""
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1

    def end(self) -> None:
        """One of them is not any more."""
        self._under_way -= 1
        if not self._under_way:
            self._before += time.perf_counter() - self._since

    @property
    def elapsed_s(self) -> float:
        """So far."""
        return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)
