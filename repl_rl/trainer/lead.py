"""Staleness schedule of async rollouts: the weights that each step starts with, and the groups that it trains on.

This is pure logic, without clock or thread. Steps start in order. With a window of one group, steps also train in
order. No line is then staler than `Lead.ahead` steps, and a step has the same groups in every run, whichever group
ends first. A wider window lets younger groups pass a slow one, so that a step waits less.
"""

import math
from collections.abc import Iterable, Sequence

from repl_rl.errors import InvariantError


class Lead:
    """Start times of the steps of a run, with up to `ahead` steps in flight besides the current one.

    Weights n are those of the policy after n steps. With weights n, the rollouts of steps n to n + `ahead` may run.
    Step s starts with weights s - `ahead` at the earliest, and the policy trains on it at weights s.
    """

    def __init__(self, ahead: int, steps: int) -> None:
        """
        Args:
            ahead: number of steps (>= 0); with 0, a step starts after the updates of all earlier steps.
            steps: number of steps of the run; no later step starts.
        """
        self.ahead = ahead
        """Largest number of steps in flight besides the current one."""
        self._steps = steps
        self._weights = self._next = -1

    def reached(self, weights: int) -> range:
        """Record that the sampler has weights number `weights` (>= 0), and return the steps that start now, in order.

        The first call may have any number, as in a resumed run. Each later call must have the next number.

        Raises:
            InvariantError: `weights` does not follow the number of the previous call.
        """
        if self._weights >= 0 and weights != self._weights + 1:
            raise InvariantError(f"weights {weights} follow weights {self._weights}; tell of each step once, in order")
        # The last steps of a run start no further step: their range is empty.
        first = weights if self._weights < 0 else self._next
        self._weights, self._next = weights, max(first, min(weights + self.ahead + 1, self._steps))
        return range(first, self._next)


class Window:
    """FIFO window over the groups of a run: the groups that may be trained on next (MiniMax, arXiv 2605.26494).

    Groups are numbered from 0 over all steps, in the order in which they start. The window begins at the oldest group
    that is left. A group in the window that ends first may pass the oldest one; later groups have to wait.
    """

    def __init__(self, width: int, first: int = 0, taken: Iterable[int] = ()) -> None:
        """
        Args:
            width: number of groups in the window (>= 1), taken ones included; with 1, groups are taken in order.
            first: number of a group; all groups before it are taken.
            taken: numbers of other groups that are taken.
        """
        self.width = width
        """Number of groups in the window."""
        self._head, self._taken = first, set(taken)
        self._move()

    @staticmethod
    def wide(share: float, ahead: int, groups: int) -> int:
        """Return the width for a `share` of all groups in flight: those of `ahead` steps and of the current step."""
        # The small summand keeps rounding of the product from losing a group.
        return max(math.floor(share * (ahead + 1) * groups + 1e-9), 1)

    @staticmethod
    def oldest(width: int, ahead: int, groups: int) -> int:
        """Return the largest staleness of a line in steps, for steps of `groups` groups.

        At most `width` - 1 younger groups pass a group before it is taken.
        """
        return ahead + -(-(width - 1) // groups)

    def open(self, begun: int) -> Sequence[int]:
        """Return the groups that may be taken now, oldest first, out of the first `begun` groups."""
        return [group for group in range(self._head, min(self._head + self.width, begun)) if group not in self._taken]

    def take(self, group: int) -> None:
        """Mark a group as taken for training.

        Raises:
            InvariantError: the group is outside the window, or was taken before.
        """
        if group in self._taken or not self._head <= group < self._head + self.width:
            raise InvariantError(f"group {group} is none of those from {self._head} on that may be learned from")
        self._taken.add(group)
        self._move()

    def left(self, first: int, count: int) -> Sequence[int]:
        """Return the groups that are not taken, out of `count` groups from `first` on."""
        return [group for group in range(first, first + count) if group >= self._head and group not in self._taken]

    def _move(self) -> None:
        # Taken groups leave the set once the head has passed them, so that it stays small.
        while self._head in self._taken:
            self._taken.remove(self._head)
            self._head += 1
