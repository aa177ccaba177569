"""What a sampler does in one rollout, held to its time: `on_end` comes exactly once after `on_start`."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure, SetupError, UserCodeError
from repl_rl.record.trajectory import Stop, Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler import RolloutSampler

_CANCEL_S = 5.0
"""How long a cancelled sampler may clean up, and how long `on_end` may take."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Hooks:
    """What was called so far of one rollout's sampler."""

    sampler: RolloutSampler
    limit_s: float
    """Longest time of `on_start`, and of `rollout`, wall clock."""
    begun: bool = False
    """`on_start` was called, and `on_end` was not."""

    async def play(self, episode: Episode) -> None:
        """Call `on_start`, then `rollout`.

        Raises:
            UserCodeError: one of them raised, or goes on after it was cancelled.
            ReplRLError, RolloutFailure: as they were raised.
        """
        self.begun = True
        await self._drive("on_start", self.sampler.on_start(episode), episode)
        if not episode.ended:
            await self._drive("rollout", self.sampler.rollout(episode), episode)

    async def farewell(self, rollout: str, result: Trajectory | BaseException) -> UserCodeError | None:
        """Call `on_end` where `on_start` was called. Returns what it raised, which is logged where the run stops."""
        if not self.begun:
            return None
        self.begun = False
        name = f"{type(self.sampler).__name__}.on_end"
        ending = asyncio.create_task(self.sampler.on_end(rollout, result), name=name)
        try:
            await asyncio.wait({ending}, timeout=_CANCEL_S)
        except asyncio.CancelledError:
            await asyncio.wait({ending}, timeout=_CANCEL_S)  # it comes to its end whatever happens
            raise
        finally:
            ending.cancel()
        error = _raised(name, ending) if ending.done() else UserCodeError(f"{name} took longer than {_CANCEL_S:g} s")
        if error is not None and isinstance(result, BaseException):
            _log.warning("rollout %s: %s", rollout, error)
        elif isinstance(error, ReplRLError) and not isinstance(error, UserCodeError):
            raise error
        return error if isinstance(error, UserCodeError | None) else UserCodeError(f"{name} raised {error!r}")

    async def _drive(self, hook: str, work: Coroutine[None, None, None], episode: Episode) -> None:
        """Run it until it returns or the time of a rollout is over.

        It runs in a task of its own: what swallows its cancellation can be left behind.
        """
        name = f"{type(self.sampler).__name__}.{hook}"
        running = asyncio.create_task(work, name=name)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # who is cancelled does not ask
        try:
            await asyncio.wait({running}, timeout=self.limit_s)
            if not running.done():
                episode.finish(Stop.WALL_CLOCK)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=_CANCEL_S)
        if not running.done():
            raise UserCodeError(f"{name} goes on after it was cancelled; let asyncio.CancelledError pass")
        error = _raised(name, running)
        if error is not None:
            raise error from error.__cause__


def _raised(name: str, done: "asyncio.Task[None]") -> ReplRLError | RolloutFailure | None:
    """What code of the user raised, as its error: None where it returned, or was cancelled."""
    error = None if done.cancelled() else done.exception()
    if isinstance(error, ReplRLError | RolloutFailure) and not isinstance(error, ConfigError):
        return error
    if not isinstance(error, Exception | None):
        raise error
    if error is None:
        return None
    if isinstance(error, SetupError):  # not the sampler's doing
        found = UserCodeError(str(error))
    else:
        found = UserCodeError(f"{name}: {error}" if isinstance(error, ConfigError) else f"{name} raised {error!r}")
    found.__cause__ = error
    return found
