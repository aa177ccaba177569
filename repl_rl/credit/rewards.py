"""Line rewards: from a trajectory to one reward per line, in reward units (dimensionless).

A line's reward is the value of its `LineStatus` in a `RewardTable` (its *shaping*), plus the rewards that it was given.
The sampler gives rewards under a name. Functions of the user and the difference of a potential give further ones. Given
rewards arrive unchanged, on any scale. Only shaping is bounded, if an estimator sums it. The outcome reward is not
included: it belongs to the whole rollout and is `Trajectory.outcome`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.machine.threads import InThread
from repl_rl.record.trajectory import LineStatus, Trajectory
from repl_rl.settings.named import imported


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Reward of a line per `LineStatus`; reward units, finite.

    Three statuses have no entry and are worth nothing. `sandbox_fault` is our failure. `incomplete` has no result yet;
    the status of the cell's last line is rewarded. `StopPolicy` decides the value of a rollout that `exited`.
    """

    syntax_error: float = -0.1
    """The cell did not compile."""
    exception: float = -0.1
    """The cell raised."""
    timeout: float = -0.1
    """The cell ran past its time limit."""
    memory_limit: float = -0.1
    """The cell requested more memory than its limit."""
    output_limit: float = -0.1
    """The cell printed more than its limit."""
    killed: float = -0.1
    """The cell killed its console."""
    ok: float = 0.0
    """The cell ran."""
    answered: float = 0.0
    """The cell submitted an answer. The outcome decides if it is right."""
    gated: bool = False
    """Count rewards above 0, from any source, only in a rollout that is solved."""
    bound: float = 0.5
    """Largest effect of the entries of this table on the return of a line, > 0. An estimator that sums rewards limits
    the table's part of a line and those after it to this bound. No entry is larger."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not math.isfinite(value):
                raise ConfigError(f"rewards.{entry.name}", value, "a reward is a finite number")
        if self.bound <= 0:
            raise ConfigError("rewards.bound", self.bound, "the bound of what the table can cost is above 0")
        for status in LineStatus:
            if abs(self.of(status)) > self.bound:
                remedy = f"rewards.bound is {self.bound:g}, and no entry may be larger; raise it, or lower this one"
                raise ConfigError(f"rewards.{status}", self.of(status), remedy)

    def of(self, status: LineStatus) -> float:
        """Return the reward of one line with this status, or 0 if the status has no entry."""
        if status in (LineStatus.SANDBOX_FAULT, LineStatus.INCOMPLETE, LineStatus.EXITED):
            return 0.0
        return float(getattr(self, status.value))


NO_SHAPING = RewardTable(syntax_error=0, exception=0, timeout=0, memory_limit=0, output_limit=0, killed=0)
"""Table in which every line is worth nothing, so that only the outcome counts."""


TABLE, POTENTIAL = "status", "potential"
"""Names under which metrics report rewards of the table and of a potential."""

LineReward = Callable[..., Sequence[float]]
"""Function of the user that returns one finite reward per line of the trajectory, in reward units. With a second
parameter, it also gets the task."""

TIME_LIMIT_S = 10.0
"""Default time limit of a `LineReward` per trajectory, wall clock seconds."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A `LineReward` with a weight and checks of its result."""

    function: LineReward
    weight: float = 1.0
    time_limit_s: float = TIME_LIMIT_S
    """Time limit per trajectory, wall clock seconds."""
    tasks: Mapping[str, object] = field(default_factory=dict)
    """Tasks by id, for a function that takes the task as well."""

    def said(self, trajectory: Trajectory) -> Sequence[float]:
        """Call the function without checking its result.

        Raises:
            KeyError: the function takes the task as well, which is unknown.
        """
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.function).parameters.values()
        # A second required parameter takes the task.
        if len([p for p in parameters if p.kind in kinds and p.default is p.empty]) < 2:
            return self.function(trajectory)
        return self.function(trajectory, self.tasks[trajectory.task_id])

    @property
    def name(self) -> str:
        """Name in metrics: module:function."""
        return f"{getattr(self.function, '__module__', '?')}:{getattr(self.function, '__qualname__', self.function)}"

    def __call__(self, trajectory: Trajectory) -> tuple[float, ...]:
        """Return one finite number per line, shape (L,).

        Raises:
            UserCodeError: the function raised, took too long, or returned anything but one finite number per line.
        """
        values_L = held_to_contract(self, trajectory)
        return tuple(self.weight * value for value in values_L)


@dataclass(frozen=True, slots=True)
class Potential:
    """Potential of the console before each line. Only its differences are paid, so it cannot be farmed.

    F(l) = discount * phi(l + 1) - phi(l), and phi = 0 once the rollout is over. The discounted sum over a rollout is
    -phi(0), independent of the lines in between. It is the same for the whole group, so no policy earns more by it.
    Sources: Ng, Harada and Russell 1999, and Grzes 2017 for the end at 0. It holds exactly for estimators that sum
    rewards (`return_to_go`, `state_anchor`). An estimator that normalises line rewards keeps only the direction.
    """

    phi: Weighted
    """One number per line: the potential of the state from which the line starts."""
    discount: float = 1.0
    """Worth of a reward one line later, in (0, 1], which equals that of the estimator."""

    def __call__(self, trajectory: Trajectory) -> tuple[float, ...]:
        """Return F of each line, shape (L,).

        Raises:
            UserCodeError: `phi` broke its contract.
        """
        phi_L = self.phi(trajectory)
        return tuple(self.discount * after - now for now, after in zip(phi_L, (*phi_L[1:], 0.0), strict=True))


def line_rewards(
    trajectory: Trajectory,
    table: RewardTable,
    extras: Sequence[Weighted] = (),
    potential: Potential | None = None,
) -> tuple[float, ...]:
    """Return one reward per line, shape (L,): the table's entry, the sampler's rewards for that line, those of
    `extras`.

    Nothing is scaled: each error costs its entry in the table, regardless of their number. A rollout that failed on our
    side earns nothing.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    parts = (shaping(trajectory, table), *given(trajectory, table.gated, extras, potential).values())
    return tuple(math.fsum(values) for values in zip(*parts, strict=True))


def shaping(trajectory: Trajectory, table: RewardTable) -> tuple[float, ...]:
    """Return the reward of each line from the status table alone, shape (L,)."""
    if not trajectory.trainable:
        return (0.0,) * len(trajectory.lines)
    entries_L = [0.0 if line.execution is None else table.of(line.execution.status) for line in trajectory.lines]
    return _gated(entries_L) if table.gated and not trajectory.solved else tuple(entries_L)


def given(
    trajectory: Trajectory,
    gated: bool = False,
    extras: Sequence[Weighted] = (),
    potential: Potential | None = None,
) -> dict[str, tuple[float, ...]]:
    """Return the rewards of lines from all sources but the table, by name, each of shape (L,).

    With `gated`, values above 0 count only in a rollout that is solved. The differences of a potential are exempt,
    because their sum would not cancel then.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    lines = trajectory.lines
    if not trajectory.trainable:
        return {}
    parts: dict[str, tuple[float, ...]] = {}
    # Rewards of the sampler, then of the user's functions.
    for name in dict.fromkeys(reward.name for line in lines for reward in line.rewards):
        parts[name] = tuple(math.fsum(r.value for r in line.rewards if r.name == name) for line in lines)
    for extra in extras:
        parts[extra.name] = _sum(parts.get(extra.name), extra(trajectory))
    if gated and not trajectory.solved:
        parts = {name: _gated(values_L) for name, values_L in parts.items()}
    # After the gate, so that its differences cancel.
    if potential:
        parts[POTENTIAL] = _sum(parts.get(POTENTIAL), potential(trajectory))
    return parts


def _gated(values_L: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(value, 0.0) for value in values_L)


def _sum(some: Sequence[float] | None, more: Sequence[float]) -> tuple[float, ...]:
    return tuple(more) if some is None else tuple(a + b for a, b in zip(some, more, strict=True))


def line_reward(name: str, tasks: Mapping[str, object] = MappingProxyType({})) -> Weighted:
    """Load the function at `module:function`, or `module:function=weight`. `tasks`, by id, are for those that take one.

    Raises:
        ConfigError: no such function exists, or the weight is not a finite number.
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
    return Weighted(function, factor, tasks=tasks)


def broken(trajectory: Trajectory) -> list[float]:
    """Return a potential: -1 while the last cell that ran failed, otherwise 0.

    An error costs, and fixing it pays the cost back.
    """
    values: list[float] = []
    wrong = False
    for line in trajectory.lines:
        values.append(-1.0 if wrong else 0.0)
        if line.execution is not None and line.execution.status is not LineStatus.INCOMPLETE:
            wrong = line.execution.status.is_error
    return values


def held_to_contract(extra: Weighted, trajectory: Trajectory) -> tuple[float, ...]:
    """Call a user's reward function and validate its result. See `line_rewards` for its errors.

    It runs in a separate thread. If it takes too long, the thread is abandoned, because the run ends.
    """
    name = f"line reward {extra.name}"
    call = InThread(lambda: tuple(float(value) for value in extra.said(trajectory)), name)
    call.join(extra.time_limit_s)
    if not call.outcome.done():
        raise UserCodeError(f"{name} took longer than {extra.time_limit_s:g} s for one trajectory; make it faster")
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
