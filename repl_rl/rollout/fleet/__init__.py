"""Rollouts in this process, or on workers of a cluster that each have engine, consoles and sampler."""

from repl_rl.rollout.fleet.base import Fleet
from repl_rl.rollout.fleet.choice import chosen_fleet, fleet_options

__all__ = ["Fleet", "chosen_fleet", "fleet_options"]
