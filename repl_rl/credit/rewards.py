"""Rewards of lines and rollouts, and the advantages and metrics that follow from them; reward units (dimensionless).

A line's reward is the value of its `LineStatus` in a `RewardTable` (its *shaping*), plus the rewards that it was given:
by the sampler under a name, by functions of the user, and by the difference of a potential. Given rewards arrive
unchanged, on any scale. Only shaping is bounded, if an estimator sums it. The outcome belongs to the whole rollout and
is `Trajectory.outcome`.

The parts in order: line rewards, names of console states and prefixes, effect of a rollout's stop, credit of a group,
metrics. Training does not read the metrics.
"""

import ast
import hashlib
import inspect
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from statistics import correlation, fmean
from types import MappingProxyType
from typing import Literal, get_args

from repl_rl.credit.advantage_estimators import (
    Advantages,
    Estimator,
    GroupRewards,
    LineRewards,
    RolloutRewards,
    anneal_line_rewards,
    compute_reward_to_go,
)
from repl_rl.credit.credited_trajectory import LineCredit
from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.settings.component_registry import import_attribute
from repl_rl.trajectory.trajectory import (
    Group,
    Line,
    LineStatus,
    NamedReward,
    Observed,
    Stop,
    Trajectory,
    add_outcome_part,
)
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


def load_line_reward(name: str, tasks: Mapping[str, object] = MappingProxyType({})) -> WeightedReward:
    """Load the function at `module:function`, or `module:function=weight`. `tasks`, by id, are for those that take one.

    Raises:
        ConfigError: no such function exists, or the weight is not a finite number.
        UserCodeError: its module raised while it was imported.
    """
    path, separator, weight = name.partition("=")
    try:
        factor = float(weight) if separator else 1.0
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ConfigError("line reward", name, "its weight is a finite number: module:function=weight")
    attribute = import_attribute("line reward", path)
    if not callable(attribute):
        raise ConfigError("line reward", name, "it is not a function")
    function: LineRewardFn = attribute
    return WeightedReward(function, factor, tasks=tasks)


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
    """Potential of the console before each line. Only its differences are paid, so it cannot be farmed.

    F(l) = discount * phi(l + 1) - phi(l), and phi = 0 once the rollout is over. The discounted sum over a rollout is
    -phi(0), independent of the lines in between. It is the same for the whole group, so no policy earns more by it.
    Sources: Ng, Harada and Russell 1999, and Grzes 2017 for the end at 0. It holds exactly for estimators that sum
    rewards (`return_to_go`, `state_anchor`). An estimator that normalises line rewards keeps only the direction.
    """

    potential_fn: WeightedReward
    """One number per line: the potential of the state from which the line starts."""
    discount: float = 1.0
    """Worth of a reward one line later, in (0, 1], which equals that of the estimator."""

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
        *compute_given_rewards(trajectory, table.gated, extras, potential).values(),
    )
    return tuple(math.fsum(values) for values in zip(*sources, strict=True))


def compute_shaping(trajectory: Trajectory, table: RewardTable) -> tuple[float, ...]:
    """Return the reward of each line from the status table alone, shape (L,)."""
    if not trajectory.trainable:
        return (0.0,) * len(trajectory.lines)
    entries_L = [0.0 if line.execution is None else table.get(line.execution.status) for line in trajectory.lines]
    return _zero_positive_rewards(entries_L) if table.gated and not trajectory.solved else tuple(entries_L)


def compute_given_rewards(
    trajectory: Trajectory,
    gated: bool = False,
    extras: Sequence[WeightedReward] = (),
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
    rewards: dict[str, tuple[float, ...]] = {}
    # Rewards of the sampler, then of the user's functions.
    for name in dict.fromkeys(reward.name for line in lines for reward in line.rewards):
        rewards[name] = tuple(math.fsum(r.value for r in line.rewards if r.name == name) for line in lines)
    for extra in extras:
        rewards[extra.name] = _sum_rewards(rewards.get(extra.name), extra(trajectory))
    if gated and not trajectory.solved:
        rewards = {name: _zero_positive_rewards(values_L) for name, values_L in rewards.items()}
    # After the gate, so that its differences cancel.
    if potential:
        rewards[POTENTIAL] = _sum_rewards(rewards.get(POTENTIAL), potential(trajectory))
    return rewards


def _zero_positive_rewards(values_L: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(value, 0.0) for value in values_L)


def _sum_rewards(values_L: Sequence[float] | None, added_L: Sequence[float]) -> tuple[float, ...]:
    return tuple(added_L) if values_L is None else tuple(a + b for a, b in zip(values_L, added_L, strict=True))


def compute_line_states(trajectory: Trajectory) -> tuple[str, ...]:
    """Return a name of the console state before each line, shape (L,). Equal names mean equal states.

    The host derives it from the lines that ran before, because a report of the sandbox is untrusted and would decide
    here which rollouts share a baseline. A name depends on the cells that the console received before, without their
    layout and comments. Other text of the policy around them does not count, and a cell that never compiled left no
    trace. Equal states may have different names (`x = 4` and `x = 2 + 2`). Different states never share a name, as long
    as programs are deterministic. A line that a tool executed counts with its text.
    """
    states: list[str] = []
    history = ""
    cell: list[str] = []
    # True while each line of the cell closed one physical line, so that all of them belong to this cell.
    single_lines = True
    for line in trajectory.lines:
        states.append(
            hashlib.blake2b((history + _join_cell(cell)).encode(errors="replace"), digest_size=16).hexdigest()
        )
        if line.execution is None:
            continue
        # One sampled line may close several physical lines.
        executed = _get_executed_code(line)
        cell += executed
        single_lines = single_lines and len(executed) == 1
        if line.execution.status is not LineStatus.INCOMPLETE:
            # A cell that never compiled left no trace. With several physical lines per line, an earlier one may have
            # run.
            if line.execution.status is not LineStatus.SYNTAX_ERROR or not single_lines:
                history += _canonicalize_cell(_join_cell(cell))
            cell, single_lines = [], True
    return tuple(states)


def compute_line_prefixes(trajectory: Trajectory) -> tuple[str, ...]:
    """Return a name of everything between the prompt and each line, shape (L,). Equal names mean equal ids.

    The host computes it, as in `compute_line_states`. Observations count, too, because two consoles may have answered
    the same lines differently.
    """
    names: list[str] = []
    hasher = hashlib.blake2b(digest_size=16)
    for segment in trajectory.segments:
        for item in (segment,) if isinstance(segment, Observed) else segment.lines:
            if isinstance(item, Line):
                # The name excludes the line itself.
                names.append(hasher.hexdigest())
            hasher.update(array("q", item.token_ids).tobytes())
    return tuple(names)


def _get_executed_code(line: Line) -> tuple[str, ...]:
    """Return the physical lines that were executed for a line, or its text if no console executed it."""
    assert line.execution is not None
    return line.execution.ran or (line.text.removesuffix("\n"),)


def _join_cell(cell: list[str]) -> str:
    return "".join(f"{physical}\n" for physical in cell)


def _canonicalize_cell(cell: str) -> str:
    """Return the cell without layout and comments, or the cell itself if Python cannot parse or print it here."""
    try:
        return "".join(ast.dump(statement) + "\n" for statement in ast.parse(cell).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return f"{cell!r}\n"


StopName = Literal["eos", "finished", "max_lines", "max_tokens", "line_too_long", "exited", "doomed", "wall_clock"]
"""Values of `Stop`, without `answered`, which is always trained on, and `fault`, which never is."""
CUT = frozenset({Stop.MAX_LINES, Stop.MAX_TOKENS, Stop.LINE_TOO_LONG, Stop.WALL_CLOCK})
"""Stops that a budget decided, not the policy."""


@dataclass(frozen=True, slots=True)
class StopPolicy:
    """Stops that are masked or penalised. A rollout with any other stop is trained on."""

    mask: tuple[StopName, ...] = ()
    """Stops whose rollouts teach nothing: none of their tokens gets a gradient, and they are in no baseline."""
    penalise: tuple[StopName, ...] = ()
    """Stops that subtract `penalty` from a rollout's outcome. A rollout without an outcome stays without one."""
    penalty: float = 0.5
    """Cost of a penalised stop, > 0, in reward units."""

    def __post_init__(self) -> None:
        for name in (*self.mask, *self.penalise):
            if name not in get_args(StopName):
                raise ConfigError("stops.mask or stops.penalise", name, f"choose among {', '.join(get_args(StopName))}")
        for name in self.mask:
            if name in self.penalise:
                raise ConfigError("stops.mask and stops.penalise", name, "a stop has one policy; leave it out of one")
        if not (math.isfinite(self.penalty) and self.penalty > 0):
            raise ConfigError("stops.penalty", self.penalty, "give a finite number above 0")

    def apply(self, trajectory: Trajectory) -> Trajectory:
        """Return the rollout as training sees it.

        A masked rollout has no sampled tokens and no outcome. All rules for rollouts that may not be trained on, from
        masks to baselines, then hold for it, too.
        """
        # Without segments the rollout has no line, so it is not trainable. `FINISHED` is valid without a line.
        if trajectory.stop.value in self.mask:
            return replace(trajectory.without_outcome(), segments=(), stop=Stop.FINISHED)
        if trajectory.stop.value in self.penalise and trajectory.outcome is not None:
            return add_outcome_part(trajectory, NamedReward(trajectory.stop.value, -self.penalty))
        return trajectory

    def compute_rates(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return shares of the rollouts that did not fail on our side: cut by a budget, masked, penalised."""
        stops = [t.stop for t in trajectories if t.failure is None]
        count = max(len(stops), 1)
        return {
            "cut_rate": sum(stop in CUT for stop in stops) / count,
            "stop_masked_rate": sum(stop.value in self.mask for stop in stops) / count,
            "stop_penalised_rate": sum(stop.value in self.penalise for stop in stops) / count,
        }


@dataclass(frozen=True, slots=True)
class CreditConfig:
    """Settings of credit assignment, from rewards to advantages."""

    estimator: Estimator
    reward_table: RewardTable
    extra_rewards: tuple[WeightedReward, ...] = ()
    """Reward functions of the user, in addition to the table and the sampler's rewards."""
    potential: Potential | None = None
    """Potential that shapes line rewards. None disables it."""
    anneal_steps: int = 0
    """Steps over which line rewards fade to zero; 0 disables fading."""
    stop_policy: StopPolicy = field(default_factory=StopPolicy)
    """Stops that are masked or penalised."""
    sums_shaping: bool = True
    """True if the estimator sums shaping within the bound of the table. False means that it uses single lines, or
    none."""

    def compute_line_reward_share(self, step: int) -> float:
        """Return the weight of line rewards after `step` steps, in [0, 1]."""
        return max(0.0, 1.0 - step / self.anneal_steps) if self.anneal_steps else 1.0


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
    given_rewards = compute_given_rewards(trajectory, credit.reward_table.gated, credit.extra_rewards, credit.potential)
    # One row per line: shaping, state, prefix, token count, and each given reward.
    columns = zip(
        shaping_L,
        compute_line_states(trajectory),
        compute_line_prefixes(trajectory),
        (len(line.token_ids) for line in trajectory.lines),
        *given_rewards.values(),
        strict=True,
    )
    # The reward of a line is the sum of its shaping and of all given rewards.
    lines = tuple(
        LineRewards(math.fsum((shaping, *given)), shaping, state, prefix, tokens)
        for shaping, state, prefix, tokens, *given in columns
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


def compute_group_advantages(group: Group[GroupEntry], credit: CreditConfig, step: int) -> Advantages:
    """Return the advantages of one group after `step` steps, one row per rollout."""
    rewards = GroupRewards(tuple(m.rewards for m in group.members), credit.reward_table.bound)
    return anneal_line_rewards(credit.estimator, rewards, credit.compute_line_reward_share(step))


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


def compute_credit_metrics(entries: Sequence[GroupEntry], credit: CreditConfig) -> dict[str, float]:
    """Return `compute_shaping_metrics` and `bound_rate`.

    `bound_rate` is the share of rollouts in which the bound reduces the shaping that the estimator sums. It is 0 if the
    estimator sums none.
    """
    sums = [compute_reward_to_go(entry.rewards.shaping_L, 1.0) for entry in entries if entry.rewards.lines]
    # The tolerance absorbs rounding in the sums.
    bounded_count = (
        sum(any(abs(s) > credit.reward_table.bound * (1 + 1e-9) for s in sums_L) for sums_L in sums)
        * credit.sums_shaping
    )
    return {**compute_shaping_metrics(entries), "bound_rate": bounded_count / max(len(sums), 1)}


def compute_shaping_metrics(entries: Sequence[GroupEntry]) -> dict[str, float]:
    """Compare line rewards with outcomes over graded rollouts: is the policy paid for solving, or for shaping?

    `shaping_mean` is the mean sum of line rewards per rollout. `shaping_share` is their part of all absolute reward.
    `shaping_correlation` is the correlation of that sum with the outcome, or 0 if one of them does not vary.
    """
    graded = [entry.rewards for entry in entries if entry.rewards.outcome is not None]
    # The sum of line rewards of each rollout, and its outcome.
    pairs = [(sum(rewards.rewards_L), rewards.outcome) for rewards in graded if rewards.outcome is not None]
    absolute = sum(abs(reward) for rewards in graded for reward in rewards.rewards_L)
    outcomes = sum(abs(outcome) for _, outcome in pairs)
    return {
        "shaping_mean": fmean(shaping for shaping, _ in pairs) if pairs else 0.0,
        "shaping_share": absolute / (absolute + outcomes) if absolute else 0.0,
        "shaping_correlation": _compute_correlation(pairs),
    }


def compute_length_metrics(groups: Sequence[Group[GroupEntry]], advantages: Sequence[Advantages]) -> dict[str, float]:
    """Measure if long rollouts are paid for their length: sampled tokens, as distances to their group's mean.

    `length_outcome_correlation` and `length_advantage_correlation` are their correlations with the outcome and with the
    mean advantage per token. These are also distances to the group's mean, so that hard tasks with long solutions do
    not count. A correlation is 0 if one side does not vary. `length_drift` is the mean of those distances weighted by
    advantage, in tokens. Above 0, the update pushes towards longer rollouts, for any reason.
    """
    graded: list[tuple[float, float]] = []
    credited: list[tuple[float, float]] = []
    for group, rows in zip(groups, advantages, strict=True):
        # Distances are taken within each group.
        rollouts = [(m.rewards, row) for m, row in zip(group.members, rows, strict=True) if m.rewards.lines]
        graded += _center_pairs([(r.tokens, r.outcome) for r, _ in rollouts if r.outcome is not None])
        credited += _center_pairs([(r.tokens, _compute_token_mean(r, row)) for r, row in rollouts])
    # Divide by the absolute weights, because the weights themselves may sum to 0.
    weight = sum(abs(advantage) for _, advantage in credited)
    return {
        "length_outcome_correlation": _compute_correlation(graded),
        "length_advantage_correlation": _compute_correlation(credited),
        "length_drift": sum(tokens * advantage for tokens, advantage in credited) / weight if weight else 0.0,
    }


def list_ends(trajectories: Sequence[Trajectory]) -> list[tuple[bool, int]]:
    """Return (was it cut, sampled tokens) for each rollout that is trained on."""
    return [(t.stop in CUT, t.sampled_tokens) for t in trajectories if t.trainable]


def compute_length_metrics_for_trl(ends: Sequence[tuple[bool, int]]) -> dict[str, float]:
    """Return the share of rollouts that were cut, and the lengths of the others, under TRL's names."""
    uncut_lengths = [length for cut, length in ends if not cut] or [0]
    return {
        "clipped_ratio": sum(cut for cut, _ in ends) / max(len(ends), 1),
        "mean_terminated_length": sum(uncut_lengths) / len(uncut_lengths),
        "min_terminated_length": float(min(uncut_lengths)),
        "max_terminated_length": float(max(uncut_lengths)),
    }


def _compute_token_mean(rollout: RolloutRewards, advantages_L: Sequence[float]) -> float:
    return sum(a * line.tokens for a, line in zip(advantages_L, rollout.lines, strict=True)) / rollout.tokens


def _center_pairs(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if not pairs:
        return []
    x, y = (fmean(column) for column in zip(*pairs, strict=True))
    return [(a - x, b - y) for a, b in pairs]


def _compute_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Pearson's correlation, or 0 if one side does not vary."""
    columns = list(zip(*pairs, strict=True))
    # Equal numbers may differ from their own mean in the last bit.
    if not columns or any(max(column) - min(column) < 1e-9 for column in columns):
        return 0.0
    return correlation(*columns)
