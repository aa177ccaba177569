"""Samplers, and the machinery that runs them."""

from repl_rl.samplers.base import ReplSampler, RolloutSampler
from repl_rl.samplers.loading import load_sampler
from repl_rl.samplers.runner import Rollouts
from repl_rl.samplers.source import RolloutThread

__all__ = ["ReplSampler", "RolloutSampler", "RolloutThread", "Rollouts", "load_sampler"]
