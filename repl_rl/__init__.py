"""repl_rl: a line-streaming, REPL-interleaved reasoning trainer.

Public names are imported on first use, so that `import repl_rl` is fast. Type checkers and editors read `__init__.pyi`,
which has the same names as plain imports; a test compares the two. The library `lazy_loader` would read that file at
run time. It would add a dependency and a parse at each start, and save only the few lines below.
"""

import sys
from importlib import import_module

from repl_rl.deprecations import OldModuleFinder

__version__ = "0.3.0"

_HOMES = {
    "CallConvention": "samplers.inline_call_sampler",
    "ChatToolSampler": "samplers.chat_tool_sampler",
    "Choice": "rollout.episode",
    "ConfigError": "errors",
    "CreditedTrajectory": "credit.credited_trajectory",
    "Curriculum": "tasks",
    "Docker": "sandbox",
    "Engine": "engine.base",
    "EnvironmentSampler": "integrations.gym_environment_sampler",
    "Episode": "rollout.episode",
    "Exchange": "samplers.retry_with_feedback_sampler",
    "Execution": "trajectory.trajectory",
    "Feedback": "samplers.retry_with_feedback_sampler",
    "FeedbackSampler": "samplers.retry_with_feedback_sampler",
    "FencedCodeSampler": "samplers.fenced_code_sampler",
    "FencedLineSampler": "samplers.fenced_line_sampler",
    "FollowUp": "tasks",
    "Group": "trajectory.trajectory",
    "GroupRewards": "credit.advantage_estimators",
    "HostCall": "trajectory.trajectory",
    "HostFunction": "rollout.host_functions",
    "HostLimits": "rollout.host_functions",
    "InlineCallSampler": "samplers.inline_call_sampler",
    "JudgeToolSampler": "samplers.chat_tool_sampler",
    "Limits": "sandbox.base",
    "Line": "trajectory.trajectory",
    "LineCredit": "credit.credited_trajectory",
    "LineRewards": "credit.advantage_estimators",
    "LineEnd": "trajectory.trajectory",
    "LineStatus": "trajectory.trajectory",
    "Observed": "trajectory.trajectory",
    "Prompt": "trajectory.trajectory",
    "LineResult": "sandbox.base",
    "Renderer": "rollout.token_renderer",
    "ReplGRPOTrainer": "trainer.grpo",
    "TrainerComponents": "trainer.grpo",
    "ReplRLError": "errors",
    "ReplSampler": "rollout",
    "RewardTable": "credit.rewards",
    "RolloutRewards": "credit.advantage_estimators",
    "RolloutLimits": "rollout.rollout_limits",
    "FaultRetries": "rollout.retry",
    "HostFunctions": "rollout.host_functions",
    "RolloutHook": "rollout",
    "RolloutSampler": "rollout",
    "RolloutSettings": "rollout",
    "SyncRollouts": "rollout",
    "Rollouts": "rollout",
    "Sampled": "trajectory.trajectory",
    "Sampling": "engine.base",
    "Sandbox": "sandbox.base",
    "ScriptedEngine": "engine",
    "BranchPoint": "runs.replay",
    "StepRecord": "trainer.rollout_source",
    "Stop": "trajectory.trajectory",
    "Store": "runs.store",
    "Study": "evaluation",
    "Task": "tasks",
    "TaskRequest": "tasks",
    "TaskResult": "evaluation",
    "TaskSource": "tasks",
    "TrainerConfig": "trainer.config",
    "Trajectory": "trajectory.trajectory",
    "TrajectoryPlayer": "runs.trajectory_player",
    "Transformers": "engine",
    "Vllm": "engine",
    "Workspace": "tasks",
    "RolloutConfig": "rollout_config",
    "find_asset": "utils.package_data",
    "branch": "runs.replay",
    "compare": "evaluation",
    "component": "settings.component_registry",
    "open_console": "sandbox.base",
    "load_estimator": "credit.advantage_estimators",
    "generate": "tasks.generated_tasks",
    "grade_async": "judges",
    "host_function": "rollout.host_functions",
    "compute_line_rewards": "credit.rewards",
    "compute_line_states": "credit.console_state_ids",
    "load_sampler": "samplers.load_sampler",
    "load_tasks": "tasks",
    "open_engine": "engine",
    "open_replay": "runs.replay",
    "open_sandbox": "sandbox",
    "pass_at_k": "evaluation",
    "select_best_rollouts": "sft.select_rollouts",
    "spread": "trajectory.trajectory",
    "get_branch_point": "runs.replay",
    "get_replay_branch_point": "runs.replay",
    "make_reward_to_go": "samplers.retry_with_feedback_sampler",
    "to_text": "runs.store",
    "train": "trainer.train",
    "verify_all": "runs.replay",
    "wilson": "evaluation",
    "write_step": "runs.store",
}

__all__ = sorted(_HOMES)
sys.meta_path.insert(0, OldModuleFinder())


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"repl_rl.{_HOMES[name]}"), name)
    # Only a program with an old name, or a wrong one, needs these.
    from repl_rl.deprecations import module_getattr
    from repl_rl.deprecations.old_names import OLD_EXPORTS

    return module_getattr(__name__, OLD_EXPORTS)(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
