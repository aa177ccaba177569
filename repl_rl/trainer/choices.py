"""What a run chooses by name, with options: loss, importance correction, KL, optimizer and schedule, as TRL is told.

dapo                            dapo(clip_low=0.1, clip_high=0.2)
k3(beta=0.04)                   adamw_torch(weight_decay=0.1)
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import torch
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.trainer_utils import SchedulerType

from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.settings.named import Named

Arguments = dict[str, object]
"""Fields of TRL's GRPOConfig."""
Share = Annotated[float, AtLeast(0)]
Positive = Annotated[float, Above(0)]
Momentum = Annotated[float, AtLeast(0)]
Beta = Annotated[float, Above(0, below=1)]

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""The ratio to the policy that sampled is clipped outside of [1 - low, 1 + high]: DAPO's values (arXiv 2503.14476). The
ratio is 1 in the first update of fresh rollouts, so that they bind from the second on."""
CISPO_HIGH = 5.0
"""The ratio itself is cut above this: the value of ScaleRL (arXiv 2510.13786)."""


def clipped(*, clip_low: Share = CLIP_LOW, clip_high: Share = CLIP_HIGH) -> Arguments:
    """The losses that clip as PPO does."""
    return {"epsilon": clip_low, "epsilon_high": clip_high}


def cut(*, clip_high: Positive = CISPO_HIGH) -> Arguments:
    """The loss that cuts the ratio and keeps every token's gradient."""
    return {"epsilon_high": clip_high}


def soft(*, temperature_pos: Positive = 1.0, temperature_neg: Positive = 1.05) -> Arguments:
    """The loss that lets far ratios count less and less, for advantages above and below 0."""
    return {"sapo_temperature_pos": temperature_pos, "sapo_temperature_neg": temperature_neg}


LOSSES: Mapping[str, Callable[..., Arguments]] = {
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo"), clipped),
    "cispo": cut,
    "sapo": soft,
}
"""TRL losses that survive advantages of shape (B, T). `luspo` and `vespo` weigh whole sequences, so they do not."""


@dataclass(frozen=True, slots=True)
class Refill:
    """Other groups are played in the place of those that teach nothing, so many times in a step at most."""

    most: int


@dataclass(frozen=True, slots=True)
class Windowed:
    """Groups of later steps may pass one that takes long, within a window of that share of those under way."""

    share: float


Plan = Refill | Windowed
"""What is done about groups that teach nothing, or that take long."""


def refill(*, most: Annotated[int, AtLeast(1)] = 2) -> Plan:
    """Dynamic sampling (DAPO, arXiv 2503.14476), bounded."""
    return Refill(most)


def window(*, share: Annotated[float, Above(0, at_most=1)] = 0.3) -> Plan:
    """Windowed FIFO (MiniMax, arXiv 2605.26494): a step learns from what is done first, and waits for its oldest."""
    return Windowed(share)


PLANS: Mapping[str, Callable[..., Plan]] = {"refill": refill, "window": window}


def k3(*, beta: Positive = 0.04) -> Arguments:
    """exp(d) - d - 1 of each sampled token, d its log probability under the reference less that under the policy."""
    return {"beta": beta, "use_bias_correction_kl": False}


def unbiased(*, beta: Positive = 0.04) -> Arguments:
    """k3 times the token's ratio to the policy that sampled: its gradient is that of the KL (arXiv 2512.02556)."""
    return {"beta": beta, "use_bias_correction_kl": True}


KLS: Mapping[str, Callable[..., Arguments]] = {"k3": k3, "unbiased": unbiased}


def adamw(*, beta1: Beta = 0.9, beta2: Beta = 0.95, eps: Positive = 1e-8, weight_decay: Share = 0.0) -> Arguments:
    """Adam with decay of the weights beside the gradient."""
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": eps, "weight_decay": weight_decay}


def lion(*, beta1: Beta = 0.9, beta2: Beta = 0.99, weight_decay: Share = 0.0) -> Arguments:
    """The sign of a moving mean."""
    return {"adam_beta1": beta1, "adam_beta2": beta2, "weight_decay": weight_decay}


def sgd(*, momentum: Momentum = 0.0, nesterov: Literal[True, False] = False, weight_decay: Share = 0.0) -> Arguments:
    """Plain gradient descent: no memory but `momentum`."""
    if nesterov and not momentum:
        raise ConfigError("nesterov of trainer.optimizer sgd", nesterov, "it needs a momentum above 0")
    return {"optim_args": f"momentum={momentum},nesterov={nesterov}", "weight_decay": weight_decay}


def rmsprop(
    *, alpha: Beta = 0.99, eps: Positive = 1e-8, momentum: Momentum = 0.0, weight_decay: Share = 0.0
) -> Arguments:
    """Gradients over the root of their mean square."""
    return {"optim_args": f"alpha={alpha},eps={eps},momentum={momentum}", "weight_decay": weight_decay}


def adafactor(*, weight_decay: Share = 0.0) -> Arguments:
    """One moment, kept as rows and columns."""
    return {"weight_decay": weight_decay}


OPTIMIZERS: Mapping[str, Callable[..., Arguments]] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch"), adamw),
    "adafactor": adafactor,
    "sgd": sgd,
    "rmsprop": rmsprop,
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"), adamw),
    **dict.fromkeys(("lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"), lion),
}
"""Names of transformers. Its others want packages that are made for one machine, or a list of layers."""
OF_BITSANDBYTES = ("8bit", "paged", "lion")

SCHEDULES = [kind.value for kind in SchedulerType if kind.value not in ("reduce_lr_on_plateau", "greedy")]
"""Names of transformers. The two that are left out follow a loss that GRPO does not bring down."""
SLACK = 1e-6
"""By which rounding may carry a learning rate out of its bounds, as a share of the peak."""
_GIVEN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


def loss(text: str) -> Arguments:
    """`trainer.loss` as TRL is told it.

    Raises:
        ConfigError: there is no such loss or option, or a value is out of bounds.
    """
    return {"loss_type": Named.read("trainer.loss", text).name, **_arguments("trainer.loss", text, LOSSES)}


def groups(text: str) -> Plan | None:
    """`trainer.groups`. "": None. Raises as `loss`."""
    if not text:
        return None
    named = known("trainer.groups", text, PLANS)
    return named.bound("trainer.groups", PLANS[named.name])()


def kl(text: str) -> Arguments:
    """`trainer.kl`; as `loss`. "": none."""
    return _arguments("trainer.kl", text, KLS) if text else {"beta": 0.0}


def optimizer(text: str, found: Callable[[str], object] = find_spec) -> Arguments:
    """`trainer.optimizer`; as `loss`. `found` looks a package up; None: it is not installed.

    Raises:
        ConfigError: also where it needs a package that is not installed.
    """
    told = _arguments("trainer.optimizer", text, OPTIMIZERS)
    name = Named.read("trainer.optimizer", text).name
    if any(part in name for part in OF_BITSANDBYTES) and found("bitsandbytes") is None:
        raise ConfigError("trainer.optimizer", text, "it needs a package: pip install bitsandbytes")
    return {"optim": name, **told}


def schedule(text: str, peak: float, warmup_steps: int, total_steps: int) -> Arguments:
    """`trainer.schedule`; as `loss`, and it is tried: whatever it would refuse later is refused now.

    Args:
        peak: the highest learning rate.
        warmup_steps: optimizer steps over which the learning rate rises.
        total_steps: optimizer steps of the run.

    Raises:
        ConfigError: also where it makes no learning rate of its options.
    """
    thing = "trainer.schedule"
    named = Named.read(thing, text)
    if named.name not in SCHEDULES:
        raise ConfigError(thing, named.name, f"choose one of {', '.join(SCHEDULES)}")
    if named.name == "constant" and warmup_steps:
        raise ConfigError(
            thing, text, "it has no warm-up: choose constant_with_warmup, or set trainer.warmup_steps = 0"
        )
    kind = SchedulerType(named.name)
    accepted = [name for name in inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[kind]).parameters if name not in _GIVEN]
    for key, value in named.options.items():
        if key not in accepted:
            remedy = f"its options are {', '.join(accepted)}" if accepted else "it has no options"
            raise ConfigError(f"option {key} of {thing} {named.name}", value, remedy)
    try:
        weight = torch.nn.Parameter(torch.zeros(1))
        made = get_scheduler(kind, torch.optim.SGD([weight], peak), warmup_steps, total_steps, dict(named.options))
        shares = [float(made.lr_lambdas[0](step)) for step in (0, warmup_steps, total_steps - 1)]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(thing, text, f"transformers cannot make a learning rate of it: {error}") from error
    if not all(-SLACK <= share <= 1 + SLACK for share in shares):
        told = ", ".join(f"{share * peak:.3g}" for share in shares)
        raise ConfigError(thing, text, f"its learning rates would be {told}, outside of [0, {peak:g}]; choose others")
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": dict(named.options)}


def _arguments(thing: str, text: str, table: Mapping[str, Callable[..., Arguments]]) -> Arguments:
    named = known(thing, text, table)
    return named.bound(thing, table[named.name])()


def known(thing: str, text: str, table: Mapping[str, object]) -> Named:
    """What `text` names of `table`, with its options. Raises as `loss`."""
    named = Named.read(thing, text)
    if named.name not in table:
        raise ConfigError(thing, named.name, f"choose one of {', '.join(table)}")
    return named
