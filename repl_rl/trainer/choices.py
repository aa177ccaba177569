"""Settings that are given by name, with options: loss, KL penalty, optimizer, schedule and group sampling.

dapo                            dapo(clip_low=0.1, clip_high=0.2)
k3(beta=0.04)                   adamw_torch(weight_decay=0.1)
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named

Arguments = dict[str, object]
"""Keyword arguments of TRL's `GRPOConfig`."""
Share = Annotated[float, AtLeast(0)]
Positive = Annotated[float, Above(0)]
Momentum = Annotated[float, AtLeast(0)]
Beta = Annotated[float, Above(0, below=1)]

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Default clip range [1 - low, 1 + high] of the ratio to the policy that sampled: DAPO's values (arXiv 2503.14476). The
ratio is 1 in the first update of fresh rollouts, so the range has an effect from the second update on."""
CISPO_HIGH = 5.0
"""Default upper bound of the ratio in CISPO: the value of ScaleRL (arXiv 2510.13786)."""


def clipped(*, clip_low: Share = CLIP_LOW, clip_high: Share = CLIP_HIGH) -> Arguments:
    """Return the arguments of losses that clip as PPO does."""
    return {"epsilon": clip_low, "epsilon_high": clip_high}


def cut(*, clip_high: Positive = CISPO_HIGH) -> Arguments:
    """Return the arguments of CISPO, which cuts the ratio and keeps every token's gradient."""
    return {"epsilon_high": clip_high}


def soft(*, temperature_pos: Positive = 1.0, temperature_neg: Positive = 1.05) -> Arguments:
    """Return the arguments of SAPO, which gradually reduces the effect of distant ratios.

    `temperature_pos` applies to advantages above 0, `temperature_neg` to those below.
    """
    return {"sapo_temperature_pos": temperature_pos, "sapo_temperature_neg": temperature_neg}


LOSSES: Mapping[str, Callable[..., Arguments]] = {
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo"), clipped),
    "cispo": cut,
    "sapo": soft,
}
"""TRL losses that accept advantages of shape (B, T). `luspo` and `vespo` weight whole sequences, so they do not."""


@dataclass(frozen=True, slots=True)
class Refill:
    """Dynamic sampling: groups without a difference in reward are replaced by other groups."""

    most: int
    """Largest number of rounds of replacement per step, >= 1."""


@dataclass(frozen=True, slots=True)
class Windowed:
    """FIFO window: groups of later steps may overtake a slow one."""

    share: float
    """Width of the window as a share of the groups in flight, in (0, 1]."""


Plan = Refill | Windowed
"""Plan for groups without a difference in reward (`Refill`) or for slow groups (`Windowed`)."""


def refill(*, most: Annotated[int, AtLeast(1)] = 2) -> Plan:
    """Return dynamic sampling (DAPO, arXiv 2503.14476) with at most `most` rounds per step."""
    return Refill(most)


def window(*, share: Annotated[float, Above(0, at_most=1)] = 0.3) -> Plan:
    """Return a windowed FIFO (MiniMax, arXiv 2605.26494).

    A step takes the groups that finish first, and waits for the oldest group of the window.
    """
    return Windowed(share)


PLANS: Mapping[str, Callable[..., Plan]] = {"refill": refill, "window": window}


def k3(*, beta: Positive = 0.04) -> Arguments:
    """Return the arguments of the k3 estimator of the KL divergence.

    It is exp(d) - d - 1 per sampled token, with d the log probability under the reference minus that under the policy.
    """
    return {"beta": beta, "use_bias_correction_kl": False}


def unbiased(*, beta: Positive = 0.04) -> Arguments:
    """Return the arguments of k3 times the token's ratio to the policy that sampled.

    Its gradient is that of the KL divergence (arXiv 2512.02556).
    """
    return {"beta": beta, "use_bias_correction_kl": True}


KLS: Mapping[str, Callable[..., Arguments]] = {"k3": k3, "unbiased": unbiased}


def adamw(*, beta1: Beta = 0.9, beta2: Beta = 0.95, eps: Positive = 1e-8, weight_decay: Share = 0.0) -> Arguments:
    """Return the arguments of AdamW: Adam with weight decay apart from the gradient."""
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": eps, "weight_decay": weight_decay}


def lion(*, beta1: Beta = 0.9, beta2: Beta = 0.99, weight_decay: Share = 0.0) -> Arguments:
    """Return the arguments of Lion, which follows the sign of a moving mean of gradients."""
    return {"adam_beta1": beta1, "adam_beta2": beta2, "weight_decay": weight_decay}


def sgd(*, momentum: Momentum = 0.0, nesterov: Literal[True, False] = False, weight_decay: Share = 0.0) -> Arguments:
    """Return the arguments of plain gradient descent; `momentum` is its only optimizer state."""
    if nesterov and not momentum:
        raise ConfigError("nesterov of trainer.optimizer sgd", nesterov, "it needs a momentum above 0")
    return {"optim_args": f"momentum={momentum},nesterov={nesterov}", "weight_decay": weight_decay}


def rmsprop(
    *, alpha: Beta = 0.99, eps: Positive = 1e-8, momentum: Momentum = 0.0, weight_decay: Share = 0.0
) -> Arguments:
    """Return the arguments of RMSprop: gradients divided by the root of their mean square."""
    return {"optim_args": f"alpha={alpha},eps={eps},momentum={momentum}", "weight_decay": weight_decay}


def adafactor(*, weight_decay: Share = 0.0) -> Arguments:
    """Return the arguments of Adafactor, which keeps one moment, factored into rows and columns."""
    return {"weight_decay": weight_decay}


OPTIMIZERS: Mapping[str, Callable[..., Arguments]] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch"), adamw),
    "adafactor": adafactor,
    "sgd": sgd,
    "rmsprop": rmsprop,
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"), adamw),
    **dict.fromkeys(("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"), lion),
}
"""Optimizers by their transformers names. Other transformers optimizers need packages that are built for one machine,
or a list of layers."""
OF_BITSANDBYTES = ("8bit", "paged", "lion")
"""Parts of the names of optimizers that need bitsandbytes."""

SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
)  # fmt: skip
"""Transformers names of schedules, without those that depend on a falling loss, which GRPO does not have."""
_PLAIN = ("linear", "constant_with_warmup")
"""Schedules whose learning rates are valid for any warm-up."""
SLACK = 1e-6
"""Distance by which rounding may move a learning rate out of its bounds, as a share of the peak."""
_GIVEN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
"""Parameters of a schedule that are no options, because the trainer passes them."""


def loss(text: str) -> Arguments:
    """Return TRL's arguments for `trainer.loss`.

    Raises:
        ConfigError: the loss or an option is unknown, or a value is out of bounds.
    """
    return {"loss_type": Named.read("trainer.loss", text).name, **_arguments("trainer.loss", text, LOSSES)}


def groups(text: str) -> Plan | None:
    """Parse `trainer.groups`; an empty text returns None. Raises as `loss`."""
    if not text:
        return None
    named = known("trainer.groups", text, PLANS)
    return named.bound("trainer.groups", PLANS[named.name])()


def kl(text: str) -> Arguments:
    """Return TRL's arguments for `trainer.kl`; an empty text disables the KL penalty. Raises as `loss`."""
    return _arguments("trainer.kl", text, KLS) if text else {"beta": 0.0}


def optimizer(text: str, found: Callable[[str], object] = find_spec) -> Arguments:
    """Return TRL's arguments for `trainer.optimizer`.

    `found` looks up a package, and returns None if it is not installed.

    Raises:
        ConfigError: as `loss`, or the optimizer needs a package that is not installed.
    """
    told = _arguments("trainer.optimizer", text, OPTIMIZERS)
    name = Named.read("trainer.optimizer", text).name
    if any(part in name for part in OF_BITSANDBYTES) and found("bitsandbytes") is None:
        raise ConfigError("trainer.optimizer", text, "it needs a package: pip install bitsandbytes")
    return {"optim": name, **told}


def schedule(text: str, peak: float, warmup_steps: int, total_steps: int) -> Arguments:
    """Return TRL's arguments for `trainer.schedule`, after a trial that finds errors before the run starts.

    Args:
        peak: the highest learning rate.
        warmup_steps: optimizer steps over which the learning rate rises.
        total_steps: optimizer steps of the run.

    Raises:
        ConfigError: as `loss`, or the schedule makes no valid learning rate of its options.
    """
    thing = "trainer.schedule"
    named = Named.read(thing, text)
    if named.name not in SCHEDULES:
        raise ConfigError(thing, named.name, f"choose one of {', '.join(SCHEDULES)}")
    if named.name == "constant" and warmup_steps:
        raise ConfigError(
            thing, text, "it has no warm-up: choose constant_with_warmup, or set trainer.warmup_steps = 0"
        )
    if named.options or named.name not in _PLAIN:
        _refuse_bad_rates(text, named, peak, warmup_steps, total_steps)
    return {"lr_scheduler_type": named.name, "lr_scheduler_kwargs": dict(named.options)}


def _refuse_bad_rates(text: str, named: Named, peak: float, warmup_steps: int, total_steps: int) -> None:
    """Build the schedule on a dummy weight, and check its options and learning rates. Raises as `schedule`."""
    # The imports take seconds, and the default schedule does without.
    import torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    thing = "trainer.schedule"
    # The options of a schedule are the other parameters of its transformers function.
    kind = SchedulerType(named.name)
    accepted = [name for name in inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters if name not in _GIVEN]
    for key, value in named.options.items():
        if key not in accepted:
            remedy = f"its options are {', '.join(accepted)}" if accepted else "it has no options"
            raise ConfigError(f"option {key} of {thing} {named.name}", value, remedy)
    # Read the learning rate at the start, the peak and the last step.
    try:
        weight = torch.nn.Parameter(torch.zeros(1))
        made = get_scheduler(kind, torch.optim.SGD([weight], peak), warmup_steps, total_steps, dict(named.options))
        shares = [float(made.lr_lambdas[0](step)) for step in (0, warmup_steps, total_steps - 1)]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(thing, text, f"transformers cannot make a learning rate of it: {error}") from error
    if not all(-SLACK <= share <= 1 + SLACK for share in shares):
        told = ", ".join(f"{share * peak:.3g}" for share in shares)
        raise ConfigError(thing, text, f"its learning rates would be {told}, outside of [0, {peak:g}]; choose others")


def _arguments(thing: str, text: str, table: Mapping[str, Callable[..., Arguments]]) -> Arguments:
    named = known(thing, text, table)
    return named.bound(thing, table[named.name])()


def known(thing: str, text: str, table: Mapping[str, object]) -> Named:
    """Parse `text`, and check that `table` has its name. Raises as `loss`."""
    named = Named.read(thing, text)
    if named.name not in table:
        raise ConfigError(thing, named.name, f"choose one of {', '.join(table)}")
    return named
