"""Budgets of a rollout."""

from dataclasses import dataclass
from typing import Annotated

from repl_rl.deprecations import keeps_old_names
from repl_rl.settings.help_pages import COMMON
from repl_rl.settings.model_defaults import PretrainedDefault
from repl_rl.settings.value_bounds import Above, AtLeast, check_fields


@keeps_old_names
@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Budgets of one rollout. Reaching one ends it with a typed `Stop`.

    The defaults are those of the bundled policy. Other models have other defaults, given in the annotations.
    """

    max_lines: Annotated[int, AtLeast(1), PretrainedDefault.constant(32), COMMON] = 8
    """Sampled lines (>= 1). The text of one sampling call counts as a line, such as a turn or a text up to a call."""
    max_line_tokens: Annotated[int, AtLeast(1), PretrainedDefault.constant(256), COMMON] = 48
    """Tokens of one line (>= 1); a longer line is truncated and ends the rollout."""
    max_observation_tokens: Annotated[int, AtLeast(16), PretrainedDefault.constant(512)] = 128
    """Tokens of one observation (>= 16); a visible marker replaces the middle of a longer one."""
    max_wall_s: Annotated[float, Above(0), PretrainedDefault.constant(900.0)] = 120.0
    """Wall-clock time of a rollout, seconds (> 0)."""

    def __post_init__(self) -> None:
        check_fields(self, "rollout")

    @property
    def max_growth_tokens(self) -> int:
        """Largest number of tokens that a rollout can gain after its prompt, with one observation per line."""
        return self.max_lines * (self.max_line_tokens + self.max_observation_tokens)
