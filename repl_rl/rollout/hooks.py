"""The hooks around one rollout: `on_end` comes exactly once after `on_start`."""

from dataclasses import dataclass

from repl_rl.record.trajectory import Trajectory
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.sampler import RolloutSampler


@dataclass(slots=True)
class Hooks:
    """What was called so far of one rollout's hooks."""

    sampler: RolloutSampler
    begun: bool = False
    """`on_start` was called, and `on_end` was not."""

    async def begin(self, episode: Episode) -> None:
        """Call `on_start`."""
        self.begun = True
        await self.sampler.on_start(episode)

    async def end(self, rollout: str, result: Trajectory | BaseException) -> None:
        """Call `on_end`."""
        self.begun = False
        await self.sampler.on_end(rollout, result)
