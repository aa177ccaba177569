"""Rejection sampling: selection of the best correct rollouts as training data of a fine-tuning."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from repl_rl.deprecations import keeps_old_names
from repl_rl.errors import ConfigError
from repl_rl.trajectory.trajectory import Trajectory


@keeps_old_names
@dataclass(frozen=True, slots=True)
class Selection:
    """Selected trajectories, and the number of rejected ones."""

    selected: tuple[Trajectory, ...]
    rejected_counts: Mapping[str, int]
    """Number of trajectories per reason."""


def select_best_rollouts(
    trajectories: Iterable[Trajectory], per_task: int = 1, forbidden_ids: frozenset[int] = frozenset()
) -> Selection:
    """Select rollouts by rejection sampling: of each task the best `per_task` (>= 1) graded rollouts that solved it.

    Rollouts are ranked by higher outcome, then fewer lines in error, then fewer sampled tokens, then the earlier one. A
    trajectory without an outcome is a demonstration and is kept. A trajectory in which the policy wrote a forbidden id
    is rejected, because that id has probability 0. The order is kept.

    Raises:
        ConfigError: `per_task` is below 1.
    """
    if per_task < 1:
        raise ConfigError("per_task", per_task, "keep at least 1 rollout per task")
    rejected: Counter[str] = Counter()
    selected: list[tuple[int, Trajectory]] = []
    solved: dict[str, list[tuple[int, Trajectory]]] = {}
    for number, trajectory in enumerate(trajectories):
        # The first reason that applies is counted.
        if not trajectory.trainable:
            rejected["failed on our side, or empty"] += 1
        elif any(not forbidden_ids.isdisjoint(line.token_ids) for line in trajectory.lines):
            rejected["writes an id that the policy never samples (--newline-tokens forbid)"] += 1
        elif trajectory.outcome is None:
            selected.append((number, trajectory))
        elif not trajectory.solved:
            rejected["did not solve its task"] += 1
        else:
            solved.setdefault(trajectory.task_id, []).append((number, trajectory))
    # Keep the best rollouts per task; sorting is stable, so the earlier of equal ones wins.
    for rollouts in solved.values():
        best = sorted(rollouts, key=lambda numbered: _rank_rollout(numbered[1]))[:per_task]
        selected += best
        rejected["a better one of its task is kept"] += len(rollouts) - len(best)
    # Restore the order of the input.
    ordered = tuple(trajectory for _, trajectory in sorted(selected, key=lambda numbered: numbered[0]))
    return Selection(ordered, {reason: count for reason, count in rejected.items() if count})


def _rank_rollout(trajectory: Trajectory) -> tuple[float, int, int]:
    """Return the sort key of a graded rollout; the best one comes first."""
    assert trajectory.outcome is not None
    errors = sum(execution.status.is_error for execution in trajectory.executions)
    return -trajectory.outcome, errors, trajectory.sampled_tokens
