"""The entry: a model folder, tasks and a rollout source in; a trained model folder and a record a step out."""

import json
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

from repl_rl.credit.advantages import discount_of, estimator
from repl_rl.credit.credited import LineCredit
from repl_rl.credit.group import Credit
from repl_rl.credit.rewards import Potential, line_reward
from repl_rl.engine.logits import attention
from repl_rl.engine.names import complete, read_config
from repl_rl.errors import ConfigError
from repl_rl.record.metrics import describe
from repl_rl.record.trajectory import Trajectory
from repl_rl.tasks import Curriculum
from repl_rl.trainer import choices
from repl_rl.trainer.config import GRPOConfig, TrainerConfig
from repl_rl.trainer.evaluations import Evaluation, Evaluator
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.lora import adapted, whole
from repl_rl.trainer.sinks import PREFIX, Sinks
from repl_rl.trainer.source import OnStep, RolloutSource, StepRecord
from repl_rl.trainer.weights import Tell, size_of, weights_folder

log = logging.getLogger(__name__)


def fit(
    model: Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task_ids: Sequence[str],
    source: RolloutSource,
    config: TrainerConfig,
    out: Path,
    on_step: OnStep,
    curriculum: Curriculum | None = None,
    seed: int = 0,
    tell: Tell = log.warning,
    evaluation: Evaluation | None = None,
    keeper: Keeper | None = None,
) -> Path:
    """Train for `config.steps` steps; return `out/final`, the folder of the trained model with its tokenizer.

    `model` is a folder or a loaded model, which is then trained in place; without adapters its weights are made
    float32, because bfloat16 has no room for the small steps that an optimizer makes. With a `curriculum` of the tasks,
    it chooses those of each step by the outcomes so far; else they come in TRL's random order, drawn by `seed` (>= 0).
    Checkpoints are `out/checkpoint-<optimizer steps>`, every `config.save_every` steps and at the last. Whatever
    `on_step` or `source` raises ends training and rises from here. With `config.lora_rank`, `out/final` has the
    adapters merged into its weights, `out/adapter` holds them alone, and so do checkpoints. `tell` is given a line
    about whatever is done in another way than usual. An `evaluation` is made every so many steps; its figures join the
    step's, and `out/best` is the policy that did best (with `config.lora_rank`, its adapters). The text part of a
    composite model is trained; `out/final` is the whole model again, where `model` is its folder. With a `keeper` the
    run's state is saved, and the run goes on where the keeper's state is.

    Raises:
        ConfigError: a setting, the model folder or the number of tasks is unusable; nothing has been written then.
        WeightSyncError: the sampler's log probabilities are not the trainer's.
    """
    credit_of(config)  # refused before a model is loaded
    _silence()
    args = config.grpo_args(out, int(os.environ.get("WORLD_SIZE", "1")), seed)
    policy = load_model(model, config) if isinstance(model, Path) else model
    _tell_router(policy, config, tell)
    policy = learning(policy, config, seed)
    with weights_folder(size_of(policy), tell) as weights:
        trainer = _trainer(policy, tokenizer, task_ids, source, config, args, weights, curriculum)
        base = model if isinstance(model, Path) else None
        evaluator = Evaluator(trainer, evaluation, out, base) if evaluation else None
        reporter = _report(trainer, on_step, out.parent, evaluator)
        if keeper is not None:
            own = {"groups": trainer.groups, "evaluator": evaluator, "reporter": reporter}
            trainer.keep(keeper, {"source": source, "curriculum": curriculum, **own}, tell)
        trainer.go_on()
    return _save(trainer, out, config.lora_rank > 0, base)


def _trainer(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task_ids: Sequence[str],
    source: RolloutSource,
    config: TrainerConfig,
    args: GRPOConfig,
    weights: Path,
    curriculum: Curriculum | None,
) -> ReplGRPOTrainer:
    return ReplGRPOTrainer(
        model=policy,
        tokenizer=tokenizer,
        task_ids=task_ids,
        source=source,
        args=args,
        credit=credit_of(config),
        tolerance=config.tolerance,
        weights=weights,
        fast=config.fast,
        importance=config.importance,
        curriculum=curriculum,
        observation_weight=config.observation_weight,
        plan=choices.groups(config.groups),
    )


def _silence() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # TRL warns of each rollout without a reward, with the whole trajectory; ours has none on purpose after a fault.
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
    disable_progress_bar()


def _report(trainer: ReplGRPOTrainer, on_step: OnStep, run: Path, evaluator: Evaluator | None) -> "Reporter":
    trainer.remove_callback(PrinterCallback)
    sinks = Sinks(trainer, run)
    reporter = Reporter(trainer, on_step, sinks, evaluator)
    trainer.add_callback(reporter)
    sinks.join()
    return reporter


def _tell_router(policy: PreTrainedModel, config: TrainerConfig, tell: Tell) -> None:
    text = policy.config.get_text_config()
    balance = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
    if config.fast and balance:
        tell(f"the router's own loss (router_aux_loss_coef {balance}) is left out; with fast = false it is added")


def _save(trainer: ReplGRPOTrainer, out: Path, adapters: bool, base: Path | None) -> Path:
    accelerator = trainer.accelerator
    if adapters:
        trainer.model = whole(accelerator.unwrap_model(trainer.model), out / "adapter", accelerator.is_main_process)
    trainer.save_model(str(out / "final"))
    if base is not None and accelerator.is_main_process:
        complete(out / "final", base)
    # Nobody goes on before it is whole; and a process that ends with gloo's threads at work can wait for them for ever.
    accelerator.wait_for_everyone()
    return out / "final"


def credit_of(config: TrainerConfig) -> Credit:
    """What `config` says about credit.

    Raises:
        ConfigError: an estimator or a reward function cannot be found, or an option has no effect.
    """
    potential = None
    if config.potential:
        potential = Potential(line_reward(config.potential), discount_of(config.estimator))
    return Credit(
        estimator(config.estimator),
        config.rewards,
        tuple(map(line_reward, config.line_rewards)),
        potential,
        config.fade_steps,
        config.stops,
    )


def learning(model: PreTrainedModel, config: TrainerConfig, seed: int) -> PreTrainedModel:
    """`model` with what is trained of it in float32: its adapters, drawn from `seed`, or else all of it."""
    if config.lora_rank:
        return adapted(model, config.lora_rank, seed)
    return model if model.dtype == torch.float32 else model.float()


def load_model(folder: Path, config: TrainerConfig) -> PreTrainedModel:
    """Load the policy to train: weights that are trained are float32, those that adapters leave alone `config.dtype`.

    Raises:
        ConfigError: there is no loadable model, or its output layer is not the input embedding that it is said to be.
    """
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), "there is no such folder")
    dtype, how = config.loaded_dtype, attention(read_config(folder))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=how)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model folder", str(folder), f"it cannot be loaded: {error}") from error
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.get_text_config().tie_word_embeddings and head is not None and head.weight is not words.weight:
        remedy = "yet the checkpoint has an output layer of its own; set it to false in config.json"
        raise ConfigError("tie_word_embeddings", True, remedy)
    return model


class Reporter(TrainerCallback):
    """Turns TRL's log of a step into a `StepRecord` and hands it on; its figures join the log, for the sinks."""

    def __init__(
        self, trainer: ReplGRPOTrainer, on_step: OnStep, sinks: Sinks, evaluator: Evaluator | None = None
    ) -> None:
        self.trainer = trainer
        self.evaluator = evaluator
        self.on_step = on_step
        self.sinks = sinks
        self._mark = (0.0, 0.0, 0.0)
        self._first_line_tokens = 0.0

    def memory(self) -> str:
        """What its figures are compared with, as JSON."""
        return json.dumps(self._first_line_tokens)

    def remember(self, memory: str) -> None:
        """Go on from what `memory` gave."""
        self._first_line_tokens = json.loads(memory)

    def _drift(self, line_tokens: float) -> float:
        """Growth of the mean line since the first step that had lines, as a share of it."""
        self._first_line_tokens = self._first_line_tokens or line_tokens
        return line_tokens / self._first_line_tokens - 1 if self._first_line_tokens else 0.0

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
        clocks = self._clocks()
        wall_s, rollout_s, sync_s = (now - then for now, then in zip(clocks, self._mark, strict=True))
        # Each process has its part of the step; the record tells of the whole.
        trajectories: list[Trajectory] = gather_object(list(self.trainer.step_state.trajectories))
        credit: list[tuple[LineCredit, ...]] = gather_object(self.trainer.line_credit())
        metrics = {
            "loss": logs["loss"],
            "grad_norm": logs["grad_norm"],
            "learning_rate": logs["learning_rate"],
            "entropy": logs["entropy"],
            "clip_share": logs.get("clip_ratio/region_mean", 0.0),
            "zero_variance_groups": logs["frac_reward_zero_std"],
            "optimizer_steps": float(state.global_step),
            **({"kl": logs["kl"]} if "kl" in logs else {}),
            "rollout_s": rollout_s,
            "sync_s": sync_s,
            "update_s": wall_s - rollout_s - sync_s,
            **self._told(trajectories),
        }
        if self.evaluator is not None:
            metrics |= self.evaluator.after(self.trainer.steps_done)
        if state.is_world_process_zero:
            record = StepRecord(self.trainer.steps_done, metrics, tuple(credit))
            self.on_step(record, trajectories)
            self.sinks.send_table(record, trajectories)
        logs.update({f"{PREFIX}{name}": value for name, value in metrics.items()})
        # What the caller does with the record is not the next step's time, nor is an evaluation; the weights that the
        # latter was given are, since the next step does not give them again.
        now_s, _, synced_s = self._clocks()
        self._mark = now_s - (synced_s - clocks[2]), *clocks[1:]

    def _told(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What is told of a step's rollouts, those of all processes."""
        described = describe(trajectories)
        return {
            **self.trainer.scored.gap.metrics(),
            **self.trainer.scored.metrics,
            **self.trainer.step_state.metrics,
            **self.trainer.credit.stops.rates(trajectories),
            **described,
            "line_tokens_drift": self._drift(described["line_tokens_mean"]),
        }
