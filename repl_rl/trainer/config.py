"""Training settings: `TrainerConfig`, and the parsers of its components, which have a type and options.

A component is a text here; `repl_rl.settings.component_options` makes it from a table of a file. Examples:

    loss, kl, optimizer     dapo(clip_low=0.1, clip_high=0.2)   k3(beta=0.04)   adamw_torch(weight_decay=0.1)
    importance_sampling     token_truncate(cap=2.0, tolerance=1e-3)   token_band(low=0.5, cap=2.0)   none

Each kind of setting has a table from its names to functions. Parameters of a function are the options of its name. Most
functions return keyword arguments of TRL's `GRPOConfig`. `parse_...` functions raise ConfigError for a bad text.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Literal

from repl_rl.credit.advantage_estimators import get_estimator_options, uses_line_rewards
from repl_rl.credit.rewards import RewardTable
from repl_rl.credit.stop_policy import StopPolicy
from repl_rl.deprecations import keeps_old_names
from repl_rl.deprecations.old_names import OLD_TYPES
from repl_rl.deprecations.removed_settings import refuse_removed_type
from repl_rl.engine.config import Dtype
from repl_rl.errors import ConfigError
from repl_rl.settings.component_options import HasOptions
from repl_rl.settings.component_registry import NameWithOptions, get_options, validate_option_name
from repl_rl.settings.function_tables import WeightTable, read_weight_table
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import DTYPE, PretrainedDefault, format_default
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields
from repl_rl.trainer.optional_packages import require_peft, require_sinks

TrlArguments = dict[str, object]
"""Keyword arguments of TRL's `GRPOConfig`."""
Fraction = Annotated[float, AtLeast(0)]
Positive = Annotated[float, Above(0)]
MomentumValue = Annotated[float, AtLeast(0)]
BetaValue = Annotated[float, Above(0, below=1)]

_RATE, _ADAPTER_RATE = 1e-6, 1e-5
"""Learning rates of pretrained models: of all weights, and of adapters. 1e-6 is TRL's default and the value of verl's
examples. Adapters need about ten times that: "LoRA Without Regret" (Schulman et al., 2025), and TRL's runs of it."""


def _has_options(name: str, get_table: Callable[[], Mapping[str, Callable[..., object]]]) -> HasOptions:
    """Return the annotation marker of the setting `name`; `get_table` returns the table of its component types."""

    def get_component_options(kind: str) -> Mapping[str, object]:
        table = get_table()
        return get_options(table[parse_known_name(f"trainer.{name}", kind, table).name])

    return HasOptions(get_component_options)


@keeps_old_names
@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of the update. Rollouts are always sampled at temperature 1.

    A step is a batch of rollouts and its `num_iterations` times `num_mini_batches` optimizer steps.
    The defaults suit the bundled policy. On the command line, some settings have another default for any other model.
    Sizes, number format and checkpointing then depend on whether there is a GPU. The warm-up is then an eighth of the
    run; the measured run of docs/pretrained.md used a sixth.
    """

    steps: Annotated[int, AtLeast(1), COMMON] = 80
    """Steps of the run, >= 1; each step trains on one batch of rollouts."""
    prompts_per_step: Annotated[int, AtLeast(1), PretrainedDefault.on_cpu(4), COMMON] = 12
    """Tasks per step, >= 1, over all processes."""
    group_size: Annotated[int, AtLeast(2, "a group needs at least 2 rollouts to have an advantage"), COMMON] = 8
    """Rollouts per task, >= 2."""
    num_iterations: Annotated[int, AtLeast(1)] = 1
    """Passes over the rollouts of a step, >= 1. From the second pass on, the policy differs from the one that sampled,
    and the loss clips."""
    num_mini_batches: Annotated[int, AtLeast(1)] = 1
    """Mini-batches per step, >= 1, drawn at random; each pass makes one optimizer step per mini-batch."""
    per_device_batch_size: Annotated[int, AtLeast(0), PretrainedDefault.largest_divisor(8, 2), COMMON] = 0
    """Rollouts per forward pass of one process. It must divide the rollouts per process and mini-batch. 0 puts
    all of these into a single pass."""
    learning_rate: Annotated[
        float,
        Above(0),
        PretrainedDefault(
            f"{format_default(_RATE)}, with lora_rank {format_default(_ADAPTER_RATE)}",
            lambda facts: _ADAPTER_RATE if facts.trains_adapters else _RATE,
        ),
        COMMON,
    ] = 5e-4
    """Peak learning rate, > 0."""
    warmup_steps: Annotated[int, AtLeast(0), PretrainedDefault.eighth_of_run(10)] = 5
    """Steps over which the learning rate rises to its peak, >= 0; then it follows `lr_scheduler`."""
    optimizer: Annotated[str, _has_options("optimizer", lambda: OPTIMIZERS)] = "adamw_torch_fused"
    """Optimizer by its transformers name. Options of the default are beta1 = 0.9, beta2 = 0.95, eps = 1e-8 and
    weight_decay = 0.0."""
    lr_scheduler: Annotated[str, HasOptions(lambda name: get_schedule_options(name))] = "linear"
    """Learning rate schedule by its transformers name, such as cosine_with_min_lr with min_lr_rate = 0.1. Options in
    steps count optimizer steps."""
    loss: Annotated[str, _has_options("loss", lambda: LOSSES)] = "dapo"
    """Loss by its TRL name: dapo, grpo or dr_grpo (clip_low = 0.2, clip_high = 0.28), cispo (clip_high = 5.0), or sapo
    (temperature_pos = 1.0, temperature_neg = 1.05)."""
    kl: Annotated[str, _has_options("kl", lambda: KLS)] = ""
    """KL penalty towards the policy that training began with: k3 or unbiased, with beta = 0.04; "" disables it."""
    importance_sampling: Annotated[str, _has_options("importance_sampling", lambda: IMPORTANCES)] = "token_truncate"
    """Correction of the logprob mismatch between sampler and trainer, by importance sampling ratios. token_truncate
    cuts the ratio of each token to cap = 2.0. token_mask drops tokens above cap, and token_band also drops those below
    low = 0.5. `none` disables the correction; it is valid only if `max_staleness_steps` is 0. A mismatch above the
    option `tolerance` (nats per token) stops the run; tokens of older policies are not checked. The default tolerance
    is 1e-3 if sampler and trainer compute in float32. Otherwise it is 1.0, because rounding in bfloat16 alone moves
    single log probabilities by tenths of a nat."""
    max_staleness_steps: Annotated[int, AtLeast(0)] = 0
    """Number of later steps whose rollouts may run during the update of the current step, >= 0. With 0, rollouts and
    updates alternate. The engine loads new weights between two lines. So a line is at most this many steps older than
    the policy that is trained on it, unless `group_sampling` is `fifo_window`."""
    group_sampling: Annotated[str, _has_options("group_sampling", lambda: GROUP_SAMPLING_TYPES)] = ""
    """Group sampling. dynamic_sampling replaces groups whose outcomes are all equal, in at most max_rounds = 2 rounds.
    With `max_staleness_steps`, fifo_window takes the groups that finish first, among in_flight_share = 0.3 of the
    groups in flight. "" samples each group once."""
    estimator: Annotated[str, HasOptions(get_estimator_options), COMMON] = "two_stream"
    """Estimator from line rewards to advantages: a name of `repl_rl.credit.advantage_estimators`, or module:function.
    Its options are given as --trainer.estimator.KEY VALUE, such as --trainer.estimator.line-weight 0.5."""
    rewards: RewardTable = field(default_factory=RewardTable)
    """Reward of a line by its status."""
    line_rewards: WeightTable = field(default_factory=dict)
    """Reward functions, each of which adds one reward per line: first_error, or module:function of your own. Given as
    --trainer.line-rewards NAME ..., or with a weight as --trainer.line-rewards.first-error 0.6."""
    potentials: WeightTable = field(default_factory=dict)
    """Potentials: functions like those of `line_rewards`, which score how promising the console is before each line,
    such as --trainer.potentials.error-potential 0.6. Only the change of the score from line to line is a reward,
    which prevents reward farming."""
    stops: StopPolicy = field(default_factory=StopPolicy)
    """Stop reasons (`Stop`) whose rollouts are excluded from training (masked) or get a lower outcome (penalised)."""
    fast_logprobs: bool = True
    """Compute log probabilities of sampled tokens only. If possible, the loss reuses the forward pass that scored the
    rollouts. False uses TRL's own passes, with log probabilities that equal TRL's bit for bit."""
    prefix_sharing: Literal["auto", "off"] = "auto"
    """Prefix sharing: the common beginning of rollouts passes through the model once, if that saves enough. "off"
    scores each rollout alone. Only with `fast_logprobs`."""
    dtype: Annotated[Literal["float32", "bfloat16"], DTYPE, COMMON] = "float32"
    """Number format of the computation. Trained weights and their optimizer are float32 in any case; weights that
    adapters leave frozen have this format."""
    gradient_checkpointing: Annotated[
        bool,
        PretrainedDefault("on, on a GPU", lambda facts: facts.has_gpu() or None),
        COMMON,
    ] = False
    """Gradient checkpointing: activations are computed again for the gradient, which takes less memory and more
    time."""
    lora_rank: Annotated[int, AtLeast(0), COMMON] = 0
    """Rank, >= 1, of low-rank adapters (PEFT) that are trained in place of the weights; 0 trains the weights."""
    save_steps: Annotated[int, AtLeast(0)] = 0
    """Steps between checkpoints of weights (or adapters) and optimizer, >= 0, with one more at the end; 0 disables
    them."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers that get metrics and a table of rollouts after each step, in addition to the run folder."""

    def __post_init__(self) -> None:
        check_fields(self, "trainer")
        # Names without weights become tables, so that equal configs compare equal.
        for name in ("line_rewards", "potentials"):
            object.__setattr__(self, name, read_weight_table(f"trainer.{name}", getattr(self, name)))
        # Settings that the chosen estimator would ignore are refused.
        unused = {"line_rewards": self.line_rewards, "potentials": self.potentials}
        for name, value in unused.items():
            if value and not uses_line_rewards(self.estimator):
                raise ConfigError(
                    f"{name} with estimator 'outcome'",
                    value,
                    "this estimator ignores line rewards; leave the setting out, or choose another estimator",
                )
        if self.lora_rank:
            require_peft(self.lora_rank)
        require_sinks(self.report_to)
        validate_staleness(self.max_staleness_steps, self.importance_sampling, self.group_sampling)
        # Both raise ConfigError here, before a run starts.
        self.build_named_args()
        self.compute_batch_shape(1)  # rollouts that one process cannot divide evenly, several cannot either

    @property
    def importance_cap(self) -> float:
        """Largest importance sampling ratio that is left unchanged, >= 1."""
        return parse_importance(self.importance_sampling)[1].cap

    def compute_logprob_tolerance(self, sampled_in: Dtype = "auto") -> float:
        """Return the allowed difference per token between the log probabilities of sampler and trainer, nats.

        `sampled_in` is the number format of the sampler.
        """
        return parse_importance(self.importance_sampling)[1].compute_tolerance(self.dtype, sampled_in)

    def count_rows_per_step(self, processes: int = 1) -> int:
        """Return the rollouts per optimizer step in one process, >= 1.

        `compute_batch_shape` refuses an uneven division.
        """
        return max(1, self.prompts_per_step * self.group_size // processes // self.num_mini_batches)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * self.optimizer_steps_per_step

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps per batch of rollouts."""
        return self.num_iterations * self.num_mini_batches

    def compute_batch_shape(self, processes: int) -> tuple[int, int]:
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
        if rollouts // processes % self.num_mini_batches:
            raise ConfigError("num_mini_batches", self.num_mini_batches, f"it must divide {share}")
        part = rollouts // processes // self.num_mini_batches
        micro_batch = self.per_device_batch_size or part
        if part % micro_batch:
            raise ConfigError(
                "per_device_batch_size", micro_batch, f"it must divide each of {self.num_mini_batches} parts of {share}"
            )
        return micro_batch, part // micro_batch

    def build_named_args(self) -> TrlArguments:
        """Return TRL's arguments for the settings that are given by name.

        Raises:
            ConfigError: a name or an option is unknown.
        """
        # TRL counts in optimizer steps.
        warmup = self.warmup_steps * self.optimizer_steps_per_step
        return {
            **build_importance_args(self.importance_sampling),
            **parse_loss(self.loss),
            **parse_kl(self.kl),
            **parse_optimizer(self.optimizer),
            **parse_schedule(self.lr_scheduler, self.learning_rate, warmup, self.optimizer_steps),
        }


CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Default clip range [1 - low, 1 + high] of the ratio to the policy that sampled: DAPO's values (arXiv 2503.14476). The
ratio is 1 in the first update of fresh rollouts, so the range has an effect from the second update on."""
CISPO_HIGH = 5.0
"""Default upper bound of the ratio in CISPO: the value of ScaleRL (arXiv 2510.13786)."""


def build_clipped_loss_args(*, clip_low: Fraction = CLIP_LOW, clip_high: Fraction = CLIP_HIGH) -> TrlArguments:
    """Return the arguments of losses that clip as PPO does."""
    return {"epsilon": clip_low, "epsilon_high": clip_high}


def build_cispo_loss_args(*, clip_high: Positive = CISPO_HIGH) -> TrlArguments:
    """Return the arguments of CISPO, which cuts the ratio and keeps every token's gradient."""
    return {"epsilon_high": clip_high}


def build_soft_gated_loss_args(*, temperature_pos: Positive = 1.0, temperature_neg: Positive = 1.05) -> TrlArguments:
    """Return the arguments of SAPO, which gradually reduces the effect of distant ratios.

    `temperature_pos` applies to advantages above 0, `temperature_neg` to those below.
    """
    return {"sapo_temperature_pos": temperature_pos, "sapo_temperature_neg": temperature_neg}


LOSSES: Mapping[str, Callable[..., TrlArguments]] = {
    **dict.fromkeys(("grpo", "dr_grpo", "dapo"), build_clipped_loss_args),
    "cispo": build_cispo_loss_args,
    "sapo": build_soft_gated_loss_args,
}
"""TRL losses that accept advantages of shape (B, T). `luspo` and `vespo` weight whole sequences, so they do not."""


def parse_loss(text: str) -> TrlArguments:
    """Return TRL's arguments for `trainer.loss`.

    Raises:
        ConfigError: the loss or an option is unknown, or a value is out of bounds.
    """
    return {
        "loss_type": NameWithOptions.parse("trainer.loss", text).name,
        **_parse_trl_arguments("trainer.loss", text, LOSSES),
    }


@dataclass(frozen=True, slots=True)
class DynamicSamplingOptions:
    """Dynamic sampling: groups without a difference in reward are replaced by other groups."""

    max_rounds: int
    """Largest number of rounds of replacement per step, >= 1."""


@dataclass(frozen=True, slots=True)
class FifoWindowOptions:
    """FIFO window: groups of later steps may overtake a slow one."""

    in_flight_share: float
    """Width of the window as a share of the groups in flight, in (0, 1]."""


GroupSamplingOptions = DynamicSamplingOptions | FifoWindowOptions
"""Plan for groups without a difference in reward (`DynamicSamplingOptions`) or for slow groups (`FifoWindowOptions`).
"""


def build_dynamic_sampling(*, max_rounds: Annotated[int, AtLeast(1)] = 2) -> GroupSamplingOptions:
    """Return dynamic sampling (DAPO, arXiv 2503.14476) with at most `max_rounds` rounds per step."""
    return DynamicSamplingOptions(max_rounds)


def build_fifo_window(*, in_flight_share: Annotated[float, Above(0, at_most=1)] = 0.3) -> GroupSamplingOptions:
    """Return a windowed FIFO (MiniMax, arXiv 2605.26494).

    A step takes the groups that finish first, and waits for the oldest group of the window.
    """
    return FifoWindowOptions(in_flight_share)


GROUP_SAMPLING_TYPES: Mapping[str, Callable[..., GroupSamplingOptions]] = {
    "dynamic_sampling": build_dynamic_sampling,
    "fifo_window": build_fifo_window,
}


def parse_group_sampling(text: str) -> GroupSamplingOptions | None:
    """Parse `trainer.group_sampling`; an empty text returns None. Raises as `parse_loss`."""
    if not text:
        return None
    named = parse_known_name("trainer.group_sampling", text, GROUP_SAMPLING_TYPES)
    return named.bind_options("trainer.group_sampling", GROUP_SAMPLING_TYPES[named.name])()


def build_k3_args(*, beta: Positive = 0.04) -> TrlArguments:
    """Return the arguments of the k3 estimator of the KL divergence.

    It is exp(d) - d - 1 per sampled token, with d the log probability under the reference minus that under the policy.
    """
    return {"beta": beta, "use_bias_correction_kl": False}


def build_unbiased_kl_args(*, beta: Positive = 0.04) -> TrlArguments:
    """Return the arguments of k3 times the token's ratio to the policy that sampled.

    Its gradient is that of the KL divergence (arXiv 2512.02556).
    """
    return {"beta": beta, "use_bias_correction_kl": True}


KLS: Mapping[str, Callable[..., TrlArguments]] = {"k3": build_k3_args, "unbiased": build_unbiased_kl_args}


def parse_kl(text: str) -> TrlArguments:
    """Return TRL's arguments for `trainer.kl`; an empty text disables the KL penalty. Raises as `parse_loss`."""
    return _parse_trl_arguments("trainer.kl", text, KLS) if text else {"beta": 0.0}


def build_adamw_args(
    *, beta1: BetaValue = 0.9, beta2: BetaValue = 0.95, eps: Positive = 1e-8, weight_decay: Fraction = 0.0
) -> TrlArguments:
    """Return the arguments of AdamW: Adam with weight decay apart from the gradient."""
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": eps, "weight_decay": weight_decay}


def build_sgd_args(
    *, momentum: MomentumValue = 0.0, nesterov: Literal[True, False] = False, weight_decay: Fraction = 0.0
) -> TrlArguments:
    """Return the arguments of plain gradient descent; `momentum` is its only optimizer state."""
    if nesterov and not momentum:
        raise ConfigError("nesterov of trainer.optimizer sgd", nesterov, "it needs a momentum above 0")
    return {"optim_args": f"momentum={momentum},nesterov={nesterov}", "weight_decay": weight_decay}


def build_adafactor_args(*, weight_decay: Fraction = 0.0) -> TrlArguments:
    """Return the arguments of Adafactor, which keeps one moment, factored into rows and columns."""
    return {"weight_decay": weight_decay}


OPTIMIZERS: Mapping[str, Callable[..., TrlArguments]] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch"), build_adamw_args),
    "adafactor": build_adafactor_args,
    "sgd": build_sgd_args,
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), build_adamw_args),
}
"""Optimizers by their transformers names. Other transformers optimizers need packages that are built for one machine,
or a list of layers."""
OF_BITSANDBYTES = ("adamw_8bit", "paged_adamw_8bit")
"""Optimizers that need the package bitsandbytes."""


def parse_optimizer(text: str, found: Callable[[str], object] = find_spec) -> TrlArguments:
    """Return TRL's arguments for `trainer.optimizer`.

    `found` looks up a package, and returns None if it is not installed.

    Raises:
        ConfigError: as `parse_loss`, or the optimizer needs a package that is not installed.
    """
    arguments = _parse_trl_arguments("trainer.optimizer", text, OPTIMIZERS)
    name = NameWithOptions.parse("trainer.optimizer", text).name
    if name in OF_BITSANDBYTES and found("bitsandbytes") is None:
        raise ConfigError("trainer.optimizer", text, "it needs a package: pip install bitsandbytes")
    return {"optim": name, **arguments}


SCHEDULES = (
    "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "warmup_stable_decay",
)  # fmt: skip
"""Schedules by their transformers names."""
_ALWAYS_VALID_SCHEDULES = ("linear", "constant_with_warmup")
"""Schedules whose learning rates are valid for any warm-up."""
SLACK = 1e-6
"""Distance by which rounding may move a learning rate out of its bounds, as a share of the peak."""
_TRAINER_PARAMETERS = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
"""Parameters of a schedule that are no options, because the trainer passes them."""


def parse_schedule(text: str, peak: float, warmup_steps: int, total_steps: int) -> TrlArguments:
    """Return TRL's arguments for `trainer.lr_scheduler`, after a trial that finds errors before the run starts.

    Args:
        peak: the highest learning rate.
        warmup_steps: optimizer steps over which the learning rate rises.
        total_steps: optimizer steps of the run.

    Raises:
        ConfigError: as `parse_loss`, or the schedule makes no valid learning rate of its options.
    """
    thing = "trainer.lr_scheduler"
    named = parse_known_name(thing, text, dict.fromkeys(SCHEDULES))
    # transformers would ignore the warm-up without a warning.
    if named.name == "constant" and warmup_steps:
        raise ConfigError(
            thing, text, "it has no warm-up: choose constant_with_warmup, or set trainer.warmup_steps = 0"
        )
    if named.options or named.name not in _ALWAYS_VALID_SCHEDULES:
        _refuse_bad_rates(text, named, peak, warmup_steps, total_steps)
    return {"lr_scheduler_type": named.name, "lr_scheduler_kwargs": dict(named.options)}


def get_schedule_options(name: str) -> Mapping[str, object]:
    """Return the options of a learning rate schedule, each with its annotation. Raises as `parse_loss`."""
    # The imports take seconds, and the default schedule has no options.
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    parse_known_name("trainer.lr_scheduler", name, dict.fromkeys(SCHEDULES))
    # They are the other parameters of its transformers function.
    parameters = get_options(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)], positional=True)
    return {key: hint for key, hint in parameters.items() if key not in _TRAINER_PARAMETERS}


def _refuse_bad_rates(text: str, named: NameWithOptions, peak: float, warmup_steps: int, total_steps: int) -> None:
    """Build the schedule on a dummy weight, and check its options and learning rates. Raises as `parse_schedule`."""
    import torch  # the imports take seconds, and the default schedule needs no trial
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    thing, kind = "trainer.lr_scheduler", SchedulerType(named.name)
    accepted = tuple(get_schedule_options(named.name))
    for key, value in named.options.items():
        validate_option_name(thing, named.name, key, value, accepted)
    # Read the learning rate at the start, the peak and the last step.
    try:
        weight = torch.nn.Parameter(torch.zeros(1))
        made = get_scheduler(kind, torch.optim.SGD([weight], peak), warmup_steps, total_steps, dict(named.options))
        shares = [float(made.lr_lambdas[0](step)) for step in (0, warmup_steps, total_steps - 1)]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(thing, text, f"transformers cannot make a learning rate of it: {error}") from error
    if not all(-SLACK <= share <= 1 + SLACK for share in shares):
        rates = ", ".join(f"{share * peak:.3g}" for share in shares)
        raise ConfigError(thing, text, f"its learning rates would be {rates}, outside of [0, {peak:g}]; choose others")


IMPORTANCE_CAP = 2.0
"""Default of the largest importance sampling ratio that is left unchanged; TRL's value."""


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """Correction of the logprob mismatch between sampler and trainer."""

    cap: float
    """Largest importance sampling ratio (trainer / sampler) that is left unchanged, >= 1."""
    tolerance: float | None
    """Largest allowed difference of one log probability, nats. None chooses it by the number formats."""
    low: float | None = None
    """Smallest ratio that is left unchanged, in (0, 1). None sets no lower bound."""

    def compute_tolerance(self, trained_in: Dtype, sampled_in: Dtype) -> float:
        """Return the largest allowed difference of one log probability for these number formats, nats."""
        if self.tolerance is not None:
            return self.tolerance
        # Rounding in bfloat16 alone moves single log probabilities by tenths of a nat.
        exact = trained_in == "float32" and choose_sampler_dtype(trained_in, sampled_in) == "float32"
        return 1e-3 if exact else 1.0


def choose_sampler_dtype(trained_in: Dtype, asked: Dtype) -> Dtype:
    """Return the number format of the sampler, for a trainer that computes in `trained_in`.

    A float32 trainer can check the log probabilities of a float32 sampler, and of no other. So "auto", which means
    bfloat16 on a GPU, becomes float32 for it.
    """
    return "float32" if asked == "auto" and trained_in == "float32" else asked


def build_capped_correction(
    *,
    cap: Annotated[float, AtLeast(1)] = IMPORTANCE_CAP,
    tolerance: Annotated[float | None, Above(0)] = None,
) -> ImportanceCorrection:
    """Return a correction with an upper bound; its name decides if ratios above `cap` are cut or masked."""
    return ImportanceCorrection(cap, tolerance)


def build_banded_correction(
    *,
    low: Annotated[float, Above(0, below=1)] = 0.5,
    cap: Annotated[float, AtLeast(1)] = IMPORTANCE_CAP,
    tolerance: Annotated[float | None, Above(0)] = None,
) -> ImportanceCorrection:
    """Return the correction that masks tokens with a ratio outside [low, cap], as in IcePop (arXiv 2510.18855)."""
    return ImportanceCorrection(cap, tolerance, low)


def build_no_correction(*, tolerance: Annotated[float | None, Above(0)] = None) -> ImportanceCorrection:
    """Return the settings without a correction: every ratio counts as 1."""
    # The cap has no effect, since `apply_importance_correction` replaces all ratios by 1.
    return ImportanceCorrection(IMPORTANCE_CAP, tolerance)


IMPORTANCES: Mapping[str, Callable[..., ImportanceCorrection]] = {
    **dict.fromkeys(("token_truncate", "token_mask"), build_capped_correction),
    "token_band": build_banded_correction,
    "none": build_no_correction,
}
"""Corrections by name, of the ratio of each token. `token_truncate` cuts it to the cap, and `token_mask` drops tokens
above the cap. `token_band` drops tokens on both sides of its band. `none` corrects nothing."""


def parse_importance(text: str) -> tuple[str, ImportanceCorrection]:
    """Parse `trainer.importance_sampling` into the name of a correction and its options.

    Raises:
        ConfigError: the correction or an option is unknown, or a value is out of bounds.
    """
    named = parse_known_name("trainer.importance_sampling", text, IMPORTANCES)
    return named.name, named.bind_options("trainer.importance_sampling", IMPORTANCES[named.name])()


def build_importance_args(text: str) -> TrlArguments:
    """Return TRL's arguments for `trainer.importance_sampling`. Raises as `parse_importance`."""
    name, correction = parse_importance(text)
    # TRL computes a correction in any case. For `none`, `apply_importance_correction` replaces its ratios by 1.
    return {
        "vllm_importance_sampling_mode": "token_mask" if name in ("token_mask", "token_band") else "token_truncate",
        "vllm_importance_sampling_clip_max": correction.cap,
        "vllm_importance_sampling_clip_min": correction.low,
    }


def validate_staleness(steps: int, corrected: str, plan: str) -> None:
    """Refuse settings that do not work with async rollouts, or only with them.

    Args:
        steps: `trainer.max_staleness_steps`.
        corrected: `trainer.importance_sampling`.
        plan: `trainer.group_sampling`.

    Raises:
        ConfigError: async rollouts with dynamic sampling, a FIFO window without async rollouts, or async rollouts
            without a correction.
    """
    windowed = isinstance(parse_group_sampling(plan), FifoWindowOptions)
    # Dynamic sampling replaces groups within a step, while async rollouts fix the tasks of a step when it begins.
    if steps and plan and not windowed:
        remedy = "async rollouts fix the tasks of a step beforehand; leave one of the two out, or use fifo_window"
        raise ConfigError("trainer.group_sampling with trainer.max_staleness_steps", plan, remedy)
    # Without async rollouts no later step is in flight, so no group could overtake another.
    if windowed and not steps:
        remedy = (
            "groups of later steps overtake slow ones; set trainer.max_staleness_steps to 1 or more, or leave it out"
        )
        raise ConfigError("trainer.group_sampling without trainer.max_staleness_steps", plan, remedy)
    name, _ = parse_importance(corrected)
    if steps and name == "none":
        remedy = "older lines need a correction; choose token_truncate, token_mask or token_band"
        raise ConfigError("trainer.importance_sampling with trainer.max_staleness_steps", corrected, remedy)


def parse_known_name(thing: str, text: str, table: Mapping[str, object]) -> NameWithOptions:
    """Parse `text`, and check that `table` has its name. Raises as `parse_loss`."""
    named = NameWithOptions.parse(thing, text)
    if named.name not in table and OLD_TYPES.get(named.name) in table:
        named = NameWithOptions(OLD_TYPES[named.name], named.options)
    refuse_removed_type(thing, named.name)
    if named.name not in table:
        raise ConfigError(thing, named.name, f"choose one of {', '.join(table)}")
    return named


def _parse_trl_arguments(thing: str, text: str, table: Mapping[str, Callable[..., TrlArguments]]) -> TrlArguments:
    named = parse_known_name(thing, text, table)
    return named.bind_options(thing, table[named.name])()
