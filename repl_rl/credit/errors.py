"""What an error may cost beside the table: the first of a streak alone, or only where another rollout did without.

Neither is a setting of its own: the first is a reward of lines, the second an estimator.
"""

from dataclasses import replace

from repl_rl.credit.advantages import LineWeight, two_stream
from repl_rl.credit.earnings import Advantages, GroupRewards, LineEarnings
from repl_rl.record.trajectory import LineStatus, Trajectory


def first_of_streak(trajectory: Trajectory) -> list[float]:
    """-1 for a line in error after a cell that went well, or after none; 0 for any other, errors after errors too.

    As a reward that arrives as it was given, such as two_stream(given='as_given') with
    repl_rl.credit.errors:first_of_streak=0.6: as much as an entry of -0.1 costs in `two_stream`. A policy that is bound
    to fail again pays once for it, and has to mend it before it can pay again.
    """
    values: list[float] = []
    wrong = False
    for line in trajectory.lines:
        status = LineStatus.INCOMPLETE if line.execution is None else line.execution.status
        values.append(-1.0 if status.is_error and not wrong else 0.0)
        if status is not LineStatus.INCOMPLETE:
            wrong = status.is_error
    return values


def spared(group: GroupRewards, *, line_weight: LineWeight = 0.3) -> Advantages:
    """`two_stream`, in which the table's penalties count only where some rollout of the group has none.

    Where all had an error, the task or the policy is to blame, and no line of theirs says how it could be avoided.
    """
    if all(min(row) < 0 for row in group.shaping_G_L if row):
        group = group.each(_without_penalty)
    return two_stream(group, line_weight=line_weight)


def _without_penalty(line: LineEarnings) -> LineEarnings:
    shaping = max(line.shaping, 0.0)
    return replace(line, reward=line.given + shaping, shaping=shaping)
