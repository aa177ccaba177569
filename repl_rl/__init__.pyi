"""The public names, for type checkers and editors: what `__init__.py` imports when it is first used."""

from repl_rl.coldstart.selection import select as select
from repl_rl.credit.advantages import estimator as estimator
from repl_rl.credit.credited import Credited as Credited
from repl_rl.credit.credited import LineCredit as LineCredit
from repl_rl.credit.earnings import GroupRewards as GroupRewards
from repl_rl.credit.earnings import LineEarnings as LineEarnings
from repl_rl.credit.earnings import RolloutEarnings as RolloutEarnings
from repl_rl.credit.rewards import RewardTable as RewardTable
from repl_rl.credit.rewards import line_rewards as line_rewards
from repl_rl.credit.states import line_states as line_states
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
from repl_rl.judges import graded as graded
from repl_rl.machine.assets import asset as asset
from repl_rl.record.group import Group as Group
from repl_rl.record.trajectory import Execution as Execution
from repl_rl.record.trajectory import HostCall as HostCall
from repl_rl.record.trajectory import Line as Line
from repl_rl.record.trajectory import LineEnd as LineEnd
from repl_rl.record.trajectory import LineStatus as LineStatus
from repl_rl.record.trajectory import Observed as Observed
from repl_rl.record.trajectory import Prompt as Prompt
from repl_rl.record.trajectory import Sampled as Sampled
from repl_rl.record.trajectory import Stop as Stop
from repl_rl.record.trajectory import Trajectory as Trajectory
from repl_rl.record.trajectory import spread as spread
from repl_rl.rollout import ReplSampler as ReplSampler
from repl_rl.rollout import Rollouts as Rollouts
from repl_rl.rollout import RolloutSampler as RolloutSampler
from repl_rl.rollout import RolloutThread as RolloutThread
from repl_rl.rollout.choosing import Choice as Choice
from repl_rl.rollout.episode import Episode as Episode
from repl_rl.rollout.host import HostFunction as HostFunction
from repl_rl.rollout.host import HostLimits as HostLimits
from repl_rl.rollout.host import host_function as host_function
from repl_rl.rollout.limits import RolloutLimits as RolloutLimits
from repl_rl.rollout.renderer import Renderer as Renderer
from repl_rl.runs.player import TrajectoryPlayer as TrajectoryPlayer
from repl_rl.runs.replay import Start as Start
from repl_rl.runs.replay import branch as branch
from repl_rl.runs.replay import open_replay as open_replay
from repl_rl.runs.replay import start_at as start_at
from repl_rl.runs.replay import start_of as start_of
from repl_rl.runs.replay import verify_all as verify_all
from repl_rl.runs.store import Store as Store
from repl_rl.runs.store import to_text as to_text
from repl_rl.runs.store import write_step as write_step
from repl_rl.samplers.chat_tool import ChatToolSampler as ChatToolSampler
from repl_rl.samplers.environment import EnvironmentSampler as EnvironmentSampler
from repl_rl.samplers.feedback import Exchange as Exchange
from repl_rl.samplers.feedback import Feedback as Feedback
from repl_rl.samplers.feedback import FeedbackSampler as FeedbackSampler
from repl_rl.samplers.feedback import to_go as to_go
from repl_rl.samplers.fenced import FencedCodeSampler as FencedCodeSampler
from repl_rl.samplers.fenced_lines import FencedLineSampler as FencedLineSampler
from repl_rl.samplers.inline_call import CallConvention as CallConvention
from repl_rl.samplers.inline_call import InlineCallSampler as InlineCallSampler
from repl_rl.samplers.judge_tool import JudgeToolSampler as JudgeToolSampler
from repl_rl.samplers.loading import load_sampler as load_sampler
from repl_rl.sandbox import Docker as Docker
from repl_rl.sandbox import open_sandbox as open_sandbox
from repl_rl.sandbox.base import Limits as Limits
from repl_rl.sandbox.base import PushResult as PushResult
from repl_rl.sandbox.base import Sandbox as Sandbox
from repl_rl.sandbox.base import console_of as console_of
from repl_rl.tasks import Curriculum as Curriculum
from repl_rl.tasks import FollowUp as FollowUp
from repl_rl.tasks import Task as Task
from repl_rl.tasks import Workspace as Workspace
from repl_rl.tasks import generate as generate
from repl_rl.tasks import load_tasks as load_tasks
from repl_rl.trainer.config import TrainerConfig as TrainerConfig
from repl_rl.trainer.grpo import ReplGRPOTrainer as ReplGRPOTrainer
from repl_rl.trainer.run import train as train
from repl_rl.trainer.source import StepRecord as StepRecord
from repl_rl.world import World as World

__version__: str
__all__ = [
    "CallConvention",
    "ChatToolSampler",
    "Choice",
    "ConfigError",
    "Credited",
    "Curriculum",
    "Docker",
    "Engine",
    "EnvironmentSampler",
    "Episode",
    "Exchange",
    "Execution",
    "Feedback",
    "FeedbackSampler",
    "FencedCodeSampler",
    "FencedLineSampler",
    "FollowUp",
    "Group",
    "GroupRewards",
    "HostCall",
    "HostFunction",
    "HostLimits",
    "InlineCallSampler",
    "JudgeToolSampler",
    "Limits",
    "Line",
    "LineCredit",
    "LineEarnings",
    "LineEnd",
    "LineStatus",
    "Observed",
    "Prompt",
    "PushResult",
    "Renderer",
    "ReplGRPOTrainer",
    "ReplRLError",
    "ReplSampler",
    "RewardTable",
    "RolloutEarnings",
    "RolloutLimits",
    "RolloutSampler",
    "RolloutThread",
    "Rollouts",
    "Sampled",
    "Sampling",
    "Sandbox",
    "ScriptedEngine",
    "Start",
    "StepRecord",
    "Stop",
    "Store",
    "Study",
    "Task",
    "TaskResult",
    "TrainerConfig",
    "Trajectory",
    "TrajectoryPlayer",
    "Transformers",
    "Vllm",
    "Workspace",
    "World",
    "asset",
    "branch",
    "compare",
    "console_of",
    "estimator",
    "generate",
    "graded",
    "host_function",
    "line_rewards",
    "line_states",
    "load_sampler",
    "load_tasks",
    "open_engine",
    "open_replay",
    "open_sandbox",
    "pass_at_k",
    "select",
    "spread",
    "start_at",
    "start_of",
    "to_go",
    "to_text",
    "train",
    "verify_all",
    "wilson",
    "write_step",
]
