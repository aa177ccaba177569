"""Early stopping of a rollout after a streak of equal errors, timeouts or void lines; off by default.

A rollout ends after `give_up_after` consecutive lines of `ReplSampler` of one kind. The kinds are lines that end in the
very same error message, lines that time out, and void lines. A void line is blank, a comment or `pass` where a cell
would start.

The rollout ends with `Stop.DOOMED`. It is graded and trained on like any other. Later lines are never sampled, so early
stopping changes which rollouts are seen, as `max_lines` does. Use it if such rollouts are known to fail.
"""

from collections.abc import Sequence

from repl_rl.record.console import is_void
from repl_rl.record.trajectory import LineStatus, Stop, Trajectory
from repl_rl.sandbox.base import PushResult


class Streak:
    """Counter of consecutive lines of one kind."""

    def __init__(self, most: int) -> None:
        """Set the number of consecutive lines of one kind that stops a rollout; 0 disables it."""
        self._most = most
        self._kind: str | None = None
        self._count = 0
        self._in_block = False

    def dooms(self, text: str, result: PushResult) -> bool:
        """Count a line with its result, and return True if the rollout should end."""
        kind = self._kind_of(text, result)
        self._in_block = result.more
        self._count = self._count + 1 if kind is not None and kind == self._kind else int(kind is not None)
        self._kind = kind
        return 0 < self._most <= self._count

    def _kind_of(self, text: str, result: PushResult) -> str | None:
        if result.status is LineStatus.TIMEOUT:
            return "timeout"
        if result.status.is_error:
            # The last line of a traceback has the error class and its message.
            return result.text.rstrip("\n").rpartition("\n")[2]
        return "void" if is_void(text) and not self._in_block and not result.more else None


def lines_saved(trajectories: Sequence[Trajectory], max_lines: int) -> int:
    """Return the largest number of lines that early stopping can have saved."""
    return sum(max_lines - len(t.lines) for t in trajectories if t.stop is Stop.DOOMED)
