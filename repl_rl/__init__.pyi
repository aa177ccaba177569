"""The public names, for type checkers and editors: what `__init__.py` imports when it is first used."""

from repl_rl.credit.advantage_estimators import GroupRewards as GroupRewards
from repl_rl.credit.advantage_estimators import LineRewards as LineRewards
from repl_rl.credit.advantage_estimators import RolloutRewards as RolloutRewards
from repl_rl.credit.advantage_estimators import load_estimator as load_estimator
from repl_rl.credit.console_state_ids import compute_line_states as compute_line_states
from repl_rl.credit.credited_trajectory import CreditedTrajectory as CreditedTrajectory
from repl_rl.credit.credited_trajectory import LineCredit as LineCredit
from repl_rl.credit.rewards import RewardTable as RewardTable
from repl_rl.credit.rewards import compute_line_rewards as compute_line_rewards
from repl_rl.engine import ScriptedEngine as ScriptedEngine
from repl_rl.engine import Transformers as Transformers
from repl_rl.engine import Vllm as Vllm
from repl_rl.engine import open_engine as open_engine
from repl_rl.engine.base import Engine as Engine
from repl_rl.engine.base import Sampling as Sampling
from repl_rl.errors import ConfigError as ConfigError
from repl_rl.errors import ReplRLError as ReplRLError
from repl_rl.evaluation import Study as Study
from repl_rl.evaluation import TaskResult as TaskResult
from repl_rl.evaluation import compare as compare
from repl_rl.evaluation import pass_at_k as pass_at_k
from repl_rl.evaluation import wilson as wilson
from repl_rl.integrations.gym_environment_sampler import EnvironmentSampler as EnvironmentSampler
from repl_rl.judges import grade_async as grade_async
from repl_rl.rollout import ReplSampler as ReplSampler
from repl_rl.rollout import RolloutHook as RolloutHook
from repl_rl.rollout import Rollouts as Rollouts
from repl_rl.rollout import RolloutSampler as RolloutSampler
from repl_rl.rollout import RolloutSettings as RolloutSettings
from repl_rl.rollout import SyncRollouts as SyncRollouts
from repl_rl.rollout.episode import Choice as Choice
from repl_rl.rollout.episode import Episode as Episode
from repl_rl.rollout.host_functions import HostFunction as HostFunction
from repl_rl.rollout.host_functions import HostFunctions as HostFunctions
from repl_rl.rollout.host_functions import HostLimits as HostLimits
from repl_rl.rollout.host_functions import host_function as host_function
from repl_rl.rollout.retry import FaultRetries as FaultRetries
from repl_rl.rollout.rollout_limits import RolloutLimits as RolloutLimits
from repl_rl.rollout.token_renderer import Renderer as Renderer
from repl_rl.rollout_config import RolloutConfig as RolloutConfig
from repl_rl.runs.replay import BranchPoint as BranchPoint
from repl_rl.runs.replay import branch as branch
from repl_rl.runs.replay import get_branch_point as get_branch_point
from repl_rl.runs.replay import get_replay_branch_point as get_replay_branch_point
from repl_rl.runs.replay import open_replay as open_replay
from repl_rl.runs.replay import verify_all as verify_all
from repl_rl.runs.store import Store as Store
from repl_rl.runs.store import to_text as to_text
from repl_rl.runs.store import write_step as write_step
from repl_rl.runs.trajectory_player import TrajectoryPlayer as TrajectoryPlayer
from repl_rl.samplers.chat_tool_sampler import ChatToolSampler as ChatToolSampler
from repl_rl.samplers.chat_tool_sampler import JudgeToolSampler as JudgeToolSampler
from repl_rl.samplers.fenced_code_sampler import FencedCodeSampler as FencedCodeSampler
from repl_rl.samplers.fenced_line_sampler import FencedLineSampler as FencedLineSampler
from repl_rl.samplers.inline_call_sampler import CallConvention as CallConvention
from repl_rl.samplers.inline_call_sampler import InlineCallSampler as InlineCallSampler
from repl_rl.samplers.load_sampler import load_sampler as load_sampler
from repl_rl.samplers.retry_with_feedback_sampler import Exchange as Exchange
from repl_rl.samplers.retry_with_feedback_sampler import Feedback as Feedback
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler as FeedbackSampler
from repl_rl.samplers.retry_with_feedback_sampler import make_reward_to_go as make_reward_to_go
from repl_rl.sandbox import Docker as Docker
from repl_rl.sandbox import open_sandbox as open_sandbox
from repl_rl.sandbox.base import Limits as Limits
from repl_rl.sandbox.base import LineResult as LineResult
from repl_rl.sandbox.base import Sandbox as Sandbox
from repl_rl.sandbox.base import open_console as open_console
from repl_rl.settings.component_registry import component as component
from repl_rl.sft.select_rollouts import select_best_rollouts as select_best_rollouts
from repl_rl.tasks import Curriculum as Curriculum
from repl_rl.tasks import FollowUp as FollowUp
from repl_rl.tasks import Task as Task
from repl_rl.tasks import TaskRequest as TaskRequest
from repl_rl.tasks import TaskSource as TaskSource
from repl_rl.tasks import Workspace as Workspace
from repl_rl.tasks import load_tasks as load_tasks
from repl_rl.tasks.generated_tasks import generate as generate
from repl_rl.trainer.config import TrainerConfig as TrainerConfig
from repl_rl.trainer.grpo import ReplGRPOTrainer as ReplGRPOTrainer
from repl_rl.trainer.grpo import TrainerComponents as TrainerComponents
from repl_rl.trainer.rollout_source import StepRecord as StepRecord
from repl_rl.trainer.train import train as train
from repl_rl.trajectory.trajectory import Execution as Execution
from repl_rl.trajectory.trajectory import Group as Group
from repl_rl.trajectory.trajectory import HostCall as HostCall
from repl_rl.trajectory.trajectory import Line as Line
from repl_rl.trajectory.trajectory import LineEnd as LineEnd
from repl_rl.trajectory.trajectory import LineStatus as LineStatus
from repl_rl.trajectory.trajectory import Observed as Observed
from repl_rl.trajectory.trajectory import Prompt as Prompt
from repl_rl.trajectory.trajectory import Sampled as Sampled
from repl_rl.trajectory.trajectory import Stop as Stop
from repl_rl.trajectory.trajectory import Trajectory as Trajectory
from repl_rl.trajectory.trajectory import spread as spread
from repl_rl.utils.package_data import find_asset as find_asset

__version__: str
__all__ = [
    "BranchPoint",
    "CallConvention",
    "ChatToolSampler",
    "Choice",
    "ConfigError",
    "CreditedTrajectory",
    "Curriculum",
    "Docker",
    "Engine",
    "EnvironmentSampler",
    "Episode",
    "Exchange",
    "Execution",
    "FaultRetries",
    "Feedback",
    "FeedbackSampler",
    "FencedCodeSampler",
    "FencedLineSampler",
    "FollowUp",
    "Group",
    "GroupRewards",
    "HostCall",
    "HostFunction",
    "HostFunctions",
    "HostLimits",
    "InlineCallSampler",
    "JudgeToolSampler",
    "Limits",
    "Line",
    "LineCredit",
    "LineEnd",
    "LineResult",
    "LineRewards",
    "LineStatus",
    "Observed",
    "Prompt",
    "Renderer",
    "ReplGRPOTrainer",
    "ReplRLError",
    "ReplSampler",
    "RewardTable",
    "RolloutConfig",
    "RolloutHook",
    "RolloutLimits",
    "RolloutRewards",
    "RolloutSampler",
    "RolloutSettings",
    "Rollouts",
    "Sampled",
    "Sampling",
    "Sandbox",
    "ScriptedEngine",
    "StepRecord",
    "Stop",
    "Store",
    "Study",
    "SyncRollouts",
    "Task",
    "TaskRequest",
    "TaskResult",
    "TaskSource",
    "TrainerComponents",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryPlayer",
    "Transformers",
    "Vllm",
    "Workspace",
    "branch",
    "compare",
    "component",
    "compute_line_rewards",
    "compute_line_states",
    "find_asset",
    "generate",
    "get_branch_point",
    "get_replay_branch_point",
    "grade_async",
    "host_function",
    "load_estimator",
    "load_sampler",
    "load_tasks",
    "make_reward_to_go",
    "open_console",
    "open_engine",
    "open_replay",
    "open_sandbox",
    "pass_at_k",
    "select_best_rollouts",
    "spread",
    "to_text",
    "train",
    "verify_all",
    "wilson",
    "write_step",
]
