"""What is done about sampler and trainer being apart, by name: the correction, and what goes with rollouts ahead.

token_truncate                            token_truncate(cap=2.0, tolerance=1e-3)
token_band(low=0.5, cap=2.0)              line_mask
none
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from repl_rl.engine.options import Dtype
from repl_rl.errors import ConfigError
from repl_rl.settings.bounds import Above, AtLeast
from repl_rl.trainer.choices import Arguments, Windowed, groups, known

IMPORTANCE_CAP = 2.0
"""Largest ratio of trainer to sampler that is kept as it is: TRL's value."""


@dataclass(frozen=True, slots=True)
class Apart:
    """What is done about sampler and trainer being apart."""

    cap: float
    """Largest ratio of trainer to sampler that is kept as it is, >= 1."""
    tolerance: float | None
    """Largest gap of one log probability that is no error, nats; None: what the number format makes usual."""
    low: float | None = None
    """Smallest ratio that is kept as it is, in (0, 1); None: all below `cap` are."""

    def allowed(self, trained_in: Dtype, sampled_in: Dtype) -> float:
        """Largest gap of one log probability that is no error where both compute in these number formats, nats."""
        if self.tolerance is not None:
            return self.tolerance
        exact = trained_in == "float32" and sampler_dtype(trained_in, sampled_in) == "float32"
        return 1e-3 if exact else 1.0


def sampler_dtype(trained_in: Dtype, asked: Dtype) -> Dtype:
    """The number format that a sampler is opened with, beside a trainer that computes in another.

    A float32 trainer can hold a float32 sampler to its log probabilities, and no other, so "auto", which would be
    bfloat16 on a GPU, is float32 there.
    """
    return "float32" if asked == "auto" and trained_in == "float32" else asked


def capped(
    *,
    cap: Annotated[float, AtLeast(1)] = IMPORTANCE_CAP,
    tolerance: Annotated[float | None, Above(0)] = None,
) -> Apart:
    """The corrections of tokens, lines and rollouts, which differ in what happens above `cap`."""
    return Apart(cap, tolerance)


def banded(
    *,
    low: Annotated[float, Above(0, below=1)] = 0.5,
    cap: Annotated[float, AtLeast(1)] = IMPORTANCE_CAP,
    tolerance: Annotated[float | None, Above(0)] = None,
) -> Apart:
    """The band: a token whose ratio is outside of [low, cap] is left out, as in IcePop (arXiv 2510.18855)."""
    return Apart(cap, tolerance, low)


def uncorrected(*, tolerance: Annotated[float | None, Above(0)] = None) -> Apart:
    """No correction: every ratio counts as 1."""
    return Apart(IMPORTANCE_CAP, tolerance)  # the cap is read by nobody


IMPORTANCES: Mapping[str, Callable[..., Apart]] = {
    **{f"{whose}_{how}": capped for whose in ("token", "line", "sequence") for how in ("truncate", "mask")},
    "token_band": banded,
    "none": uncorrected,
}
"""Of a token, of a line's tokens or of all of a rollout's; cut to the cap, or masked, above it or on both sides; or
none at all."""


def importance(text: str) -> tuple[str, Apart]:
    """`trainer.importance`: its name and its options.

    Raises:
        ConfigError: there is no such correction or option, or a value is out of bounds.
    """
    named = known("trainer.importance", text, IMPORTANCES)
    return named.name, named.bound("trainer.importance", IMPORTANCES[named.name])()


def corrections(text: str) -> Arguments:
    """`trainer.importance` as TRL is told it; ratios of lines and sequences take the place of its own later. Raises as
    `importance`."""
    name, apart = importance(text)
    return {
        "vllm_importance_sampling_mode": "token_mask" if name in ("token_mask", "token_band") else "token_truncate",
        "vllm_importance_sampling_clip_max": apart.cap,
        "vllm_importance_sampling_clip_min": apart.low,
    }


def refuse_stale(steps: int, corrected: str, plan: str) -> None:
    """Refuse what does not go with rollouts that run `steps` ahead of the update.

    Args:
        steps: `trainer.ahead`.
        corrected: `trainer.importance`.
        plan: `trainer.groups`.

    Raises:
        ConfigError: groups are played again, a window is asked for where nothing is ahead, or older lines are corrected
            by anything but the ratios of their tokens.
    """
    windowed = isinstance(groups(plan), Windowed)
    if steps and plan and not windowed:
        remedy = "it says before they are played which groups a step is made of; leave one of both out, or take window"
        raise ConfigError("trainer.groups with trainer.ahead", plan, remedy)
    if windowed and not steps:
        remedy = "groups of later steps pass those that take long; set trainer.ahead to 1 or more, or leave it out"
        raise ConfigError("trainer.groups without trainer.ahead", plan, remedy)
    name, _ = importance(corrected)
    if steps and not name.startswith("token"):
        remedy = "older lines need the ratio of each token; choose token_truncate, token_mask or token_band"
        raise ConfigError("trainer.importance with trainer.ahead", corrected, remedy)
