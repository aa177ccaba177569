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
    "Docker": "sandbox",
    "Episode": "rollout.episode",
    "Exchange": "samplers.feedback",
    "Execution": "record.trajectory",
    "Feedback": "samplers.feedback",
    "FeedbackSampler": "samplers.feedback",
    "FencedCodeSampler": "samplers.fenced",
    "Group": "record.trajectory",
    "InlineCallSampler": "samplers.inline_call",
    "JudgeToolSampler": "samplers.judge_tool",
    "Limits": "sandbox.base",
    "Line": "record.trajectory",
    "LineStatus": "record.trajectory",
    "Observed": "record.trajectory",
    "PushResult": "sandbox.base",
    "Renderer": "rollout.renderer",
    "ReplGRPOTrainer": "trainer",
    "ReplRLError": "errors",
    "ReplSampler": "rollout",
    "RolloutLimits": "rollout.limits",
    "RolloutSampler": "rollout",
    "Rollouts": "rollout",
    "Sandbox": "sandbox.base",
    "Stop": "record.trajectory",
    "Store": "runs.store",
    "Task": "tasks",
    "TrainerConfig": "trainer",
    "Trajectory": "record.trajectory",
    "Transformers": "engine",
    "Vllm": "engine",
    "World": "world",
    "generate": "tasks",
    "load_sampler": "samplers.loading",
    "load_tasks": "tasks",
    "open_engine": "engine",
    "open_sandbox": "sandbox",
    "train": "trainer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'repl_rl' has no attribute {name!r}")
    return getattr(import_module(f"repl_rl.{_HOMES[name]}"), name)
