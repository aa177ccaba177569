"""What each rollout of a group earned, and the advantages that follow from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from repl_rl.advantages import Advantages, Estimator, GroupRewards
from repl_rl.errors import InvariantError
from repl_rl.rewards import RewardTable, line_rewards, line_states
from repl_rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Credit:
    """How rewards become advantages."""

    estimator: Estimator
    table: RewardTable


@dataclass(frozen=True, slots=True)
class Earned:
    """What one rollout brings to its group's baseline: little enough to send to every process."""

    task_id: str
    outcome: float | None
    rewards_L: tuple[float, ...]
    states_L: tuple[str, ...]


def earned_by(trajectory: Trajectory, table: RewardTable) -> Earned:
    """What a rollout brings to its group: nothing if it may not be trained on."""
    if not trajectory.trainable:
        return Earned(trajectory.task_id, None, (), ())
    return Earned(trajectory.task_id, trajectory.outcome, line_rewards(trajectory, table), line_states(trajectory))


def group_advantages(members: Sequence[Earned], estimator: Estimator) -> Advantages:
    """Advantages of one group, a row a rollout.

    Raises:
        InvariantError: the rollouts are of several tasks.
    """
    if len({member.task_id for member in members}) != 1:
        raise InvariantError(f"a group holds tasks {[m.task_id for m in members]}; a group shares one task")
    return estimator(
        GroupRewards(
            tuple(m.outcome for m in members),
            tuple(m.rewards_L for m in members),
            tuple(m.states_L for m in members),
        )
    )
