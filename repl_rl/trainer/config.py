"""Training settings."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from repl_rl.credit.advantages import uses_line_rewards
from repl_rl.credit.rewards import RewardTable
from repl_rl.credit.stops import StopPolicy
from repl_rl.engine.options import Dtype
from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast, check_fields
from repl_rl.settings.pretrained import DTYPE, Pretrained, format_default
from repl_rl.trainer import choices
from repl_rl.trainer.apart import corrections, importance, refuse_stale
from repl_rl.trainer.packages import require_peft, require_sinks

_RATE, _RATE_OF_ADAPTERS = 1e-6, 1e-5
"""Learning rates of pretrained models: of all weights, and of adapters. 1e-6 is TRL's default and the value of verl's
examples. Adapters need about ten times that: "LoRA Without Regret" (Schulman et al., 2025), and TRL's runs of it."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of the update. Rollouts are always sampled at temperature 1.

    A step is a batch of rollouts and all updates that use it: `updates` times `mini_batches` optimizer steps.
    The defaults suit the bundled policy. On the command line, some settings have another default for any other model.
    Micro-batch, number format and checkpointing then have values for a GPU. The warm-up is an eighth of a default run;
    the measured run of docs/pretrained.md used a sixth.
    """

    steps: Annotated[int, AtLeast(1)] = 80
    """Steps of the run, >= 1; each step trains on one batch of rollouts."""
    prompts_per_step: Annotated[int, AtLeast(1)] = 12
    """Tasks per step, >= 1, over all processes."""
    group_size: Annotated[int, AtLeast(2, "a group needs at least 2 rollouts to have an advantage")] = 8
    """Rollouts per task, >= 2."""
    updates: Annotated[int, AtLeast(1)] = 1
    """Passes over the rollouts of a step, >= 1. From the second pass on, the policy differs from the one that sampled,
    and the loss clips."""
    mini_batches: Annotated[int, AtLeast(1)] = 1
    """Mini-batches per step, >= 1, drawn at random; each pass makes one optimizer step per mini-batch."""
    micro_batch: Annotated[int, AtLeast(0), Pretrained.part(8)] = 0
    """Rollouts per forward pass of one process, a divisor of its share of a mini-batch; 0 takes all of them at once."""
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
    """Steps over which the learning rate rises to its peak, >= 0; then it follows `schedule`."""
    optimizer: str = "adamw_torch_fused"
    """Optimizer by its transformers name, with options. The default in full is "adamw_torch_fused(beta1=0.9,
    beta2=0.95, eps=1e-8, weight_decay=0.0)"."""
    schedule: str = "linear"
    """Learning rate schedule by its transformers name, with options, such as "cosine_with_min_lr(min_lr_rate=0.1)".
    Options in steps count optimizer steps."""
    loss: str = "dapo"
    """Loss by its TRL name, with options: "dapo(clip_low=0.2, clip_high=0.28)", also grpo, bnpo and dr_grpo;
    "cispo(clip_high=5.0)"; "sapo(temperature_pos=1.0, temperature_neg=1.05)"."""
    kl: str = ""
    """KL penalty towards the policy that training began with: "k3(beta=0.04)" or "unbiased(beta=0.04)"; "" disables
    it."""
    importance: str = "token_truncate"
    """Correction of the logprob mismatch between sampler and trainer, by importance sampling ratios.
    "token_truncate(cap=2.0)" cuts the ratio of each token to cap. "token_mask" drops tokens above cap, and
    "token_band(low=0.5, cap=2.0)" also drops those below low. Without `ahead`, "line_..." and "sequence_..." use the
    geometric mean over a line or a rollout, and "none" corrects nothing. A mismatch above tolerance, in nats, at a
    token of the current policy stops the run, as in "token_truncate(tolerance=1e-3)". The default tolerance is 1e-3 if
    both compute in float32, else 1.0, because rounding in bfloat16 alone moves single tokens by tenths of a nat."""
    ahead: Annotated[int, AtLeast(0)] = 0
    """Steps whose rollouts run while the policy is updated, >= 0; 0 alternates rollouts and update. The engine loads
    new weights between two lines. So a line is at most this many steps older than the policy that trains on it, unless
    `groups` is a window."""
    groups: str = ""
    """Group sampling. "refill(most=2)" is dynamic sampling: it replaces groups whose outcomes are all equal, in at most
    that many rounds. With `ahead`, "window(share=0.3)" takes the groups that finish first, among that share of the
    groups in flight. "" samples each group once."""
    estimator: str = "two_stream"
    """Estimator from line rewards to advantages: a name of `repl_rl.credit.advantages`, or module:function; options in
    parentheses, such as "two_stream(line_weight=0.5)"."""
    rewards: RewardTable = field(default_factory=RewardTable)
    """Reward of a line by its status."""
    line_rewards: tuple[str, ...] = ()
    """Your reward functions, module:function or module:function=weight; each adds one reward per line of a
    trajectory."""
    potential: str = ""
    """Potential: a function like those, which scores how promising the console is before each line, such as
    repl_rl.credit.rewards:broken=0.1. Only its differences are paid, so it cannot be farmed. Empty disables it."""
    fade_steps: Annotated[int, AtLeast(0)] = 0
    """Steps over which line rewards fade to 0, >= 0; 0 keeps them."""
    stops: StopPolicy = field(default_factory=StopPolicy)
    """Stops whose rollouts are masked or penalised."""
    fast: bool = True
    """Score only sampled tokens, once per step if that suffices. False uses TRL's own passes, with log probabilities
    that equal TRL's bit for bit."""
    shared_prefixes: Literal["auto", "off"] = "auto"
    """Prefix sharing: the common beginning of rollouts passes through the model once, if that saves enough. "off"
    scores each rollout alone. Only with `fast`."""
    dtype: Annotated[Literal["float32", "bfloat16"], DTYPE] = "float32"
    """Number format of the computation. Trained weights and their optimizer are float32 in any case; weights that
    adapters leave frozen have this format."""
    checkpointing: Annotated[bool, Pretrained("on, on a GPU", lambda facts: facts.gpu() or None)] = False
    """Gradient checkpointing: activations are computed again for the gradient, which takes less memory and more
    time."""
    lora_rank: Annotated[int, AtLeast(0)] = 0
    """Rank, >= 1, of low-rank adapters (PEFT) that are trained in place of the weights; 0 trains the weights."""
    save_every: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints of weights (or adapters) and optimizer, >= 0, with one more at the end; 0 disables
    them."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that get metrics and a table of rollouts after each step, in addition to the run folder."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer")
        # Settings that the chosen estimator would ignore are refused.
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
        # Both raise ConfigError here, before a run starts.
        self.build_named_args()
        self.share(1)  # rollouts that one process cannot divide evenly, several cannot either

    @property
    def importance_cap(self) -> float:
        """Largest importance sampling ratio that is left unchanged, >= 1."""
        return importance(self.importance)[1].cap

    def tolerance(self, sampled_in: Dtype = "auto") -> float:
        """Return the largest allowed difference of one log probability to a sampler in that number format, nats."""
        return importance(self.importance)[1].allowed(self.dtype, sampled_in)

    def rows(self, processes: int = 1) -> int:
        """Return the rollouts per optimizer step in one process, >= 1; `share` refuses an uneven division."""
        return max(1, self.prompts_per_step * self.group_size // processes // self.mini_batches)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * self.optimizer_steps_per_step

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps per batch of rollouts."""
        return self.updates * self.mini_batches

    def share(self, processes: int) -> tuple[int, int]:
        """Return the rollouts per forward pass of one process, and the passes per optimizer step.

        Raises:
            ConfigError: the rollouts of a step cannot be divided evenly.
        """
        # Divide a step by processes, then by mini-batches, then by micro-batches.
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

    def build_named_args(self) -> choices.Arguments:
        """Return TRL's arguments for the settings that are given by name.

        Raises:
            ConfigError: a name or an option is unknown.
        """
        # TRL counts in optimizer steps.
        warmup = self.warmup_steps * self.optimizer_steps_per_step
        return {
            **corrections(self.importance),
            **choices.loss(self.loss),
            **choices.kl(self.kl),
            **choices.optimizer(self.optimizer),
            **choices.schedule(self.schedule, self.learning_rate, warmup, self.optimizer_steps),
        }
