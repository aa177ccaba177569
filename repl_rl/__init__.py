"""repl_rl: a line-streaming, REPL-interleaved reasoning trainer.

Public names are imported when they are first used, so that `import repl_rl` stays light.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "errors",
    "Engine": "engine.base",
    "Episode": "episode",
    "Group": "trajectory",
    "Limits": "sandbox.base",
    "LineStatus": "trajectory",
    "PushResult": "sandbox.base",
    "Renderer": "renderer",
    "ReplGRPOTrainer": "trainer",
    "ReplRLError": "errors",
    "ReplSampler": "samplers.base",
    "RolloutLimits": "episode",
    "RolloutSampler": "samplers.base",
    "Rollouts": "samplers.runner",
    "Sandbox": "sandbox.base",
    "Stop": "trajectory",
    "Task": "tasks",
    "Trajectory": "trajectory",
    "generate": "tasks",
    "load_tasks": "tasks",
    "open_engine": "engine",
    "open_sandbox": "sandbox",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'repl_rl' has no attribute {name!r}")
    return getattr(import_module(f"repl_rl.{_HOMES[name]}"), name)
