"""What each rollout of a group earned, and the advantages that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import correlation, fmean

from repl_rl.advantages import Advantages, Estimator, GroupRewards, faded
from repl_rl.errors import InvariantError
from repl_rl.rewards import LineReward, RewardTable, line_rewards, line_states
from repl_rl.store import LineCredit
from repl_rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Credit:
    """How rewards become advantages."""

    estimator: Estimator
    table: RewardTable
    extra: LineReward | None = None
    """A user's reward function; None: the table and the sampler's rewards only."""
    fade_steps: int = 0
    """Steps over which line rewards fade to nothing; 0: they stay."""

    def share(self, step: int) -> float:
        """How much of the line rewards counts at a policy step, in [0, 1]."""
        return max(0.0, 1.0 - step / self.fade_steps) if self.fade_steps else 1.0


@dataclass(frozen=True, slots=True)
class Earned:
    """What one rollout brings to its group's baseline: little enough to send to every process."""

    task_id: str
    outcome: float | None
    rewards_L: tuple[float, ...]
    states_L: tuple[str, ...]


def earned_by(trajectory: Trajectory, credit: Credit) -> Earned:
    """What a rollout brings to its group: nothing if it may not be trained on.

    Raises:
        UserCodeError: the user's reward function broke its contract.
    """
    if not trajectory.trainable:
        return Earned(trajectory.task_id, None, (), ())
    rewards_L = line_rewards(trajectory, credit.table, credit.extra)
    return Earned(trajectory.task_id, trajectory.outcome, rewards_L, line_states(trajectory))


def group_advantages(members: Sequence[Earned], credit: Credit, step: int) -> Advantages:
    """Advantages of one group at a policy step, a row a rollout.

    Raises:
        InvariantError: the rollouts are of several tasks.
    """
    if len({member.task_id for member in members}) != 1:
        raise InvariantError(f"a group holds tasks {[m.task_id for m in members]}; a group shares one task")
    group = GroupRewards(
        tuple(m.outcome for m in members),
        tuple(m.rewards_L for m in members),
        tuple(m.states_L for m in members),
    )
    return faded(credit.estimator, group, credit.share(step))


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
    varies = len({shaping for shaping, _ in pairs}) > 1 and len({outcome for _, outcome in pairs}) > 1
    return {
        "shaping_mean": fmean(shaping for shaping, _ in pairs) if pairs else 0.0,
        "shaping_share": absolute / (absolute + outcomes) if absolute else 0.0,
        "shaping_correlation": correlation(*zip(*pairs, strict=True)) if varies else 0.0,
    }
