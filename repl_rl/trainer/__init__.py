"""Policy updates from trajectories, on TRL's GRPO trainer."""

from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.evaluations import BEST, Evaluation
from repl_rl.trainer.gpu_memory import validate_gpu_memory
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.loop import credit_of, fit
from repl_rl.trainer.pace import Saving, saving
from repl_rl.trainer.refusal import refuse_model, refuse_run
from repl_rl.trainer.run import train
from repl_rl.trainer.source import OnStep, RolloutSource, StepRecord
from repl_rl.trainer.states import State, taken

__all__ = [
    "BEST",
    "Evaluation",
    "Keeper",
    "OnStep",
    "ReplGRPOTrainer",
    "RolloutSource",
    "Saving",
    "State",
    "StepRecord",
    "TrainerConfig",
    "credit_of",
    "fit",
    "refuse_model",
    "refuse_run",
    "saving",
    "taken",
    "train",
    "validate_gpu_memory",
]
