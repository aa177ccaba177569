"""Alternatives to the table's price of errors: only the first of a streak costs, or only avoidable errors do.

Neither is a separate setting: the first is a line reward, the second an estimator.
"""

from dataclasses import replace

from repl_rl.credit.advantages import LineWeight, two_stream
from repl_rl.credit.earnings import Advantages, GroupRewards, LineEarnings
from repl_rl.record.trajectory import LineStatus, Trajectory


def first_of_streak(trajectory: Trajectory) -> list[float]:
    """Return -1 for each line in error that follows a cell without error, or no cell, and 0 for other lines.

    An error after an error is free. Use this reward unchanged, such as two_stream(given='as_given') with
    repl_rl.credit.errors:first_of_streak=0.6. It then costs as much as an entry of -0.1 in `two_stream`. A policy that
    is bound to fail again pays once. It must fix the error before it can pay again.
    """
    values: list[float] = []
    wrong = False
    for line in trajectory.lines:
        status = LineStatus.INCOMPLETE if line.execution is None else line.execution.status
        values.append(-1.0 if status.is_error and not wrong else 0.0)
        # Only the last line of a cell has its result.
        if status is not LineStatus.INCOMPLETE:
            wrong = status.is_error
    return values


def spared(group: GroupRewards, *, line_weight: LineWeight = 0.3) -> Advantages:
    """Compute `two_stream`, but with the table's penalties only if some rollout of the group has none.

    If all rollouts have an error, the task or the policy is the cause, and no line shows how to avoid it.
    """
    if all(min(row) < 0 for row in group.shaping_G_L if row):
        group = group.each(_without_penalty)
    return two_stream(group, line_weight=line_weight)


def _without_penalty(line: LineEarnings) -> LineEarnings:
    shaping = max(line.shaping, 0.0)
    return replace(line, reward=line.given + shaping, shaping=shaping)
