"""Rewards of lines and rollouts, and the advantages that follow from them; reward units (dimensionless).

A line's reward is the value of its `LineStatus` in a `RewardTable` (its *shaping*), plus the rewards that it was given:
by the sampler under a name, by functions of the user, and by the difference of a potential. Given rewards arrive
unchanged, on any scale. Only shaping is bounded, if an estimator sums it. The outcome belongs to the whole rollout and
is `Trajectory.outcome`.

The parts in order: line rewards, then the credit of a group.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from types import MappingProxyType

from repl_rl.credit.advantage_estimators import (
    Advantages,
    Estimator,
    GroupRewards,
    LineRewards,
    RolloutRewards,
    penalize_first_error,
)
from repl_rl.credit.console_state_ids import compute_line_states
from repl_rl.credit.credited_trajectory import LineCredit
from repl_rl.credit.stop_policy import StopPolicy
from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.component_registry import find_or_import
from repl_rl.trajectory.trajectory import Group, LineStatus, NamedReward, Trajectory
from repl_rl.utils.timeouts import DaemonThread


@keeps_old_names
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
    bound: float = 0.5
    """Bound of summed table entries, > 0. An estimator that sums rewards clips the sum of the entries from a line on
    to +-bound. The absolute value of each entry is at most the bound."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not math.isfinite(value):
                raise ConfigError(f"rewards.{entry.name}", value, "a reward is a finite number")
        if self.bound <= 0:
            raise ConfigError("rewards.bound", self.bound, "the bound of what the table can cost is above 0")
        for status in LineStatus:
            if abs(self.get(status)) > self.bound:
                remedy = f"rewards.bound is {self.bound:g}, and no entry may be larger; raise it, or lower this one"
                raise ConfigError(f"rewards.{status}", self.get(status), remedy)

    def get(self, status: LineStatus) -> float:
        """Return the reward of one line with this status, or 0 if the status has no entry."""
        if status in (LineStatus.SANDBOX_FAULT, LineStatus.INCOMPLETE, LineStatus.EXITED):
            return 0.0
        return float(getattr(self, status.value))


NO_SHAPING = RewardTable(syntax_error=0, exception=0, timeout=0, memory_limit=0, output_limit=0, killed=0)
"""Table in which every line is worth nothing, so that only the outcome counts."""
TABLE, POTENTIAL = "status", "potential"
"""Names under which metrics report rewards of the table and of a potential."""

LineRewardFn = Callable[..., Sequence[float]]
"""Function of the user that returns one finite reward per line of the trajectory, in reward units. With a second
parameter, it also gets the task."""
TIME_LIMIT_S = 10.0
"""Default time limit of a `LineRewardFn` per trajectory, wall clock seconds."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A `LineRewardFn` with a weight and checks of its result."""

    function: LineRewardFn
    weight: float = 1.0
    time_limit_s: float = TIME_LIMIT_S
    """Time limit per trajectory, wall clock seconds."""
    tasks: Mapping[str, object] = field(default_factory=dict)
    """Tasks by id, for a function that takes the task as well."""

    def call_unchecked(self, trajectory: Trajectory) -> Sequence[float]:
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
        values_L = call_line_reward(self, trajectory)
        return tuple(self.weight * value for value in values_L)


def load_line_reward(
    name: str, tasks: Mapping[str, object] = MappingProxyType({}), weight: float = 1.0
) -> WeightedReward:
    """Load the function `name` of `LINE_REWARDS`, or the one at `module:function`.

    `tasks`, by id, are for functions that take one.

    Raises:
        ConfigError: no such function exists.
        UserCodeError: its module raised while it was imported.
    """
    attribute = find_or_import("line reward", name, LINE_REWARDS)
    if not callable(attribute):
        raise ConfigError("line reward", name, "it is not a function")
    function: LineRewardFn = attribute
    return WeightedReward(function, weight, tasks=tasks)


def call_line_reward(extra: WeightedReward, trajectory: Trajectory) -> tuple[float, ...]:
    """Call a user's reward function and validate its result. See `compute_line_rewards` for its errors.

    It runs in a separate thread. If it takes too long, the thread is abandoned, because the run ends.
    """
    name = f"line reward {extra.name}"
    # Values are converted in the thread too, because an iterator of the user may hang as well.
    call = DaemonThread(lambda: tuple(float(value) for value in extra.call_unchecked(trajectory)), name)
    call.join(extra.time_limit_s)
    if not call.future.done():
        raise UserCodeError(f"{name} took longer than {extra.time_limit_s:g} s for one trajectory; make it faster")
    error = call.future.exception()
    if error is not None:
        raise UserCodeError(f"{name} raised {type(error).__name__}: {error}") from error
    # The result is data of the user: check its length and its values.
    rewards_L = call.future.result()
    if len(rewards_L) != len(trajectory.lines):
        raise UserCodeError(
            f"{name} gave {len(rewards_L)} rewards for {len(trajectory.lines)} lines; give one per line"
        )
    for value in rewards_L:
        if not math.isfinite(value):
            raise UserCodeError(f"{name} gave {value!r}; a reward is a finite number")
    return rewards_L


@dataclass(frozen=True, slots=True)
class Potential:
    """Potential-based reward shaping: the reward of a line is the difference of a potential phi of the console state.

    F(l) = discount * phi(l + 1) - phi(l), and phi = 0 once the rollout is over. The discounted sum over a rollout is
    -phi(0), independent of the lines in between. This sum is equal for all rollouts of a group, so it favours no
    policy. Sources: Ng, Harada and Russell 1999, and Grzes 2017 for the end at 0. The property is exact for estimators
    that sum rewards (`return_to_go`, `state_anchor`). An estimator that normalises line rewards keeps only the
    direction.
    """

    potential_fn: Callable[[Trajectory], Sequence[float]]
    """One number per line: the potential of the state from which the line starts."""
    discount: float = 1.0
    """Discount factor per line, in (0, 1]. Must equal the discount factor of the estimator."""

    def __call__(self, trajectory: Trajectory) -> tuple[float, ...]:
        """Return F of each line, shape (L,).

        Raises:
            UserCodeError: `potential_fn` broke its contract.
        """
        phi_L = self.potential_fn(trajectory)
        return tuple(self.discount * next_phi - phi for phi, next_phi in zip(phi_L, (*phi_L[1:], 0.0), strict=True))


def compute_error_potential(trajectory: Trajectory) -> list[float]:
    """Return a potential: -1 while the last cell that ran failed, otherwise 0.

    An error costs, and fixing it pays the cost back.
    """
    values: list[float] = []
    failed = False
    for line in trajectory.lines:
        values.append(-1.0 if failed else 0.0)
        if line.execution is not None and line.execution.status is not LineStatus.INCOMPLETE:
            failed = line.execution.status.is_error
    return values


def build_potential(functions: Sequence[WeightedReward], discount: float) -> Potential:
    """Return the potential that is the sum of `functions`, at least one."""

    def sum_potentials(trajectory: Trajectory) -> Sequence[float]:
        return [sum(phi_F) for phi_F in zip(*(function(trajectory) for function in functions), strict=True)]

    return Potential(functions[0] if len(functions) == 1 else sum_potentials, discount)


LINE_REWARDS: Mapping[str, LineRewardFn] = {
    "first_error": penalize_first_error,
    "error_potential": compute_error_potential,
}
"""Shipped functions of `trainer.line_rewards` and `trainer.potentials`, by name."""


def compute_line_rewards(
    trajectory: Trajectory,
    table: RewardTable,
    extras: Sequence[WeightedReward] = (),
    potential: Potential | None = None,
) -> tuple[float, ...]:
    """Return one reward per line, shape (L,): the table's entry, the sampler's rewards for that line, those of
    `extras`.

    Nothing is scaled: each error costs its entry in the table, regardless of their number. A rollout that failed on our
    side earns nothing.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    sources = (
        compute_shaping(trajectory, table),
        *compute_given_rewards(trajectory, extras, potential).values(),
    )
    return tuple(math.fsum(values) for values in zip(*sources, strict=True))


def compute_shaping(trajectory: Trajectory, table: RewardTable) -> tuple[float, ...]:
    """Return the reward of each line from the status table alone, shape (L,)."""
    if not trajectory.trainable:
        return (0.0,) * len(trajectory.lines)
    return tuple(0.0 if line.execution is None else table.get(line.execution.status) for line in trajectory.lines)


def compute_given_rewards(
    trajectory: Trajectory,
    extras: Sequence[WeightedReward] = (),
    potential: Potential | None = None,
) -> dict[str, tuple[float, ...]]:
    """Return the rewards of lines from all sources but the table, by name, each of shape (L,).

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    lines = trajectory.lines
    if not trajectory.trainable:
        return {}
    rewards: dict[str, tuple[float, ...]] = {}
    # Rewards of the sampler, then of the user's functions.
    for name in dict.fromkeys(reward.name for line in lines for reward in line.rewards):
        rewards[name] = tuple(math.fsum(r.value for r in line.rewards if r.name == name) for line in lines)
    for extra in extras:
        rewards[extra.name] = _sum_rewards(rewards.get(extra.name), extra(trajectory))
    if potential:
        rewards[POTENTIAL] = _sum_rewards(rewards.get(POTENTIAL), potential(trajectory))
    return rewards


def _sum_rewards(values_L: Sequence[float] | None, added_L: Sequence[float]) -> tuple[float, ...]:
    return tuple(added_L) if values_L is None else tuple(a + b for a, b in zip(values_L, added_L, strict=True))


@dataclass(frozen=True, slots=True)
class CreditConfig:
    """Settings of credit assignment, from rewards to advantages."""

    estimator: Estimator
    reward_table: RewardTable
    extra_rewards: tuple[WeightedReward, ...] = ()
    """Reward functions of the user, in addition to the table and the sampler's rewards."""
    potential: Potential | None = None
    """Potential that shapes line rewards. None disables it."""
    stop_policy: StopPolicy | None = None
    """Stops that are masked or penalised. None trains on every stop."""
    sums_shaping: bool = True
    """True if the estimator sums shaping within the bound of the table. False means that it uses single lines, or
    none."""
    reads_states: bool = True
    """True if the estimator may compare console states, whose names are then computed."""


@dataclass(frozen=True, slots=True)
class GroupEntry:
    """Contribution of one rollout to its group's baseline, small enough to send to every process."""

    task_id: str
    prompt_key: str
    rewards: RolloutRewards
    solved: bool = False
    reward_sums: tuple[NamedReward, ...] = ()
    """Sum over all lines per source: the table, the sampler's names, functions, a potential."""


def build_group_entry(trajectory: Trajectory, credit: CreditConfig) -> GroupEntry:
    """Return the contribution of a rollout to its group. It is empty if the rollout may not be trained on.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    if not trajectory.trainable:
        return GroupEntry(trajectory.task_id, trajectory.prompt_key, RolloutRewards(None))
    shaping_L = compute_shaping(trajectory, credit.reward_table)
    given_rewards = compute_given_rewards(trajectory, credit.extra_rewards, credit.potential)
    states_L = compute_line_states(trajectory) if credit.reads_states else (None,) * len(shaping_L)
    # One row per line: shaping, state, token count, and each given reward.
    columns = zip(
        shaping_L,
        states_L,
        (len(line.token_ids) for line in trajectory.lines),
        *given_rewards.values(),
        strict=True,
    )
    # The reward of a line is the sum of its shaping and of all given rewards.
    lines = tuple(
        LineRewards(math.fsum((shaping, *given)), shaping, state, tokens) for shaping, state, tokens, *given in columns
    )
    return GroupEntry(
        trajectory.task_id,
        trajectory.prompt_key,
        RolloutRewards(trajectory.outcome, lines),
        trajectory.solved,
        tuple(
            NamedReward(name, math.fsum(values_L)) for name, values_L in ((TABLE, shaping_L), *given_rewards.items())
        ),
    )


def compute_group_advantages(group: Group[GroupEntry], credit: CreditConfig) -> Advantages:
    """Return the advantages of one group, one row per rollout."""
    return credit.estimator(GroupRewards(tuple(m.rewards for m in group.members), credit.reward_table.bound))


def build_line_credit(
    trajectory: Trajectory, rewards_L: Sequence[float], advantages_L: Sequence[float], logprobs_T: Sequence[float]
) -> tuple[LineCredit, ...]:
    """Return the credit of each line, for the store.

    `logprobs_T` are the trainer's log probabilities, nats, one per completion token.
    """
    if not trajectory.trainable:
        return ()
    # Only sampled tokens have credit; take them line by line.
    sampled_logprobs = (value for value, is_sampled in zip(logprobs_T, trajectory.loss_mask, strict=True) if is_sampled)
    return tuple(
        LineCredit(reward, advantage, tuple(islice(sampled_logprobs, len(line.token_ids))))
        for line, reward, advantage in zip(trajectory.lines, rewards_L, advantages_L, strict=True)
    )
