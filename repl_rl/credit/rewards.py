"""From a trajectory to one reward a line, in reward units (dimensionless).

A line's reward is what its `LineStatus` is worth in a `RewardTable`, plus what the sampler gave it by name, plus what
functions of the user say, plus the difference of a potential. The outcome reward is not part of it: it belongs to the
whole rollout and is `Trajectory.outcome`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.machine.threads import InThread
from repl_rl.record.trajectory import LineStatus, Trajectory
from repl_rl.settings.named import imported


@dataclass(frozen=True, slots=True)
class RewardTable:
    """What a line earns for each `LineStatus`; reward units, finite. `sandbox_fault` is ours and has no entry."""

    syntax_error: float = -0.1
    """The cell did not compile."""
    exception: float = -0.1
    """The cell raised."""
    timeout: float = -0.1
    """The cell ran past its time limit."""
    memory_limit: float = -0.1
    """The cell asked for more memory than it may have."""
    output_limit: float = -0.1
    """The cell printed more than it may."""
    killed: float = -0.1
    """The cell killed its console."""
    exited: float = 0.0
    """The cell called `exit()`."""
    incomplete: float = 0.0
    """The line is the beginning of a longer cell."""
    ok: float = 0.0
    """The cell ran."""
    answered: float = 0.0
    """The cell submitted an answer; whether it is right is the outcome's business."""
    gated: bool = False
    """True: rewards above 0, whoever gave them, count only in a rollout whose outcome is at least 1."""
    bound: float = 0.5
    """Largest sum of absolute line rewards that one rollout can have, > 0. Above it, all of them shrink alike."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value):
                raise ConfigError(f"rewards.{field.name}", value, "a reward is a finite number")
        if self.bound <= 0:
            raise ConfigError("rewards.bound", self.bound, "the bound of a rollout's line rewards is above 0")

    def of(self, status: LineStatus) -> float:
        """The reward of one line with this status; 0 for `sandbox_fault`."""
        if status is LineStatus.SANDBOX_FAULT:
            return 0.0
        return float(getattr(self, status.value))


NO_SHAPING = RewardTable(syntax_error=0, exception=0, timeout=0, memory_limit=0, output_limit=0, killed=0)
"""Every line is worth nothing: only the outcome counts."""


LineReward = Callable[[Trajectory], Sequence[float]]
"""A user's function: one finite reward a line of the trajectory, in reward units."""

TIME_LIMIT_S = 10.0
"""Longest that a `LineReward` may take for one trajectory by default, wall clock."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A `LineReward` held to its contract, times a weight."""

    function: LineReward
    weight: float = 1.0
    time_limit_s: float = TIME_LIMIT_S
    """Longest that it may take for one trajectory, wall clock."""

    def __call__(self, trajectory: Trajectory) -> tuple[float, ...]:
        """One finite number a line, shape (L,).

        Raises:
            UserCodeError: the function raised, took too long, or gave other than one finite number a line.
        """
        values_L = held_to_contract(self.function, trajectory, self.time_limit_s)
        return tuple(self.weight * value for value in values_L)


@dataclass(frozen=True, slots=True)
class Potential:
    """How promising the console is before each line. Only its differences are paid, so it cannot be farmed.

    F(l) = discount * phi(l + 1) - phi(l), and phi = 0 once the rollout is over. The discounted sum over a rollout is
    -phi(0), whatever happened in between: the same for the whole group, so no policy earns more by it. Source: Ng,
    Harada and Russell 1999; the end at 0 is that of Grzes 2017. It holds exactly for estimators that add rewards up
    (`return_to_go`, `state_anchor`); one that normalises line rewards keeps the direction only.
    """

    phi: Weighted
    """One number a line: the potential of the state that the line starts from, at most the table's bound in size."""
    discount: float = 1.0
    """Worth of a reward one line later, in (0, 1]; that of the estimator."""

    def __call__(self, trajectory: Trajectory, bound: float) -> tuple[float, ...]:
        """F of each line, shape (L,).

        Raises:
            UserCodeError: `phi` broke its contract, or left [-bound, bound].
        """
        phi_L = self.phi(trajectory)
        for value in phi_L:
            if abs(value) > bound:
                raise UserCodeError(f"a potential is {value:g}; give it a weight that keeps it within {bound:g} of 0")
        return tuple(self.discount * after - now for now, after in zip(phi_L, (*phi_L[1:], 0.0), strict=True))


def line_rewards(
    trajectory: Trajectory,
    table: RewardTable,
    extras: Sequence[Weighted] = (),
    potential: Potential | None = None,
) -> tuple[float, ...]:
    """One reward a line, shape (L,): the table's entry, the sampler's rewards for that line, those of `extras`.

    The sum of their absolute values is at most `table.bound`: if it would be more, all are scaled by one factor,
    so which line earned more stays visible. Differences of a potential come on top, neither gated nor scaled, since
    their sum would not cancel then. A rollout that failed on our side earns nothing.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    if not trajectory.trainable:
        return (0.0,) * len(trajectory.lines)
    more = [extra(trajectory) for extra in extras]
    rewards_L = [
        (table.of(line.execution.status) if line.execution is not None else 0.0)
        + math.fsum(reward.value for reward in line.rewards)
        + math.fsum(more_L[at] for more_L in more)
        for at, line in enumerate(trajectory.lines)
    ]
    if table.gated and (trajectory.outcome or 0.0) < 1.0:
        rewards_L = [min(reward, 0.0) for reward in rewards_L]
    total = math.fsum(abs(reward) for reward in rewards_L)
    scale = table.bound / total if total > table.bound else 1.0
    differences_L = potential(trajectory, table.bound) if potential else (0.0,) * len(rewards_L)
    return tuple(reward * scale + more for reward, more in zip(rewards_L, differences_L, strict=True))


def line_reward(name: str) -> Weighted:
    """The function at `module:function`, or `module:function=weight`.

    Raises:
        ConfigError: there is no such function, or the weight is no finite number.
        UserCodeError: its module raised while it was imported.
    """
    path, equals, weight = name.partition("=")
    try:
        factor = float(weight) if equals else 1.0
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ConfigError("line reward", name, "its weight is a finite number: module:function=weight")
    found = imported("line reward", path)
    if not callable(found):
        raise ConfigError("line reward", name, "it is not a function")
    function: LineReward = found
    return Weighted(function, factor)


def broken(trajectory: Trajectory) -> list[float]:
    """A potential: -1 while the last cell that ran went wrong, else 0. An error costs, and mending it pays it back."""
    values: list[float] = []
    wrong = False
    for line in trajectory.lines:
        values.append(-1.0 if wrong else 0.0)
        if line.execution is not None and line.execution.status is not LineStatus.INCOMPLETE:
            wrong = line.execution.status.is_error
    return values


def held_to_contract(function: LineReward, trajectory: Trajectory, time_limit_s: float) -> tuple[float, ...]:
    """Call a user's reward function; see `line_rewards` for what it raises.

    It runs in a thread of its own, which is abandoned when it takes too long: the run ends then.
    """
    name = f"line reward {getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', function)}"
    call = InThread(lambda: tuple(float(value) for value in function(trajectory)), name)
    call.join(time_limit_s)
    if not call.outcome.done():
        raise UserCodeError(f"{name} took longer than {time_limit_s:g} s for one trajectory; make it faster")
    error = call.outcome.exception()
    if error is not None:
        raise UserCodeError(f"{name} raised {type(error).__name__}: {error}") from error
    rewards_L = call.outcome.result()
    if len(rewards_L) != len(trajectory.lines):
        raise UserCodeError(
            f"{name} gave {len(rewards_L)} rewards for {len(trajectory.lines)} lines; give one per line"
        )
    for value in rewards_L:
        if not math.isfinite(value):
            raise UserCodeError(f"{name} gave {value!r}; a reward is a finite number")
    return rewards_L
