"""Training loop: from a model, tasks and a rollout source to a trained model and one record per step.

`run_training` loads the policy, builds the trainer with its weight sync, reporter and checkpoints, trains, and saves
the final model.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
)
from transformers.utils.logging import disable_progress_bar

from repl_rl.credit.advantage_estimators import get_discount, load_estimator, reads_states, sums_shaping
from repl_rl.credit.rewards import CreditConfig, Potential, load_line_reward
from repl_rl.engine.config import Dtype
from repl_rl.errors import ConfigError
from repl_rl.models.describe_load_error import make_savable
from repl_rl.models.disable_dropout import disable_dropout
from repl_rl.models.lm_head import choose_attention
from repl_rl.models.parameter_names import complete_checkpoint, read_config, resolve_causal_class
from repl_rl.tasks import Curriculum
from repl_rl.trainer.config import DynamicSamplingOptions, FifoWindowOptions, TrainerConfig, parse_group_sampling
from repl_rl.trainer.group_sampler import GroupSampler
from repl_rl.trainer.grpo import ReplGRPOTrainer, TrainerComponents
from repl_rl.trainer.grpo_config import grpo_args, loaded_dtype
from repl_rl.trainer.plugins.async_rollouts import AsyncGroups, StalenessSchedule, UpcomingTasks
from repl_rl.trainer.plugins.checkpoint import CheckpointManager
from repl_rl.trainer.plugins.dynamic_sampling import DynamicGroupSampler, TaskPool
from repl_rl.trainer.plugins.fsdp import load_on_every_process
from repl_rl.trainer.plugins.lora import add_adapters, merge_adapters
from repl_rl.trainer.plugins.periodic_evaluation import Evaluation, PeriodicEvaluator
from repl_rl.trainer.plugins.prefix_sharing import PrefixSharing
from repl_rl.trainer.plugins.trackers import Trackers
from repl_rl.trainer.rollout_source import HasTasks, OnStep, RolloutSource
from repl_rl.trainer.step_metrics import StepReporter
from repl_rl.trainer.weight_sync import WarnFn, compute_weight_bytes, open_fallback_folder, open_weights_folder
from repl_rl.utils.processes import get_world_size

log = logging.getLogger(__name__)


def run_training(
    model: Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task_ids: Sequence[str],
    source: RolloutSource,
    config: TrainerConfig,
    out: Path,
    on_step: OnStep,
    curriculum: Curriculum | None = None,
    seed: int = 0,
    tell: WarnFn = log.warning,
    evaluation: Evaluation | None = None,
    keeper: CheckpointManager | None = None,
    sampled_in: Dtype = "auto",
) -> Path:
    """Train for `config.steps` steps; return `out/final`, the folder of the trained model with its tokenizer.

    `model` is a folder, or a loaded model that is trained in place. Without adapters its weights become float32,
    because bfloat16 is too coarse for the small steps of an optimizer. The text part of a composite model is trained;
    `out/final` is the whole model again if `model` is its folder.

    A `curriculum` chooses the tasks of each step by the outcomes so far. Without one, tasks come in TRL's random
    order, drawn from `seed` (>= 0). Errors of `on_step` and `source` end training and propagate. The warning callback
    receives one line per fallback.

    Checkpoints are `out/checkpoint-<optimizer steps>`, written every `config.save_steps` steps and at the last one.
    With `config.lora_rank`, `out/final` has the adapters merged into its weights. `out/adapter` and the checkpoints
    hold the adapters alone. An `evaluation` runs at its interval, and its metrics join those of the step. `out/best`
    is then the best policy so far (with `config.lora_rank`, its adapters). A `keeper` saves the training state, and
    the run resumes from the state that the keeper was given.

    `sampled_in` is the number format of `source`; "auto" means that of the trainer. It decides the tolerance for the
    logprob mismatch.

    Raises:
        ConfigError: a setting, the model folder or the number of tasks is unusable; nothing has been written yet.
        WeightSyncError: the log probabilities of the sampler and of the trainer differ.
    """
    # Credit settings are validated before a model is loaded.
    credit = build_credit_config(config, source.tasks if isinstance(source, HasTasks) else {})
    _silence_warnings()
    load_on_every_process()
    if get_world_size() > 1 and not torch.accelerator.is_available():
        # Without this, accelerate takes each process for the only one.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    args = grpo_args(config, out, get_world_size(), seed)
    policy = load_model(model, config) if isinstance(model, Path) else model
    _warn_about_router(policy, config, tell)
    make_savable(policy)
    disable_dropout(policy)
    policy = prepare_trainable_model(policy, config, seed)
    # Async rollouts alternate between two folders of weights.
    size = compute_weight_bytes(policy) * (2 if config.max_staleness_steps else 1)
    with open_weights_folder(size, tell) as weights, open_fallback_folder(weights, tell) as fallback:
        sharing = PrefixSharing(tell) if config.prefix_sharing == "auto" and config.fast_logprobs else None
        components = TrainerComponents(
            weights,
            config.compute_logprob_tolerance(sampled_in),
            config.importance_sampling,
            config.fast_logprobs,
            sharing,
            partial(make_group_sampler, config, curriculum),
        )
        trainer = ReplGRPOTrainer(policy, tokenizer, task_ids, source, args, credit, components)
        trainer.vllm_generation.fallback = fallback
        # Without a folder, there is no checkpoint that could complete a saved model.
        base = model if isinstance(model, Path) else None
        states = keeper.folder if keeper is not None else None
        evaluator = PeriodicEvaluator(trainer, evaluation, out, base, states) if evaluation else None
        reporter = _attach_reporter(trainer, on_step, out.parent, evaluator)
        # Every part with state is saved and restored with the run.
        if keeper is not None:
            trainer_parts = {"groups": trainer.group_sampler, "evaluator": evaluator, "reporter": reporter}
            run_parts = {"source": source, "curriculum": curriculum, "sharing": sharing}
            trainer.attach_checkpoints(keeper, {**run_parts, **trainer_parts}, tell)
        trainer.train_or_resume()
        if evaluator is not None:
            evaluator.remove_superseded()
    return _save_final_model(trainer, out, config.lora_rank > 0, base)


def load_model(folder: Path, config: TrainerConfig) -> PreTrainedModel:
    """Load the policy to train: trained weights are float32; weights frozen under adapters are `config.dtype`.

    Raises:
        ConfigError: there is no loadable model, or config.json ties embeddings that the checkpoint does not tie.
    """
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), "there is no such folder")
    model_config = read_config(folder)
    dtype, attention = loaded_dtype(config), choose_attention(*resolve_causal_class(model_config))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, config=model_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError("model folder", str(folder), f"it cannot be loaded: {error}") from error
    # transformers keeps a separate output layer of a checkpoint, even if config.json ties it to the embeddings.
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.get_text_config().tie_word_embeddings and head is not None and head.weight is not embeddings.weight:
        remedy = "but the checkpoint has a separate output layer; set it to false in config.json"
        raise ConfigError("tie_word_embeddings", True, remedy)
    return model


def prepare_trainable_model(model: PreTrainedModel, config: TrainerConfig, seed: int) -> PreTrainedModel:
    """Return `model` with its trained weights in float32: adapters drawn from `seed`, or else all weights."""
    if config.lora_rank:
        return add_adapters(model, config.lora_rank, seed)
    return model if model.dtype == torch.float32 else model.float()


def build_credit_config(config: TrainerConfig, tasks: Mapping[str, object] = MappingProxyType({})) -> CreditConfig:
    """Return the credit assignment of `config`; `tasks`, by id, are for reward functions that take a task.

    Raises:
        ConfigError: an estimator or a reward function cannot be found, or an option has no effect.
    """
    potential = None
    if config.potential:
        potential = Potential(load_line_reward(config.potential, tasks), get_discount(config.estimator))
    return CreditConfig(
        load_estimator(config.estimator),
        config.rewards,
        tuple(load_line_reward(name, tasks) for name in config.line_rewards),
        potential,
        config.stops if config.stops.mask or config.stops.penalise else None,
        sums_shaping(config.estimator),
        reads_states(config.estimator),
    )


def make_group_sampler(config: TrainerConfig, curriculum: Curriculum | None, trainer: ReplGRPOTrainer) -> GroupSampler:
    """Return the group sampler of these settings; a `curriculum` chooses its tasks.

    Raises:
        ConfigError: the rollout source cannot do what the settings need.
    """
    source, size, accelerator = trainer.source, trainer.num_generations, trainer.accelerator
    options = parse_group_sampling(config.group_sampling)
    # Rollouts of later steps run during the update.
    if config.max_staleness_steps:
        schedule = StalenessSchedule(config.max_staleness_steps, config.steps)
        tasks = UpcomingTasks(trainer.optimizer_steps_per_step, trainer.iterate_upcoming_task_ids)
        window = options if isinstance(options, FifoWindowOptions) else None
        return AsyncGroups(source, size, accelerator, schedule, tasks, curriculum, window)
    # Each step waits for its own rollouts.
    if isinstance(options, DynamicSamplingOptions):
        pool = TaskPool([row["prompt"] for row in trainer.train_dataset], trainer.args.seed)
        stops = trainer.credit.stop_policy
        return DynamicGroupSampler(source, size, accelerator, options, pool, curriculum, stops)
    return GroupSampler(source, size, accelerator, curriculum)


def _attach_reporter(
    trainer: ReplGRPOTrainer, on_step: OnStep, run: Path, evaluator: PeriodicEvaluator | None
) -> StepReporter:
    """Replace transformers' printer by the reporter and the trackers."""
    trainer.remove_callback(PrinterCallback)
    trackers = Trackers(trainer, run)
    reporter = StepReporter(trainer, on_step, trackers, evaluator)
    trainer.add_callback(reporter)
    # Trackers come last, so that they receive the metrics that the reporter adds to TRL's log.
    trackers.attach_callbacks()
    return reporter


def _save_final_model(trainer: ReplGRPOTrainer, out: Path, adapters: bool, base: Path | None) -> Path:
    """Save the trained model to `out/final`; all processes call this together."""
    accelerator = trainer.accelerator
    # Save adapters alone, and merge them into the model.
    if adapters:
        trainer.model = merge_adapters(
            accelerator.unwrap_model(trainer.model), out / "adapter", accelerator.is_main_process
        )
    trainer.save_model(str(out / "final"))
    # Add the parts of the base model that were not trained, such as a vision tower.
    if base is not None and accelerator.is_main_process:
        complete_checkpoint(out / "final", base)
    # Barrier: wait until the main process has written the whole model. A process that exits while gloo's threads work
    # can hang.
    accelerator.wait_for_everyone()
    return out / "final"


def _silence_warnings() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # TRL warns about each rollout without a reward and prints it whole. A failed rollout has no reward on purpose.
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
    disable_progress_bar()


def _warn_about_router(policy: PreTrainedModel, config: TrainerConfig, warn: WarnFn) -> None:
    """Warn if the fast pass leaves out the load balancing loss of a mixture of experts."""
    text = policy.config.get_text_config()
    coefficient = getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0.0
    if config.fast_logprobs and coefficient:
        warn(f"the router's loss (router_aux_loss_coef {coefficient}) is left out; set fast_logprobs = false to add it")
