"""Entry point of training: from a model, tasks and a rollout source to a trained model and one record per step."""

import logging
import os
from collections.abc import Mapping, Sequence
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

from repl_rl.credit.advantages import adds_up, discount_of, estimator
from repl_rl.credit.group import Credit
from repl_rl.credit.rewards import Potential, line_reward
from repl_rl.engine.dropout import disable_dropout
from repl_rl.engine.logits import attention
from repl_rl.engine.names import causal_class, complete, read_config
from repl_rl.engine.options import Dtype
from repl_rl.errors import ConfigError
from repl_rl.machine.foreign_models import make_savable
from repl_rl.machine.launched import processes
from repl_rl.tasks import Curriculum
from repl_rl.trainer import choices
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.evaluations import Evaluation, Evaluator
from repl_rl.trainer.grpo import ReplGRPOTrainer
from repl_rl.trainer.grpo_config import GRPOConfig, grpo_args, loaded_dtype
from repl_rl.trainer.keeper import Keeper
from repl_rl.trainer.lora import adapted, whole
from repl_rl.trainer.reporting import Reporter
from repl_rl.trainer.sharded import load_whole
from repl_rl.trainer.sharing import Sharing
from repl_rl.trainer.sinks import Sinks
from repl_rl.trainer.source import OnStep, RolloutSource, Tasked
from repl_rl.trainer.weights import Tell, size_of, spare_folder, weights_folder

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
    sampled_in: Dtype = "auto",
) -> Path:
    """Train for `config.steps` steps; return `out/final`, the folder of the trained model with its tokenizer.

    `model` is a folder, or a loaded model that is trained in place. Without adapters its weights become float32,
    because bfloat16 is too coarse for the small steps of an optimizer. The text part of a composite model is trained;
    `out/final` is the whole model again if `model` is its folder.

    A `curriculum` chooses the tasks of each step by the outcomes so far. Without one, tasks come in TRL's random
    order, drawn from `seed` (>= 0). Errors of `on_step` and `source` end training and propagate. The warning callback
    receives one line per fallback.

    Checkpoints are `out/checkpoint-<optimizer steps>`, written every `config.save_every` steps and at the last one.
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
    credit = credit_of(config, source.tasks if isinstance(source, Tasked) else {})
    _silence()
    load_whole()
    if processes() > 1 and not torch.accelerator.is_available():
        # Without this, accelerate takes each process for the only one.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    args = grpo_args(config, out, processes(), seed)
    policy = load_model(model, config) if isinstance(model, Path) else model
    _tell_router(policy, config, tell)
    make_savable(policy)
    disable_dropout(policy)
    policy = learning(policy, config, seed)
    # Async rollouts alternate between two folders of weights.
    room = size_of(policy) * (2 if config.ahead else 1)
    with weights_folder(room, tell) as weights, spare_folder(weights, tell) as spare:
        sharing = Sharing(tell) if config.shared_prefixes == "auto" else None
        tolerance = config.tolerance(sampled_in)
        trainer = _trainer(
            policy, tokenizer, task_ids, source, config, credit, args, weights, curriculum, sharing, tolerance
        )
        trainer.vllm_generation.spare = spare
        base = model if isinstance(model, Path) else None
        states = keeper.folder if keeper is not None else None
        evaluator = Evaluator(trainer, evaluation, out, base, states) if evaluation else None
        reporter = _report(trainer, on_step, out.parent, evaluator)
        if keeper is not None:
            own = {"groups": trainer.groups, "evaluator": evaluator, "reporter": reporter}
            theirs = {"source": source, "curriculum": curriculum, "sharing": trainer.sharing}
            trainer.keep(keeper, {**theirs, **own}, tell)
        trainer.go_on()
        if evaluator is not None:
            evaluator.finish()
    return _save(trainer, out, config.lora_rank > 0, base)


def _trainer(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task_ids: Sequence[str],
    source: RolloutSource,
    config: TrainerConfig,
    credit: Credit,
    args: GRPOConfig,
    weights: Path,
    curriculum: Curriculum | None,
    sharing: Sharing | None,
    tolerance: float,
) -> ReplGRPOTrainer:
    return ReplGRPOTrainer(
        model=policy,
        tokenizer=tokenizer,
        task_ids=task_ids,
        source=source,
        args=args,
        credit=credit,
        tolerance=tolerance,
        weights=weights,
        fast=config.fast,
        importance=config.importance,
        curriculum=curriculum,
        plan=choices.groups(config.groups),
        sharing=sharing,
        ahead=config.ahead,
    )


def _silence() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # TRL warns about each rollout without a reward and prints it whole. A failed rollout has no reward on purpose.
    logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)
    disable_progress_bar()


def _report(trainer: ReplGRPOTrainer, on_step: OnStep, run: Path, evaluator: Evaluator | None) -> Reporter:
    trainer.remove_callback(PrinterCallback)
    sinks = Sinks(trainer, run)
    reporter = Reporter(trainer, on_step, sinks, evaluator)
    trainer.add_callback(reporter)
    # Trackers come last, so that they receive the metrics that the reporter adds to TRL's log.
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
    # Barrier: wait until the main process has written the whole model. A process that exits while gloo's threads work
    # can hang.
    accelerator.wait_for_everyone()
    return out / "final"


def credit_of(config: TrainerConfig, tasks: Mapping[str, object] = MappingProxyType({})) -> Credit:
    """Return the credit assignment of `config`; `tasks`, by id, are for reward functions that take a task.

    Raises:
        ConfigError: an estimator or a reward function cannot be found, or an option has no effect.
    """
    potential = None
    if config.potential:
        potential = Potential(line_reward(config.potential, tasks), discount_of(config.estimator))
    return Credit(
        estimator(config.estimator),
        config.rewards,
        tuple(line_reward(name, tasks) for name in config.line_rewards),
        potential,
        config.fade_steps,
        config.stops,
        adds_up(config.estimator),
    )


def learning(model: PreTrainedModel, config: TrainerConfig, seed: int) -> PreTrainedModel:
    """Return `model` with its trained weights in float32: adapters drawn from `seed`, or else all weights."""
    if config.lora_rank:
        return adapted(model, config.lora_rank, seed)
    return model if model.dtype == torch.float32 else model.float()


def load_model(folder: Path, config: TrainerConfig) -> PreTrainedModel:
    """Load the policy to train: trained weights are float32; weights frozen under adapters are `config.dtype`.

    Raises:
        ConfigError: there is no loadable model, or config.json ties embeddings that the checkpoint does not tie.
    """
    if not folder.is_dir():
        raise ConfigError("model folder", str(folder), "there is no such folder")
    found = read_config(folder)
    dtype, how = loaded_dtype(config), attention(*causal_class(found))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, config=found, dtype=dtype, attn_implementation=how, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError("model folder", str(folder), f"it cannot be loaded: {error}") from error
    # transformers keeps a separate output layer of a checkpoint, even if config.json ties it to the embeddings.
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.get_text_config().tie_word_embeddings and head is not None and head.weight is not words.weight:
        remedy = "yet the checkpoint has an output layer of its own; set it to false in config.json"
        raise ConfigError("tie_word_embeddings", True, remedy)
    return model
