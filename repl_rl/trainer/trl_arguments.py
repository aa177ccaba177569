"""Translation of the training settings into TRL's configuration and the credit assignment; checks of TRL's options."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from transformers.utils import is_torch_bf16_gpu_available

from repl_rl.credit.advantage_estimators import get_discount, load_estimator, reads_states, sums_shaping
from repl_rl.credit.rewards import CreditConfig, build_potential, load_line_reward
from repl_rl.engine.vllm_subprocess import set_vllm_log_level
from repl_rl.errors import ConfigError
from repl_rl.trainer.config import LOSSES, TrainerConfig
from repl_rl.utils.import_trl import importing_trl

set_vllm_log_level()  # TRL may import vLLM
with warnings.catch_warnings(), importing_trl():
    # TRL warns about the version of a vLLM that it does not use here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from trl import GRPOConfig, GRPOTrainer

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "build_credit_config",
    "check_machine",
    "grpo_args",
    "loaded_dtype",
    "validate_task_count",
    "validate_trl_options",
]

MAX_GRAD_NORM = 1.0
"""Largest gradient norm; larger gradients are scaled down to it. Default of TRL and transformers."""


def loaded_dtype(config: TrainerConfig) -> torch.dtype:
    """Return the number format of the weights in memory: `dtype` if adapters are trained, else float32."""
    return torch.bfloat16 if config.lora_rank and config.dtype == "bfloat16" else torch.float32


def check_machine(config: TrainerConfig) -> None:
    """Check that this machine can compute in `dtype`.

    Raises:
        ConfigError: it cannot.
    """
    on_cpu = not torch.accelerator.is_available()
    if config.dtype == "bfloat16" and not (on_cpu or is_torch_bf16_gpu_available()):
        raise ConfigError("dtype", config.dtype, "this GPU does not compute in it; leave it at float32")


def grpo_args(config: TrainerConfig, out: Path, processes: int = 1, seed: int = 0) -> GRPOConfig:
    """Return TRL's configuration for these settings; checkpoints go to `out`, and `seed` orders the tasks.

    Raises:
        ConfigError: the rollouts of a step cannot be divided evenly, or this machine cannot compute in `dtype`.
    """
    check_machine(config)
    low_precision, on_cpu = config.dtype == "bfloat16", not torch.accelerator.is_available()
    micro_batch, passes = config.compute_batch_shape(processes)
    # TRL counts warm-up, logging and saving in optimizer steps.
    per_step = config.optimizer_steps_per_step
    return GRPOConfig(
        output_dir=str(out),
        max_steps=config.optimizer_steps,
        num_generations=config.group_size,
        num_iterations=config.num_iterations,
        steps_per_generation=passes * config.num_mini_batches,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=passes,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps * per_step,
        max_grad_norm=MAX_GRAD_NORM,
        # The fast pass computes no router logits. None keeps the coefficient of the model's configuration.
        router_aux_loss_coef=0.0 if config.fast_logprobs else None,
        **config.build_named_args(),
        temperature=1.0,
        bf16=low_precision,
        use_cpu=low_precision and on_cpu,
        gradient_checkpointing=config.gradient_checkpointing,
        disable_dropout=True,
        seed=seed,
        save_strategy="steps" if config.save_steps else "no",
        save_steps=(config.save_steps or 1) * per_step,
        logging_steps=per_step,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=list(config.report_to) or "none",
        project="repl_rl",
        run_name=out.resolve().parent.name,
        disable_tqdm=True,
        log_level="error",
    )


def validate_trl_options(args: GRPOConfig, fast: bool) -> None:
    """Refuse TRL options that do not work with one advantage per token, or that our rollouts make meaningless.

    Raises:
        ConfigError: the first such option.
    """
    if args.loss_type not in LOSSES:
        remedy = f"choose one of {', '.join(LOSSES)}: they take one advantage per token"
        raise ConfigError("loss_type", args.loss_type, remedy)
    # Each option has one accepted value, and a reason for it.
    required_values = {
        "off_policy_mask_threshold": (None, "with one advantage per token it would mask single tokens, not sequences"),
        "mask_truncated_completions": (False, "it guesses from the last id, but a trajectory records its `stop`"),
        "use_vllm": (False, "the engine belongs to the rollout source"),
        "vllm_importance_sampling_correction": (True, "the check of each weight sync needs both log probabilities"),
        "scale_rewards": ("group", "the estimator normalises; choose another estimator"),
        "temperature": (1.0, "the engine's log probabilities are those of temperature 1"),
        "top_p": (1.0, "a cut distribution has other log probabilities"),
        "top_k": (0, "a cut distribution has other log probabilities"),
        "min_p": (None, "a cut distribution has other log probabilities"),
        "repetition_penalty": (1.0, "a penalised distribution has other log probabilities"),
        "sync_ref_model": (False, "the reference is the policy that training began with"),
    }
    for name, (required, reason) in required_values.items():
        if getattr(args, name) != required:
            raise ConfigError(name, getattr(args, name), f"leave it at {required!r}: {reason}")
    # The fast pass skips rows without an advantage, but these options need the entropies of all rows.
    needs_all_rows = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
    for name, neutral in needs_all_rows.items():
        if fast and getattr(args, name) != neutral:
            raise ConfigError(
                name, getattr(args, name), "it needs rows without an advantage too; set fast_logprobs = false"
            )


def validate_task_count(task_ids: Sequence[str], args: GRPOConfig) -> None:
    """Refuse fewer tasks than a step needs.

    Raises:
        ConfigError: `task_ids` has fewer.
    """
    task_count = args.generation_batch_size // args.num_generations
    if len(task_ids) < task_count:
        raise ConfigError(
            "tasks",
            len(task_ids),
            f"a step takes {task_count} different tasks; give more tasks, or lower prompts_per_step",
        )


def build_credit_config(config: TrainerConfig, tasks: Mapping[str, object] = MappingProxyType({})) -> CreditConfig:
    """Return the credit assignment of `config`; `tasks`, by id, are for reward functions that take a task.

    Raises:
        ConfigError: an estimator or a reward function cannot be found, or an option has no effect.
    """
    potentials = [load_line_reward(name, tasks, weight) for name, weight in config.potentials.items()]
    return CreditConfig(
        load_estimator(config.estimator),
        config.rewards,
        tuple(load_line_reward(name, tasks, weight) for name, weight in config.line_rewards.items()),
        build_potential(potentials, get_discount(config.estimator)) if potentials else None,
        config.stops if config.stops.mask or config.stops.penalise else None,
        sums_shaping(config.estimator),
        reads_states(config.estimator),
    )
