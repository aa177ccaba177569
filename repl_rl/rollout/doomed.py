"""When a rollout is given up early: a policy of one number, off by default.

A rollout is doomed after `give_up_after` lines of `ReplSampler` in a row of one kind: lines that end in the very same
error message, lines that time out, or void lines (blank, a comment or `pass` where a cell would start). It ends with
`Stop.DOOMED`; it is graded and trained on like any other. What would have followed was never sampled, so this changes
which rollouts are seen, as `max_lines` does: use it where such rollouts are known to come to nothing.
"""

from collections.abc import Sequence

from repl_rl.record.console import is_void
from repl_rl.record.trajectory import LineStatus, Stop, Trajectory
from repl_rl.sandbox.base import PushResult


class Streak:
    """Counts lines of one kind in a row."""

    def __init__(self, most: int) -> None:
        """`most`: lines of one kind in a row that doom a rollout; 0: none ever does."""
        self._most = most
        self._kind: str | None = None
        self._count = 0
        self._in_block = False

    def dooms(self, text: str, result: PushResult) -> bool:
        """Take the next line and what the console made of it; True when the rollout should end."""
        kind = self._kind_of(text, result)
        self._in_block = result.more
        self._count = self._count + 1 if kind is not None and kind == self._kind else int(kind is not None)
        self._kind = kind
        return 0 < self._most <= self._count

    def _kind_of(self, text: str, result: PushResult) -> str | None:
        if result.status is LineStatus.TIMEOUT:
            return "timeout"
        if result.status.is_error:
            return result.text.rstrip("\n").rpartition("\n")[2]
        return "void" if is_void(text) and not self._in_block and not result.more else None


def lines_saved(trajectories: Sequence[Trajectory], max_lines: int) -> int:
    """At most how many lines were not sampled because rollouts were given up."""
    return sum(max_lines - len(t.lines) for t in trajectories if t.stop is Stop.DOOMED)
