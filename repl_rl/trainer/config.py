"""What a training run can be told, and what it becomes in TRL's own configuration."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
from transformers.utils import is_torch_bf16_gpu_available

from repl_rl.credit.advantages import uses_line_rewards
from repl_rl.credit.rewards import RewardTable
from repl_rl.credit.stops import StopPolicy
from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast, check_fields
from repl_rl.trainer.lora import require_peft
from repl_rl.trainer.sinks import require_sinks

with warnings.catch_warnings():
    # TRL judges the version of a vLLM that it will not use here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from trl import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainerConfig", "refuse_unfit"]

Importance = Literal["token_truncate", "token_mask", "line_truncate", "line_mask", "sequence_truncate", "sequence_mask"]

Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
"""TRL losses that survive advantages of shape (B, T). `luspo` and `vespo` weigh whole sequences, so they do not."""

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""The ratio to the sampling policy is clipped outside of [1 - low, 1 + high]: DAPO's values (arXiv 2503.14476). A step
is one update of fresh rollouts, whose ratios are 1, so that they hardly ever bind."""
MAX_GRAD_NORM = 1.0
"""Gradients are scaled down to this norm: TRL's and transformers' default."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of the update. Rollouts are always sampled at temperature 1."""

    steps: Annotated[int, AtLeast(1)] = 100
    """Optimizer steps, >= 1."""
    prompts_per_step: Annotated[int, AtLeast(1)] = 12
    """Tasks in a step, >= 1, over all processes."""
    group_size: Annotated[int, AtLeast(2, "a group needs at least 2 rollouts to have an advantage")] = 8
    """Rollouts of each task, >= 2."""
    micro_batch: Annotated[int, AtLeast(0)] = 0
    """Rollouts in one forward pass of one process, a divisor of its share of the step; 0: all of them at once."""
    learning_rate: Annotated[float, Above(0)] = 5e-4
    """Peak learning rate of AdamW, > 0."""
    warmup_steps: Annotated[int, AtLeast(0)] = 5
    """Steps over which the learning rate rises to its peak, >= 0; from there it falls to 0 along a line."""
    loss: Loss = "dapo"
    """TRL's name of the loss. Others weigh whole sequences, so they do not survive advantages of shape (B, T)."""
    importance: Importance = "token_truncate"
    """Whose ratio of trainer to sampler corrects the loss (a token's, or the geometric mean of a line's or a whole
    sequence's tokens), and what happens above `importance_cap`: it is cut to it, or its tokens are masked."""
    importance_cap: Annotated[float, AtLeast(1)] = 2.0
    """Largest ratio of trainer to sampler that is kept as it is, >= 1."""
    estimator: str = "two_stream"
    """Line rewards to advantages: a name of `repl_rl.credit.advantages`, or module:function; options in parentheses,
    such as "two_stream(line_weight=0.5)"."""
    rewards: RewardTable = field(default_factory=RewardTable)
    """What a line earns for each status."""
    line_rewards: tuple[str, ...] = ()
    """Functions of yours, module:function or module:function=weight, from a trajectory to one more reward a line."""
    potential: str = ""
    """A function like those, from a trajectory to how promising the console is before each line, such as
    repl_rl.credit.rewards:broken=0.1; only its differences are paid, so it cannot be farmed. Empty: none."""
    fade_steps: Annotated[int, AtLeast(0)] = 0
    """Steps over which line rewards fade to nothing, >= 0; 0: they stay."""
    stops: StopPolicy = field(default_factory=StopPolicy)
    """What the way in which a rollout ended means for learning."""
    logprob_tolerance: Annotated[float | None, Above(0)] = None
    """Largest gap of one log probability between sampler and trainer, nats, > 0; None: 1e-3 in float32, 1.0 in
    bfloat16, whose own rounding moves single tokens by tenths of a nat."""
    fast: bool = True
    """Score only sampled tokens, once a step where that suffices; false: TRL's own passes, equal to it bit for bit."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in training."""
    checkpointing: bool = False
    """Compute activations again for the gradient instead of keeping them: less memory, more time."""
    lora_rank: Annotated[int, AtLeast(0)] = 0
    """Rank, >= 1, of low-rank adapters (PEFT) that are trained in place of the weights; 0: none."""
    save_every: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints of weights (or adapters) and optimizer, >= 0, one more at the end; 0: none."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where figures and a table of rollouts go besides the run folder, each step; none: nowhere."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer")
        unused = {"line_rewards": self.line_rewards, "potential": self.potential, "fade_steps": self.fade_steps}
        for name, value in unused.items():
            if value and not uses_line_rewards(self.estimator):
                raise ConfigError(
                    f"{name} with estimator 'outcome'", value, "that one ignores line rewards; leave it out"
                )
        if self.lora_rank:
            require_peft(self.lora_rank)
        require_sinks(self.report_to)

    @property
    def tolerance(self) -> float:
        """Largest allowed gap of one log probability between sampler and trainer, nats."""
        if self.logprob_tolerance is not None:
            return self.logprob_tolerance
        return 1e-3 if self.dtype == "float32" else 1.0

    def grpo_args(self, out: Path, processes: int = 1, seed: int = 0) -> GRPOConfig:
        """TRL's configuration for this one; checkpoints go to `out`, `seed` orders the tasks.

        Raises:
            ConfigError: the rollouts of a step cannot be shared evenly, or this machine cannot compute in `dtype`.
        """
        if self.dtype == "bfloat16" and not is_torch_bf16_gpu_available():
            raise ConfigError("dtype", self.dtype, "it needs a GPU that computes in it; leave it at float32")
        rollouts = self.prompts_per_step * self.group_size
        micro_batch = self.micro_batch or rollouts // processes
        if rollouts % processes or (rollouts // processes) % micro_batch:
            share = f"{rollouts} rollouts a step over {processes} processes"
            raise ConfigError("micro_batch", micro_batch, f"it must divide each process's share of {share}")
        return GRPOConfig(
            output_dir=str(out),
            max_steps=self.steps,
            num_generations=self.group_size,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rollouts // processes // micro_batch,
            learning_rate=self.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=self.warmup_steps,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            # The fast pass has no router's logits; None is what the model's configuration says.
            router_aux_loss_coef=0.0 if self.fast else None,
            loss_type=self.loss,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            beta=0.0,
            temperature=1.0,
            vllm_importance_sampling_mode=self.importance if self.importance.startswith("token") else "token_truncate",
            vllm_importance_sampling_clip_max=self.importance_cap,
            bf16=self.dtype == "bfloat16",
            gradient_checkpointing=self.checkpointing,
            disable_dropout=True,
            seed=seed,
            save_strategy="steps" if self.save_every else "no",
            save_steps=self.save_every or 1,
            logging_steps=1,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=list(self.report_to) or "none",
            project="repl_rl",
            run_name=out.resolve().parent.name,
            disable_tqdm=True,
            log_level="error",
        )


def refuse_unfit(args: GRPOConfig, fast: bool) -> None:
    """Refuse TRL options that do not survive one advantage a token, or that our rollouts make meaningless.

    Raises:
        ConfigError: the first such option.
    """
    losses = get_args(Loss)
    if args.loss_type not in losses:
        remedy = f"choose one of {', '.join(losses)}: they take one advantage a token"
        raise ConfigError("loss_type", args.loss_type, remedy)
    unfit = {
        "off_policy_mask_threshold": (None, "with advantages a token it would mask single tokens, not sequences"),
        "mask_truncated_completions": (False, "it guesses from the last id; a trajectory's `stop` says it"),
        "use_vllm": (False, "the engine belongs to the rollout source"),
        "vllm_importance_sampling_correction": (True, "the check of each weight sync needs both log probabilities"),
        "scale_rewards": ("group", "the estimator normalises; choose another estimator"),
        "temperature": (1.0, "the engine's log probabilities are those of temperature 1"),
        "top_p": (1.0, "a cut distribution has other log probabilities"),
        "top_k": (0, "a cut distribution has other log probabilities"),
        "min_p": (None, "a cut distribution has other log probabilities"),
        "repetition_penalty": (1.0, "a bent distribution has other log probabilities"),
    }
    for name, (fit, why) in unfit.items():
        if getattr(args, name) != fit:
            raise ConfigError(name, getattr(args, name), f"leave it at {fit!r}: {why}")
    whole_batch = {"beta": 0.0, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
    for name, neutral in whole_batch.items():
        if fast and getattr(args, name) != neutral:
            raise ConfigError(name, getattr(args, name), "it needs rows without an advantage too; set fast = false")
