"""The entry: a model folder, tasks and a rollout source in; a trained model folder and a record a step out."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from repl_rl.advantages import estimator
from repl_rl.errors import ConfigError
from repl_rl.metrics import describe
from repl_rl.rewards import line_reward
from repl_rl.store import LineCredit
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.credit import Credit
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.source import OnStep, RolloutSource, StepRecord, weights_folder
from repl_rl.trajectory import Trajectory


def train(
    model: Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task_ids: Sequence[str],
    source: RolloutSource,
    config: TrainerConfig,
    out: Path,
    on_step: OnStep,
) -> Path:
    """Train for `config.steps` steps; return `out/final`, the folder of the trained model with its tokenizer.

    `model` is a folder or a loaded model, which is then trained in place. Checkpoints to resume from are
    `out/checkpoint-<step>`, at every `config.save_every` steps and at the last. Whatever `on_step` or `source` raises
    ends training and rises from here.

    Raises:
        ConfigError: a setting, the model folder or the number of tasks is unusable; nothing has been written then.
        WeightSyncError: the sampler's log probabilities are not the trainer's.
    """
    credit = credit_of(config)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # TRL warns of each rollout without a reward, with the whole trajectory; ours has none on purpose after a fault.
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
    disable_progress_bar()
    with weights_folder() as weights:
        trainer = ReplGRPOTrainer(
            model=load_model(model, config) if isinstance(model, Path) else model,
            tokenizer=tokenizer,
            task_ids=task_ids,
            source=source,
            args=config.grpo_args(out, int(os.environ.get("WORLD_SIZE", "1"))),
            credit=credit,
            tolerance=config.tolerance,
            weights=weights,
            fast=config.fast,
            importance=config.importance,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Reporter(trainer, on_step))
        trainer.train()
    trainer.save_model(str(out / "final"))
    return out / "final"


def credit_of(config: TrainerConfig) -> Credit:
    """What `config` says about credit.

    Raises:
        ConfigError: an estimator or a reward function cannot be found, or an option has no effect.
    """
    return Credit(
        estimator(config.estimator, line_weight=config.line_weight, discount=config.discount),
        config.rewards,
        line_reward(config.line_reward) if config.line_reward else None,
        config.fade_steps,
    )


def load_model(folder: Path, config: TrainerConfig) -> PreTrainedModel:
    """Load the policy to train, in `config.dtype`.

    Raises:
        ConfigError: there is no loadable model.
    """
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), "there is no such folder")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, config.dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model folder", str(folder), f"it cannot be loaded: {error}") from error
    return model


class Reporter(TrainerCallback):
    """Turns TRL's log of a step into a `StepRecord` and hands it on."""

    def __init__(self, trainer: ReplGRPOTrainer, on_step: OnStep) -> None:
        self.trainer = trainer
        self.on_step = on_step
        self._mark = (0.0, 0.0, 0.0)

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.trainer.rollout_s, self.trainer.vllm_generation.elapsed_s

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._mark = self._clocks()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        wall_s, rollout_s, sync_s = (now - then for now, then in zip(self._clocks(), self._mark, strict=True))
        # Each process has its part of the step; the record tells of the whole.
        trajectories: list[Trajectory] = gather_object(list(self.trainer.trajectories))
        credit: list[tuple[LineCredit, ...]] = gather_object(self.trainer.line_credit())
        gap = self.trainer.gap
        metrics = {
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
            "entropy": logs["entropy"],
            "clip_share": logs.get("clip_ratio/region_mean", 0.0),
            "zero_variance_groups": logs["frac_reward_zero_std"],
            "logprob_gap_mean": gap.mean,
            "logprob_gap_max": gap.max,
            "logprob_gap_after_observation": gap.after_observation,
            "importance_ratio": gap.ratio,
            "importance_kept": gap.kept,
            "rollout_s": rollout_s,
            "sync_s": sync_s,
            "update_s": wall_s - rollout_s - sync_s,
            **self.trainer.shaping,
            **describe(trajectories),
        }
        if state.is_world_process_zero:
            self.on_step(StepRecord(state.global_step, metrics, tuple(credit)), trajectories)
        # What the caller does with the record is not the next step's time.
        self._mark = self._clocks()
