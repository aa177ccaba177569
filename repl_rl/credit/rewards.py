"""From a trajectory to one reward a line, in reward units (dimensionless).

A line's reward is what its `LineStatus` is worth in a `RewardTable` (its *shaping*), plus what it was given: by the
sampler under a name, by functions of the user, by the difference of a potential. What was given arrives as it was
given, on whatever scale; only shaping is bounded, where an estimator adds it up. The outcome reward is not part of it:
it belongs to the whole rollout and is `Trajectory.outcome`.
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
    """What a line earns for each `LineStatus`; reward units, finite.

    Three have no entry and are worth nothing: `sandbox_fault` is ours; `incomplete` says nothing yet, what came of its
    cell is known at the cell's last line, whose status is paid; and what a rollout that `exited` is worth is said by
    `StopPolicy`.
    """

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
    ok: float = 0.0
    """The cell ran."""
    answered: float = 0.0
    """The cell submitted an answer; whether it is right is the outcome's business."""
    gated: bool = False
    """True: rewards above 0, whoever gave them, count only in a rollout that is solved."""
    bound: float = 0.5
    """Most that the entries of this table can move the return of a line, > 0: an estimator that adds rewards up counts
    no more than that of what a line and those after it have in the table. No entry is larger."""

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
        """The reward of one line with this status; 0 for those without an entry."""
        if status in (LineStatus.SANDBOX_FAULT, LineStatus.INCOMPLETE, LineStatus.EXITED):
            return 0.0
        return float(getattr(self, status.value))


NO_SHAPING = RewardTable(syntax_error=0, exception=0, timeout=0, memory_limit=0, output_limit=0, killed=0)
"""Every line is worth nothing: only the outcome counts."""


TABLE, POTENTIAL = "status", "potential"
"""Names for the metrics: what the table gives, and what a potential does."""

LineReward = Callable[..., Sequence[float]]
"""A user's function: one finite reward a line of the trajectory, in reward units. Where it has a second parameter, it
is given the task as well."""

TIME_LIMIT_S = 10.0
"""Longest that a `LineReward` may take for one trajectory by default, wall clock."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """A `LineReward` held to its contract, times a weight."""

    function: LineReward
    weight: float = 1.0
    time_limit_s: float = TIME_LIMIT_S
    """Longest that it may take for one trajectory, wall clock."""
    tasks: Mapping[str, object] = field(default_factory=dict)
    """By id, for a function that takes the task as well."""

    def said(self, trajectory: Trajectory) -> Sequence[float]:
        """What the function says, unchecked.

        Raises:
            KeyError: it takes the task as well, which is not known.
        """
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(self.function).parameters.values()
        if len([p for p in parameters if p.kind in kinds and p.default is p.empty]) < 2:
            return self.function(trajectory)
        return self.function(trajectory, self.tasks[trajectory.task_id])

    @property
    def name(self) -> str:
        """What metrics call it: module:function."""
        return f"{getattr(self.function, '__module__', '?')}:{getattr(self.function, '__qualname__', self.function)}"

    def __call__(self, trajectory: Trajectory) -> tuple[float, ...]:
        """One finite number a line, shape (L,).

        Raises:
            UserCodeError: the function raised, took too long, or gave other than one finite number a line.
        """
        values_L = held_to_contract(self, trajectory)
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
    """One number a line: the potential of the state that the line starts from."""
    discount: float = 1.0
    """Worth of a reward one line later, in (0, 1]; that of the estimator."""

    def __call__(self, trajectory: Trajectory) -> tuple[float, ...]:
        """F of each line, shape (L,).

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
    """One reward a line, shape (L,): the table's entry, the sampler's rewards for that line, those of `extras`.

    Nothing is scaled: an error costs what the table says, however many there are. A rollout that failed on our side
    earns nothing.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    parts = (shaping(trajectory, table), *given(trajectory, table.gated, extras, potential).values())
    return tuple(math.fsum(values) for values in zip(*parts, strict=True))


def shaping(trajectory: Trajectory, table: RewardTable) -> tuple[float, ...]:
    """What the status table alone gives each line, shape (L,)."""
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
    """What the lines were given beside the table, by the name of each reward, shape (L,) each.

    `gated`: what is above 0 counts only in a rollout that is solved, except the differences of a potential, whose sum
    would not cancel then.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    lines = trajectory.lines
    if not trajectory.trainable:
        return {}
    parts: dict[str, tuple[float, ...]] = {}
    for name in dict.fromkeys(reward.name for line in lines for reward in line.rewards):
        parts[name] = tuple(math.fsum(r.value for r in line.rewards if r.name == name) for line in lines)
    for extra in extras:
        parts[extra.name] = _sum(parts.get(extra.name), extra(trajectory))
    if gated and not trajectory.solved:
        parts = {name: _gated(values_L) for name, values_L in parts.items()}
    if potential:
        parts[POTENTIAL] = _sum(parts.get(POTENTIAL), potential(trajectory))
    return parts


def _gated(values_L: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(value, 0.0) for value in values_L)


def _sum(some: Sequence[float] | None, more: Sequence[float]) -> tuple[float, ...]:
    return tuple(more) if some is None else tuple(a + b for a, b in zip(some, more, strict=True))


def line_reward(name: str, tasks: Mapping[str, object] = MappingProxyType({})) -> Weighted:
    """The function at `module:function`, or `module:function=weight`; `tasks`, by id, for those that take one.

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
    return Weighted(function, factor, tasks=tasks)


def broken(trajectory: Trajectory) -> list[float]:
    """A potential: -1 while the last cell that ran went wrong, else 0. An error costs, and mending it pays it back."""
    values: list[float] = []
    wrong = False
    for line in trajectory.lines:
        values.append(-1.0 if wrong else 0.0)
        if line.execution is not None and line.execution.status is not LineStatus.INCOMPLETE:
            wrong = line.execution.status.is_error
    return values


def held_to_contract(extra: Weighted, trajectory: Trajectory) -> tuple[float, ...]:
    """Call a user's reward function; see `line_rewards` for what it raises.

    It runs in a thread of its own, which is abandoned when it takes too long: the run ends then.
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
