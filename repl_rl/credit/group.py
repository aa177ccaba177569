"""Rewards of each rollout of a group, and the advantages that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from repl_rl.credit.advantages import Advantages, Estimator, GroupRewards, faded
from repl_rl.credit.credited import LineCredit
from repl_rl.credit.earnings import LineEarnings, RolloutEarnings
from repl_rl.credit.rewards import TABLE, Potential, RewardTable, Weighted, given, shaping
from repl_rl.credit.states import line_prefixes, line_states
from repl_rl.credit.stops import StopPolicy
from repl_rl.record.group import Group
from repl_rl.record.trajectory import NamedReward, Trajectory


@dataclass(frozen=True, slots=True)
class Credit:
    """Settings of credit assignment, from rewards to advantages."""

    estimator: Estimator
    table: RewardTable
    extras: tuple[Weighted, ...] = ()
    """Reward functions of the user, in addition to the table and the sampler's rewards."""
    potential: Potential | None = None
    """Potential that shapes line rewards. None disables it."""
    fade_steps: int = 0
    """Steps over which line rewards fade to zero; 0 disables fading."""
    stops: StopPolicy = field(default_factory=StopPolicy)
    """Stops that are masked or penalised."""
    sums: bool = True
    """True if the estimator sums shaping within `table.bound`. False means that it uses single lines, or none."""

    def share(self, step: int) -> float:
        """Return the weight of line rewards after `step` steps, in [0, 1]."""
        return max(0.0, 1.0 - step / self.fade_steps) if self.fade_steps else 1.0


@dataclass(frozen=True, slots=True)
class Earned:
    """Contribution of one rollout to its group's baseline, small enough to send to every process."""

    task_id: str
    prompt_key: str
    earnings: RolloutEarnings
    solved: bool = False
    named: tuple[NamedReward, ...] = ()
    """Sum over all lines per source: the table, the sampler's names, functions, a potential."""


def earned_by(trajectory: Trajectory, credit: Credit) -> Earned:
    """Return the contribution of a rollout to its group. It is empty if the rollout may not be trained on.

    Raises:
        UserCodeError: a function of the user broke its contract.
    """
    if not trajectory.trainable:
        return Earned(trajectory.task_id, trajectory.prompt_key, RolloutEarnings(None))
    shaping_L = shaping(trajectory, credit.table)
    parts = given(trajectory, credit.table.gated, credit.extras, credit.potential)
    # One row per line: shaping, state, prefix, token count, and each given reward.
    of_lines = zip(
        shaping_L,
        line_states(trajectory),
        line_prefixes(trajectory),
        (len(line.token_ids) for line in trajectory.lines),
        *parts.values(),
        strict=True,
    )
    lines = tuple(
        LineEarnings(math.fsum((shaped, *given_to)), shaped, state, prefix, tokens)
        for shaped, state, prefix, tokens, *given_to in of_lines
    )
    return Earned(
        trajectory.task_id,
        trajectory.prompt_key,
        RolloutEarnings(trajectory.outcome, lines),
        trajectory.solved,
        tuple(NamedReward(name, math.fsum(values_L)) for name, values_L in ((TABLE, shaping_L), *parts.items())),
    )


def group_advantages(group: Group[Earned], credit: Credit, step: int) -> Advantages:
    """Return the advantages of one group after `step` steps, one row per rollout."""
    rewards = GroupRewards(tuple(m.earnings for m in group.members), credit.table.bound)
    return faded(credit.estimator, rewards, credit.share(step))


def line_credit(
    trajectory: Trajectory, rewards_L: Sequence[float], advantages_L: Sequence[float], logprobs_T: Sequence[float]
) -> tuple[LineCredit, ...]:
    """Return the credit of each line, for the store.

    `logprobs_T` are the trainer's log probabilities, nats, one per completion token.
    """
    if not trajectory.trainable:
        return ()
    sampled = (value for value, mine in zip(logprobs_T, trajectory.loss_mask, strict=True) if mine)
    return tuple(
        LineCredit(reward, advantage, tuple(islice(sampled, len(line.token_ids))))
        for line, reward, advantage in zip(trajectory.lines, rewards_L, advantages_L, strict=True)
    )
