"""What a training run can be told, and what it becomes in TRL's own configuration."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from transformers.utils import is_torch_bf16_gpu_available

from repl_rl.credit.advantages import uses_line_rewards
from repl_rl.credit.rewards import RewardTable
from repl_rl.credit.stops import StopPolicy
from repl_rl.engine.options import Dtype
from repl_rl.engine.variables import hush
from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast, check_fields
from repl_rl.settings.pretrained import DTYPE, Pretrained, format_default
from repl_rl.trainer import choices
from repl_rl.trainer.apart import corrections, importance, refuse_stale
from repl_rl.trainer.lora import require_peft
from repl_rl.trainer.sinks import require_sinks

hush()  # TRL imports vLLM
with warnings.catch_warnings():
    # TRL judges the version of a vLLM that it will not use here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from trl import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "TrainerConfig", "refuse_few", "refuse_unfit"]

MAX_GRAD_NORM = 1.0
"""Gradients are scaled down to this norm: TRL's and transformers' default."""


_RATE, _RATE_OF_ADAPTERS = 1e-6, 1e-5
"""Of pretrained models. 1e-6 is where docs/howto.md had users begin, TRL's default, and what verl's examples take.
Adapters want about ten times that: "LoRA Without Regret" (Schulman et al., 2025), and TRL's runs of it."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of the update. Rollouts are always sampled at temperature 1.

    A step is a batch of rollouts and all that is learned from it: `updates` times `mini_batches` optimizer steps.
    The defaults are the bundled policy's. On the command line those that say so are others for any other model:
    micro-batches, number format and checkpointing are those that docs/howto.md named for a GPU, the warm-up is the
    eighth of a default run, as the measured run of docs/pretrained.md had a sixth.
    """

    steps: Annotated[int, AtLeast(1)] = 80
    """Batches of rollouts to learn from, >= 1."""
    prompts_per_step: Annotated[int, AtLeast(1)] = 12
    """Tasks in a step, >= 1, over all processes."""
    group_size: Annotated[int, AtLeast(2, "a group needs at least 2 rollouts to have an advantage")] = 8
    """Rollouts of each task, >= 2."""
    updates: Annotated[int, AtLeast(1)] = 1
    """Passes over the rollouts of a step, >= 1. From the second on the policy is not the one that sampled, and the loss
    clips."""
    mini_batches: Annotated[int, AtLeast(1)] = 1
    """Parts that the rollouts of a step are drawn into at random, >= 1; each pass makes an optimizer step of each."""
    micro_batch: Annotated[int, AtLeast(0), Pretrained.part(8)] = 0
    """Rollouts in one forward pass of one process, a divisor of its share of a mini-batch; 0: all of them at once."""
    learning_rate: Annotated[
        float,
        Above(0),
        Pretrained(
            f"{format_default(_RATE)}, with lora_rank {format_default(_RATE_OF_ADAPTERS)}",
            lambda facts: _RATE_OF_ADAPTERS if facts.adapters else _RATE,
        ),
    ] = 5e-4
    """Peak learning rate, > 0."""
    warmup_steps: Annotated[int, AtLeast(0), Pretrained.of(10)] = 5
    """Steps over which the learning rate rises to its peak, >= 0; `schedule` says how it goes on."""
    optimizer: str = "adamw_torch_fused"
    """Name of transformers for the optimizer, with options: "adamw_torch_fused(beta1=0.9, beta2=0.95, eps=1e-8,
    weight_decay=0.0)" is the default, spelled out."""
    schedule: str = "linear"
    """Name of transformers for the schedule, with options, such as "cosine_with_min_lr(min_lr_rate=0.1)"; what they
    count in steps are optimizer steps."""
    loss: str = "dapo"
    """TRL's name of the loss, with options: "dapo(clip_low=0.2, clip_high=0.28)", so grpo, bnpo, dr_grpo;
    "cispo(clip_high=5.0)"; "sapo(temperature_pos=1.0, temperature_neg=1.05)"."""
    kl: str = ""
    """Distance to the policy that training began with, added to the loss: "k3(beta=0.04)" or "unbiased(beta=0.04)";
    "": none."""
    importance: str = "token_truncate"
    """What is done about sampler and trainer being apart: "token_truncate(cap=2.0)" cuts the ratio of each token to
    cap, "token_mask" leaves its token out, "token_band(low=0.5, cap=2.0)" below low too. Without `ahead`, "line_..."
    and "sequence_..." take the geometric mean of a line's or a rollout's tokens, and "none" corrects nothing. With
    "token_truncate(tolerance=1e-3)", a log probability further off, nats, that the policy of now wrote stops the run;
    the default is 1e-3 where both compute in float32, else 1.0: the rounding of bfloat16 alone moves single tokens by
    tenths of a nat."""
    ahead: Annotated[int, AtLeast(0)] = 0
    """Steps whose rollouts go on while the policy is updated, >= 0; 0: rollouts and update take turns. New weights are
    taken over between two lines, so a line is at most so many steps older than the policy that learns from it."""
    groups: str = ""
    """Which groups a step is made of: "refill(most=2)" plays others in the place of those whose outcomes are all
    equal, so many times at most; with `ahead`, "window(share=0.3)" takes those that are done first of that share of the
    groups under way; "": each is played once."""
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
    fast: bool = True
    """Score only sampled tokens, once a step where that suffices; false: TRL's own passes, equal to it bit for bit."""
    shared_prefixes: Literal["auto", "off"] = "auto"
    """What rollouts begin with alike passes through the model once where that saves enough; "off": each has its own.
    Only with `fast`."""
    dtype: Annotated[Literal["float32", "bfloat16"], DTYPE] = "float32"
    """Number format that is computed in. What is trained is float32 in any case, as is its optimizer; weights that
    adapters leave as they are have this one."""
    checkpointing: Annotated[bool, Pretrained("on, on a GPU", lambda facts: facts.gpu() or None)] = False
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
        refuse_stale(self.ahead, self.importance, self.groups)
        self._chosen()
        self.share(1)  # what one process cannot share, several cannot

    @property
    def importance_cap(self) -> float:
        """Largest ratio of trainer to sampler that is kept as it is, >= 1."""
        return importance(self.importance)[1].cap

    def tolerance(self, sampled_in: Dtype = "auto") -> float:
        """Largest allowed gap of one log probability between this trainer and a sampler in that number format, nats."""
        return importance(self.importance)[1].allowed(self.dtype, sampled_in)

    def rows(self, processes: int = 1) -> int:
        """Rollouts of an optimizer step in one process, >= 1; `share` refuses those that cannot be shared evenly."""
        return max(1, self.prompts_per_step * self.group_size // processes // self.mini_batches)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * self.optimizer_steps_per_step

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps that are made of one batch of rollouts."""
        return self.updates * self.mini_batches

    @property
    def loaded_dtype(self) -> torch.dtype:
        """Number format of the weights in memory: float32 where they are trained, `dtype` where adapters are."""
        return torch.bfloat16 if self.lora_rank and self.dtype == "bfloat16" else torch.float32

    def check_machine(self) -> None:
        """Refuse what this machine cannot do.

        Raises:
            ConfigError: it cannot compute in `dtype`.
        """
        on_cpu = not torch.accelerator.is_available()
        if self.dtype == "bfloat16" and not (on_cpu or is_torch_bf16_gpu_available()):
            raise ConfigError("dtype", self.dtype, "this GPU does not compute in it; leave it at float32")

    def share(self, processes: int) -> tuple[int, int]:
        """Rollouts in one forward pass of one process, and passes that make an optimizer step.

        Raises:
            ConfigError: the rollouts of a step cannot be shared evenly.
        """
        rollouts = self.prompts_per_step * self.group_size
        share = f"each process's share of {rollouts} rollouts a step over {processes} processes"
        if rollouts % processes:
            remedy = f"{processes} processes must share them evenly; change prompts_per_step or group_size"
            raise ConfigError("rollouts a step", rollouts, remedy)
        if rollouts // processes % self.mini_batches:
            raise ConfigError("mini_batches", self.mini_batches, f"it must divide {share}")
        part = rollouts // processes // self.mini_batches
        micro_batch = self.micro_batch or part
        if part % micro_batch:
            raise ConfigError(
                "micro_batch", micro_batch, f"it must divide each of {self.mini_batches} parts of {share}"
            )
        return micro_batch, part // micro_batch

    def _chosen(self) -> choices.Arguments:
        """What is chosen by name.

        Raises:
            ConfigError: there is no such choice or option.
        """
        warmup = self.warmup_steps * self.optimizer_steps_per_step
        return {
            **corrections(self.importance),
            **choices.loss(self.loss),
            **choices.kl(self.kl),
            **choices.optimizer(self.optimizer),
            **choices.schedule(self.schedule, self.learning_rate, warmup, self.optimizer_steps),
        }

    def grpo_args(self, out: Path, processes: int = 1, seed: int = 0) -> GRPOConfig:
        """TRL's configuration for this one; checkpoints go to `out`, `seed` orders the tasks.

        Raises:
            ConfigError: the rollouts of a step cannot be shared evenly, or this machine cannot compute in `dtype`.
        """
        self.check_machine()
        low, on_cpu = self.dtype == "bfloat16", not torch.accelerator.is_available()
        micro_batch, passes = self.share(processes)
        a_step = self.optimizer_steps_per_step
        return GRPOConfig(
            output_dir=str(out),
            max_steps=self.optimizer_steps,
            num_generations=self.group_size,
            num_iterations=self.updates,
            steps_per_generation=passes * self.mini_batches,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=passes,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps * a_step,
            max_grad_norm=MAX_GRAD_NORM,
            # The fast pass has no router's logits; None is what the model's configuration says.
            router_aux_loss_coef=0.0 if self.fast else None,
            **self._chosen(),
            temperature=1.0,
            bf16=low,
            use_cpu=low and on_cpu,
            gradient_checkpointing=self.checkpointing,
            disable_dropout=True,
            seed=seed,
            save_strategy="steps" if self.save_every else "no",
            save_steps=(self.save_every or 1) * a_step,
            logging_steps=a_step,
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
    if args.loss_type not in choices.LOSSES:
        remedy = f"choose one of {', '.join(choices.LOSSES)}: they take one advantage a token"
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
        "sync_ref_model": (False, "the reference is the policy that training began with"),
    }
    for name, (fit, why) in unfit.items():
        if getattr(args, name) != fit:
            raise ConfigError(name, getattr(args, name), f"leave it at {fit!r}: {why}")
    whole_batch = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
    for name, neutral in whole_batch.items():
        if fast and getattr(args, name) != neutral:
            raise ConfigError(name, getattr(args, name), "it needs rows without an advantage too; set fast = false")


def refuse_few(task_ids: Sequence[str], args: GRPOConfig) -> None:
    """Refuse fewer tasks than a step takes.

    Raises:
        ConfigError: there are.
    """
    needed = args.generation_batch_size // args.num_generations
    if len(task_ids) < needed:
        raise ConfigError("tasks", len(task_ids), f"a step takes {needed} different tasks; give more, or lower it")
