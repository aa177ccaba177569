"""repl_rl: a line-streaming, REPL-interleaved reasoning trainer.

Public names are imported when they are first used, so that `import repl_rl` stays light.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "CallConvention": "samplers.inline_call",
    "ChatToolSampler": "samplers.chat_tool",
    "ConfigError": "errors",
    "Engine": "engine.base",
    "EnvironmentSampler": "samplers.environment",
    "Episode": "episode",
    "Exchange": "samplers.feedback",
    "Execution": "trajectory",
    "Feedback": "samplers.feedback",
    "FeedbackSampler": "samplers.feedback",
    "FencedCodeSampler": "samplers.fenced",
    "Group": "trajectory",
    "InlineCallSampler": "samplers.inline_call",
    "JudgeToolSampler": "samplers.judge_tool",
    "Limits": "sandbox.base",
    "Line": "trajectory",
    "LineStatus": "trajectory",
    "Observed": "trajectory",
    "PushResult": "sandbox.base",
    "Renderer": "renderer",
    "ReplGRPOTrainer": "trainer",
    "ReplRLError": "errors",
    "ReplSampler": "samplers.base",
    "RolloutLimits": "record",
    "RolloutSampler": "samplers.base",
    "Rollouts": "samplers.runner",
    "Sandbox": "sandbox.base",
    "Stop": "trajectory",
    "Store": "store",
    "Task": "tasks",
    "Trajectory": "trajectory",
    "generate": "tasks",
    "load_sampler": "samplers.loading",
    "load_tasks": "tasks",
    "open_engine": "engine",
    "open_sandbox": "sandbox",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'repl_rl' has no attribute {name!r}")
    return getattr(import_module(f"repl_rl.{_HOMES[name]}"), name)
