"""Importance sampling settings: corrections of the logprob mismatch, by name, and limits of async rollouts.

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
"""Default of the largest importance sampling ratio that is left unchanged; TRL's value."""


@dataclass(frozen=True, slots=True)
class Apart:
    """Correction of the logprob mismatch between sampler and trainer."""

    cap: float
    """Largest importance sampling ratio (trainer / sampler) that is left unchanged, >= 1."""
    tolerance: float | None
    """Largest allowed difference of one log probability, nats. None chooses it by the number formats."""
    low: float | None = None
    """Smallest ratio that is left unchanged, in (0, 1). None sets no lower bound."""

    def allowed(self, trained_in: Dtype, sampled_in: Dtype) -> float:
        """Return the largest allowed difference of one log probability for these number formats, nats."""
        if self.tolerance is not None:
            return self.tolerance
        # Rounding in bfloat16 alone moves single log probabilities by tenths of a nat.
        exact = trained_in == "float32" and sampler_dtype(trained_in, sampled_in) == "float32"
        return 1e-3 if exact else 1.0


def sampler_dtype(trained_in: Dtype, asked: Dtype) -> Dtype:
    """Return the number format of the sampler, for a trainer that computes in `trained_in`.

    A float32 trainer can check the log probabilities of a float32 sampler, and of no other. So "auto", which means
    bfloat16 on a GPU, becomes float32 for it.
    """
    return "float32" if asked == "auto" and trained_in == "float32" else asked


def capped(
    *,
    cap: Annotated[float, AtLeast(1)] = IMPORTANCE_CAP,
    tolerance: Annotated[float | None, Above(0)] = None,
) -> Apart:
    """Return a correction with an upper bound; its name decides if ratios above `cap` are cut or masked."""
    return Apart(cap, tolerance)


def banded(
    *,
    low: Annotated[float, Above(0, below=1)] = 0.5,
    cap: Annotated[float, AtLeast(1)] = IMPORTANCE_CAP,
    tolerance: Annotated[float | None, Above(0)] = None,
) -> Apart:
    """Return the correction that masks tokens with a ratio outside [low, cap], as in IcePop (arXiv 2510.18855)."""
    return Apart(cap, tolerance, low)


def uncorrected(*, tolerance: Annotated[float | None, Above(0)] = None) -> Apart:
    """Return the settings without a correction: every ratio counts as 1."""
    # The cap has no effect here, since `corrected` replaces all ratios by 1.
    return Apart(IMPORTANCE_CAP, tolerance)


IMPORTANCES: Mapping[str, Callable[..., Apart]] = {
    **{f"{whose}_{how}": capped for whose in ("token", "line", "sequence") for how in ("truncate", "mask")},
    "token_band": banded,
    "none": uncorrected,
}
"""Corrections by name. The first word is the unit of a ratio: a token, a line, or a whole rollout (`sequence`). The
second word is the treatment above the cap. `truncate` cuts the ratio to the cap, and `mask` drops the tokens.
`token_band` drops tokens on both sides of its band. `none` corrects nothing."""


def importance(text: str) -> tuple[str, Apart]:
    """Parse `trainer.importance` into the name of a correction and its options.

    Raises:
        ConfigError: the correction or an option is unknown, or a value is out of bounds.
    """
    named = known("trainer.importance", text, IMPORTANCES)
    return named.name, named.bound("trainer.importance", IMPORTANCES[named.name])()


def corrections(text: str) -> Arguments:
    """Return TRL's arguments for `trainer.importance`. Raises as `importance`."""
    name, apart = importance(text)
    # TRL gets a correction per token in any case; `corrected` later replaces its ratios for all other names.
    return {
        "vllm_importance_sampling_mode": "token_mask" if name in ("token_mask", "token_band") else "token_truncate",
        "vllm_importance_sampling_clip_max": apart.cap,
        "vllm_importance_sampling_clip_min": apart.low,
    }


def refuse_stale(steps: int, corrected: str, plan: str) -> None:
    """Refuse settings that do not work with async rollouts, or only with them.

    Args:
        steps: `trainer.ahead`.
        corrected: `trainer.importance`.
        plan: `trainer.groups`.

    Raises:
        ConfigError: async rollouts with dynamic sampling, a FIFO window without async rollouts, or async rollouts
            with a correction that is not per token.
    """
    windowed = isinstance(groups(plan), Windowed)
    # Dynamic sampling replaces groups within a step, while async rollouts fix the tasks of a step when it begins.
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
