"""Rollouts: sampling, execution, observation and rewards of one, and the machinery that runs many."""

from repl_rl.judges import load_group_judges
from repl_rl.rollout.concurrent_rollouts import Rollouts, RolloutSettings
from repl_rl.rollout.rollout_hooks import RolloutHook
from repl_rl.rollout.rollout_stats import RuntimeInfo
from repl_rl.rollout.sampler_base import ReplSampler, RolloutSampler
from repl_rl.rollout.synchronous_rollouts import RolloutClient, SyncRollouts

__all__ = [
    "ReplSampler",
    "RolloutClient",
    "RolloutHook",
    "RolloutSampler",
    "RolloutSettings",
    "Rollouts",
    "RuntimeInfo",
    "SyncRollouts",
    "load_group_judges",
]
