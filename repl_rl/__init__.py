"""repl_rl: a line-streaming, REPL-interleaved reasoning trainer.

Public names are imported on first use, so that `import repl_rl` is fast. Type checkers and editors read `__init__.pyi`,
which has the same names as plain imports; a test compares the two. The library `lazy_loader` would read that file at
run time. It would add a dependency and a parse at each start, and save only the few lines below.
"""

from importlib import import_module

__version__ = "0.2.0"

_HOMES = {
    "CallConvention": "samplers.inline_call",
    "ChatToolSampler": "samplers.chat_tool",
    "Choice": "rollout.choosing",
    "ConfigError": "errors",
    "Credited": "credit.credited",
    "Curriculum": "tasks",
    "Docker": "sandbox",
    "Engine": "engine.base",
    "EnvironmentSampler": "samplers.environment",
    "Episode": "rollout.episode",
    "Exchange": "samplers.feedback",
    "Execution": "record.trajectory",
    "Feedback": "samplers.feedback",
    "FeedbackSampler": "samplers.feedback",
    "FencedCodeSampler": "samplers.fenced",
    "FencedLineSampler": "samplers.fenced_lines",
    "FollowUp": "tasks",
    "Group": "record.group",
    "GroupRewards": "credit.earnings",
    "HostCall": "record.trajectory",
    "HostFunction": "rollout.host",
    "HostLimits": "rollout.host",
    "InlineCallSampler": "samplers.inline_call",
    "JudgeToolSampler": "samplers.judge_tool",
    "Limits": "sandbox.base",
    "Line": "record.trajectory",
    "LineCredit": "credit.credited",
    "LineEarnings": "credit.earnings",
    "LineEnd": "record.trajectory",
    "LineStatus": "record.trajectory",
    "Observed": "record.trajectory",
    "Prompt": "record.trajectory",
    "PushResult": "sandbox.base",
    "Renderer": "rollout.renderer",
    "ReplGRPOTrainer": "trainer.grpo",
    "ReplRLError": "errors",
    "ReplSampler": "rollout",
    "RewardTable": "credit.rewards",
    "RolloutEarnings": "credit.earnings",
    "RolloutLimits": "rollout.limits",
    "RolloutSampler": "rollout",
    "RolloutThread": "rollout",
    "Rollouts": "rollout",
    "Sampled": "record.trajectory",
    "Sampling": "engine.base",
    "Sandbox": "sandbox.base",
    "ScriptedEngine": "engine",
    "Start": "runs.replay",
    "StepRecord": "trainer.source",
    "Stop": "record.trajectory",
    "Store": "runs.store",
    "Study": "evaluation",
    "Task": "tasks",
    "TaskResult": "evaluation",
    "TrainerConfig": "trainer.config",
    "Trajectory": "record.trajectory",
    "TrajectoryPlayer": "runs.player",
    "Transformers": "engine",
    "Vllm": "engine",
    "Workspace": "tasks",
    "World": "world",
    "asset": "machine.assets",
    "branch": "runs.replay",
    "compare": "evaluation",
    "console_of": "sandbox.base",
    "estimator": "credit.advantages",
    "generate": "tasks",
    "graded": "judges",
    "host_function": "rollout.host",
    "line_rewards": "credit.rewards",
    "line_states": "credit.states",
    "load_sampler": "samplers.loading",
    "load_tasks": "tasks",
    "open_engine": "engine",
    "open_replay": "runs.replay",
    "open_sandbox": "sandbox",
    "pass_at_k": "evaluation",
    "select": "coldstart.selection",
    "spread": "record.trajectory",
    "start_at": "runs.replay",
    "start_of": "runs.replay",
    "to_go": "samplers.feedback",
    "to_text": "runs.store",
    "train": "trainer.run",
    "verify_all": "runs.replay",
    "wilson": "evaluation",
    "write_step": "runs.store",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'repl_rl' has no attribute {name!r}")
    return getattr(import_module(f"repl_rl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
