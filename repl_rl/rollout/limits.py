"""What a rollout may use."""

from dataclasses import dataclass

from repl_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Budgets of one rollout. Reaching one ends it with a typed `Stop`."""

    max_lines: int = 8
    """Sampled lines (>= 1). What a sampler lets the policy write in one go is a line: a turn, a text up to a call."""
    max_line_tokens: int = 48
    """Tokens of one line (>= 1); a longer line is cut and ends the rollout."""
    max_observation_tokens: int = 128
    """Tokens of one observation (>= 16); the middle of a longer one gives way to a visible marker."""
    max_wall_s: float = 120.0
    """Wall clock of a rollout, seconds (> 0)."""
    optimistic: bool = False
    """Sample on while a line that likely prints nothing runs; taken back if it prints. Pays where lines are slow."""
    give_up_after: int = 0
    """Lines in a row with the same error, void, or timed out, after which a rollout is given up (>= 2); 0: never."""

    def __post_init__(self) -> None:
        for name, floor in (("max_lines", 1), ("max_line_tokens", 1), ("max_observation_tokens", 16)):
            if getattr(self, name) < floor:
                raise ConfigError(name, getattr(self, name), f"give at least {floor}")
        if self.give_up_after not in (0, *range(2, 1 + max(2, self.max_lines))):
            raise ConfigError("give_up_after", self.give_up_after, "give 0, or 2 to max_lines")
        if not self.max_wall_s > 0:
            raise ConfigError("max_wall_s", self.max_wall_s, "give a positive number of seconds")
