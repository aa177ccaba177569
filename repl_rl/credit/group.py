"""What each rollout of a group earned, and the advantages that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import correlation, fmean

from repl_rl.credit.advantages import Advantages, Estimator, GroupRewards, faded
from repl_rl.credit.credited import LineCredit
from repl_rl.credit.rewards import Potential, RewardTable, Weighted, line_rewards
from repl_rl.credit.states import line_states
from repl_rl.credit.stops import StopPolicy
from repl_rl.errors import InvariantError
from repl_rl.record.trajectory import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Credit:
    """How rewards become advantages."""

    estimator: Estimator
    table: RewardTable
    extras: tuple[Weighted, ...] = ()
    """Reward functions of the user, beside the table and the sampler's rewards."""
    potential: Potential | None = None
    """None: no shaping by a potential."""
    fade_steps: int = 0
    """Steps over which line rewards fade to nothing; 0: they stay."""
    stops: StopPolicy = field(default_factory=StopPolicy)
    """Which stops are masked or penalised."""

    def share(self, step: int) -> float:
        """How much of the line rewards counts at a policy step, in [0, 1]."""
        return max(0.0, 1.0 - step / self.fade_steps) if self.fade_steps else 1.0


@dataclass(frozen=True, slots=True)
class Earned:
    """What one rollout brings to its group's baseline: little enough to send to every process."""

    task_id: str
    prompt_key: str
    outcome: float | None = None
    rewards_L: tuple[float, ...] = ()
    states_L: tuple[str, ...] = ()
    """(): not known."""
    tokens_L: tuple[int, ...] = ()
    """Sampled tokens of each line."""

    def __post_init__(self) -> None:
        lengths = {len(values_L) for values_L in (self.rewards_L, self.states_L or self.rewards_L, self.tokens_L)}
        if len(lengths) > 1:
            counts = f"{len(self.rewards_L)} rewards, {len(self.states_L)} states and {len(self.tokens_L)} token counts"
            raise InvariantError(f"a rollout of task {self.task_id} has {counts}; give one of each per line")


def earned_by(trajectory: Trajectory, credit: Credit) -> Earned:
    """What a rollout brings to its group: nothing if it may not be trained on.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    if not trajectory.trainable:
        return Earned(trajectory.task_id, trajectory.prompt_key)
    return Earned(
        trajectory.task_id,
        trajectory.prompt_key,
        trajectory.outcome,
        line_rewards(trajectory, credit.table, credit.extras, credit.potential),
        line_states(trajectory),
        tuple(len(line.token_ids) for line in trajectory.lines),
    )


def group_advantages(group: Group[Earned], credit: Credit, step: int) -> Advantages:
    """Advantages of one group at a policy step, a row a rollout."""
    rewards = GroupRewards(
        tuple(m.outcome for m in group.members),
        tuple(m.rewards_L for m in group.members),
        tuple(m.states_L for m in group.members),
    )
    return faded(credit.estimator, rewards, credit.share(step))


def line_credit(
    trajectory: Trajectory, rewards_L: Sequence[float], advantages_L: Sequence[float], logprobs_T: Sequence[float]
) -> tuple[LineCredit, ...]:
    """What each line was worth, for the store. `logprobs_T` are the trainer's, nats, an entry a completion token."""
    if not trajectory.trainable:
        return ()
    sampled = (value for value, mine in zip(logprobs_T, trajectory.loss_mask, strict=True) if mine)
    return tuple(
        LineCredit(reward, advantage, tuple(islice(sampled, len(line.token_ids))))
        for line, reward, advantage in zip(trajectory.lines, rewards_L, advantages_L, strict=True)
    )


def shaping_metrics(earned: Sequence[Earned]) -> dict[str, float]:
    """How line rewards stand to outcomes, over graded rollouts: is the policy paid for solving, or for shaping?

    `shaping_mean` is the mean sum of a rollout's line rewards; `shaping_share` the part of all absolute reward that
    they make up; `shaping_correlation` that sum's correlation with the outcome, 0 where one of them does not vary.
    """
    pairs = [(sum(e.rewards_L), e.outcome) for e in earned if e.outcome is not None]
    absolute = sum(abs(reward) for e in earned if e.outcome is not None for reward in e.rewards_L)
    outcomes = sum(abs(outcome) for _, outcome in pairs)
    return {
        "shaping_mean": fmean(shaping for shaping, _ in pairs) if pairs else 0.0,
        "shaping_share": absolute / (absolute + outcomes) if absolute else 0.0,
        "shaping_correlation": _correlation(pairs),
    }


def length_metrics(groups: Sequence[Group[Earned]], advantages: Sequence[Advantages]) -> dict[str, float]:
    """Whether long rollouts are paid for being long: sampled tokens of rollouts, as distances to their group's mean.

    `length_outcome_correlation` and `length_advantage_correlation` are their correlations with the outcome and with the
    mean advantage of a token, also as distances to the group's mean, so that hard tasks with long solutions do not
    count; 0 where one of them does not vary. `length_drift` is the mean of those distances weighted by advantage, in
    tokens: above 0 the update pushes towards longer rollouts, whatever the reason.
    """
    graded: list[tuple[float, float]] = []
    credited: list[tuple[float, float]] = []
    for group, rows in zip(groups, advantages, strict=True):
        members = [(m, _mean_of_tokens(m, row)) for m, row in zip(group.members, rows, strict=True) if m.tokens_L]
        graded += _centred([(sum(m.tokens_L), m.outcome) for m, _ in members if m.outcome is not None])
        credited += _centred([(sum(m.tokens_L), advantage) for m, advantage in members])
    weight = sum(abs(advantage) for _, advantage in credited)
    return {
        "length_outcome_correlation": _correlation(graded),
        "length_advantage_correlation": _correlation(credited),
        "length_drift": sum(tokens * advantage for tokens, advantage in credited) / weight if weight else 0.0,
    }


def _mean_of_tokens(member: Earned, advantages_L: Sequence[float]) -> float:
    return sum(a * n for a, n in zip(advantages_L, member.tokens_L, strict=True)) / sum(member.tokens_L)


def _centred(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if not pairs:
        return []
    x, y = (fmean(column) for column in zip(*pairs, strict=True))
    return [(a - x, b - y) for a, b in pairs]


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Pearson's correlation; 0 where one of both does not vary."""
    columns = list(zip(*pairs, strict=True))
    # Equal numbers may differ from their own mean in the last bit.
    if not columns or any(max(column) - min(column) < 1e-9 for column in columns):
        return 0.0
    return correlation(*columns)
