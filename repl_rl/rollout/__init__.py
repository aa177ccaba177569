"""Rollouts: sampling, execution, observation and rewards of one, and the machinery that runs many."""

from repl_rl.judges import group_judges
from repl_rl.rollout.facts import Facts
from repl_rl.rollout.fleet import Fleet, chosen_fleet, fleet_options
from repl_rl.rollout.runner import Rollouts
from repl_rl.rollout.sampler import ReplSampler, RolloutSampler
from repl_rl.rollout.thread import RolloutThread

__all__ = [
    "Facts",
    "Fleet",
    "ReplSampler",
    "RolloutSampler",
    "RolloutThread",
    "Rollouts",
    "chosen_fleet",
    "fleet_options",
    "group_judges",
]
