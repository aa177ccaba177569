"""Hooks of a sampler in one rollout, with time limits. `on_end` runs exactly once after `on_start`."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from repl_rl.errors import ConfigError, ReplRLError, RolloutFailure, SetupError, UserCodeError
from repl_rl.record.trajectory import Stop, Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler import RolloutSampler

_CANCEL_S = 5.0
"""Time for a cancelled sampler to clean up, and time limit of `on_end`, seconds."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Hooks:
    """Hooks of a sampler in one rollout."""

    sampler: RolloutSampler
    limit_s: float
    """Time limit of `on_start`, and of `rollout`, wall clock, seconds."""
    begun: bool = False
    """True if `on_start` was called, and `on_end` was not."""

    async def play(self, episode: Episode) -> None:
        """Call `on_start`, then `rollout`.

        Raises:
            UserCodeError: a hook raised, or kept running after its cancellation.
            ReplRLError, RolloutFailure: as raised by a hook.
        """
        self.begun = True
        await self._drive("on_start", self.sampler.on_start(episode), episode)
        if not episode.ended:
            await self._drive("rollout", self.sampler.rollout(episode), episode)

    async def farewell(self, rollout: str, result: Trajectory | BaseException) -> UserCodeError | None:
        """Call `on_end` if `on_start` was called, and return its error.

        The error is logged if `result` is an exception, because that one is raised.
        """
        if not self.begun:
            return None
        self.begun = False
        name = f"{type(self.sampler).__name__}.on_end"
        ending = asyncio.create_task(self.sampler.on_end(rollout, result), name=name)
        try:
            await asyncio.wait({ending}, timeout=_CANCEL_S)
        except asyncio.CancelledError:
            await asyncio.wait({ending}, timeout=_CANCEL_S)  # the hook may still finish
            raise
        finally:
            ending.cancel()
        error = _raised(name, ending) if ending.done() else UserCodeError(f"{name} took longer than {_CANCEL_S:g} s")
        if error is not None and isinstance(result, BaseException):
            _log.warning("rollout %s: %s", rollout, error)
        # An error of ours is raised as it is; any other one counts as an error of the sampler.
        elif isinstance(error, ReplRLError) and not isinstance(error, UserCodeError):
            raise error
        return error if isinstance(error, UserCodeError | None) else UserCodeError(f"{name} raised {error!r}")

    async def _drive(self, hook: str, work: Coroutine[None, None, None], episode: Episode) -> None:
        """Run a hook until it returns or its time is over.

        It runs in a separate task, so that a hook that swallows its cancellation can be abandoned.
        """
        name = f"{type(self.sampler).__name__}.{hook}"
        running = asyncio.create_task(work, name=name)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the error as retrieved
        try:
            await asyncio.wait({running}, timeout=self.limit_s)
            if not running.done():
                episode.finish(Stop.WALL_CLOCK)
        finally:
            # Timed out, or cancelled from outside: give the hook time to clean up.
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=_CANCEL_S)
        if not running.done():
            raise UserCodeError(f"{name} goes on after it was cancelled; let asyncio.CancelledError pass")
        error = _raised(name, running)
        if error is not None:
            raise error from error.__cause__


def _raised(name: str, done: "asyncio.Task[None]") -> ReplRLError | RolloutFailure | None:
    """Return the error of user code as one of ours, or None if the code returned or was cancelled."""
    error = None if done.cancelled() else done.exception()
    # The sampler may let errors of the engine and the console pass.
    if isinstance(error, ReplRLError | RolloutFailure) and not isinstance(error, ConfigError):
        return error
    if not isinstance(error, Exception | None):
        raise error
    if error is None:
        return None
    if isinstance(error, SetupError):  # not caused by the sampler
        found = UserCodeError(str(error))
    else:
        found = UserCodeError(f"{name}: {error}" if isinstance(error, ConfigError) else f"{name} raised {error!r}")
    found.__cause__ = error
    return found
