"""How far rollouts may run ahead of the update: which steps begin with which weights, and what each learns from.

Pure, without clock or thread. Steps begin in their order. With a window of one group they are learned from in their
order, too: no line is older than the lead, and the groups of a step are the same on every run, whichever of them is
done first. A wider window lets younger groups pass one that takes long, so that a step waits for less.
"""

import math
from collections.abc import Iterable, Sequence

from repl_rl.errors import InvariantError


class Lead:
    """The steps of a run, of which `ahead` may be under way beside the one that is learned from.

    With weights n, those of the policy that has learned from n steps, the rollouts of steps n to n + `ahead` may be
    under way: step s begins with weights s - `ahead` at the earliest, and is learned from at weights s.
    """

    def __init__(self, ahead: int, steps: int) -> None:
        """
        Args:
            ahead: how many steps (>= 0); 0: a step's rollouts begin when all before it is learned.
            steps: of the run; none after them begins.
        """
        self.ahead = ahead
        """Steps."""
        self._steps = steps
        self._weights = self._next = -1

    def reached(self, weights: int) -> range:
        """The sampler has weights number `weights` (>= 0). Returns the steps that begin now, in order.

        The first call may be for any of them, as in a run that is gone on with; then they come one by one.

        Raises:
            InvariantError: they do not.
        """
        if self._weights >= 0 and weights != self._weights + 1:
            raise InvariantError(f"weights {weights} follow weights {self._weights}; tell of each step once, in order")
        first = weights if self._weights < 0 else self._next
        self._weights, self._next = weights, max(first, min(weights + self.ahead + 1, self._steps))
        return range(first, self._next)


class Window:
    """Which groups may be learned from next, of all groups of a run in the order in which they begin.

    They are counted from 0 over all steps. Those within a window that begins with the oldest one that is left may be:
    what is done first passes it, and nothing further on does (windowed FIFO: MiniMax, arXiv 2605.26494).
    """

    def __init__(self, width: int, first: int = 0, taken: Iterable[int] = ()) -> None:
        """
        Args:
            width: how many groups it holds (>= 1), of which some may have been taken; 1: they are taken in order.
            first: all before this one are taken.
            taken: others that are.
        """
        self.width = width
        """Groups."""
        self._head, self._taken = first, set(taken)
        self._move()

    @staticmethod
    def wide(share: float, ahead: int, groups: int) -> int:
        """Its width as a share of the groups that are under way, of `ahead` steps and the one that is learned from."""
        return max(math.floor(share * (ahead + 1) * groups + 1e-9), 1)

    @staticmethod
    def oldest(width: int, ahead: int, groups: int) -> int:
        """How many steps old a line can be when it is learned from, where a step takes so many groups.

        A group waits until `width` - 1 younger ones have passed it, at most.
        """
        return ahead + -(-(width - 1) // groups)

    def open(self, begun: int) -> Sequence[int]:
        """Groups that may be taken now, the oldest first, of the first `begun` ones: those that have begun."""
        return [group for group in range(self._head, min(self._head + self.width, begun)) if group not in self._taken]

    def take(self, group: int) -> None:
        """It is learned from.

        Raises:
            InvariantError: it is not within the window, or was taken before.
        """
        if group in self._taken or not self._head <= group < self._head + self.width:
            raise InvariantError(f"group {group} is none of those from {self._head} on that may be learned from")
        self._taken.add(group)
        self._move()

    def left(self, first: int, count: int) -> Sequence[int]:
        """Those that are not taken, of so many from `first` on."""
        return [group for group in range(first, first + count) if group >= self._head and group not in self._taken]

    def _move(self) -> None:
        while self._head in self._taken:
            self._taken.remove(self._head)
            self._head += 1
