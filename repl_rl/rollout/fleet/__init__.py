"""Where rollouts are played: in this process, or on nodes of a cluster that each hold engine, consoles and sampler."""

from repl_rl.rollout.fleet.base import Fleet
from repl_rl.rollout.fleet.choice import chosen_fleet, fleet_options

__all__ = ["Fleet", "chosen_fleet", "fleet_options"]
