"""The extension point: a `RolloutSampler` decides how one rollout goes."""

import importlib
from abc import ABC, abstractmethod

from repl_rl.episode import Episode
from repl_rl.errors import ConfigError
from repl_rl.samplers.doomed import Streak
from repl_rl.trajectory import Stop


class RolloutSampler(ABC):
    """Decides what is sampled, executed, observed and rewarded in one rollout.

    One instance serves all rollouts, concurrently: keep the state of a rollout in local variables.
    """

    @abstractmethod
    async def rollout(self, episode: Episode) -> None:
        """Drive `episode` until it has ended, or return to end it (`Stop.FINISHED`).

        Whatever it raises is reported as an error of this class and stops the run.
        """


class ReplSampler(RolloutSampler):
    """The line console: each line is executed as soon as it is written, and its output is spliced in."""

    async def rollout(self, episode: Episode) -> None:
        streak = Streak(episode.limits.give_up_after)
        async for line in episode.lines():
            if streak.dooms(line.text, await episode.push(line)):
                episode.finish(Stop.DOOMED)


_SHIPPED: dict[str, type[RolloutSampler]] = {"repl": ReplSampler}


def load_sampler(name: str) -> RolloutSampler:
    """A shipped sampler by name, or a `RolloutSampler` subclass as `module:Class`.

    Raises:
        ConfigError: no such name, the module cannot be imported, or the class is not a `RolloutSampler`.
    """
    if name in _SHIPPED:
        return _SHIPPED[name]()
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ConfigError("sampler", name, f"choose one of {sorted(_SHIPPED)} or give module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("sampler", name, f"it cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RolloutSampler)):
        raise ConfigError("sampler", name, "make it a subclass of repl_rl.RolloutSampler")
    return found()
