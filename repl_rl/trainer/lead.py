"""How far rollouts may run ahead of the update: which steps begin with which weights. Pure, without clock or thread.

Steps begin in their order and are learned from in their order. So no line is older than the lead, and the groups of a
step are the same on every run, whichever of them is done first.
"""

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
        self._ahead, self._steps = ahead, steps
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
        self._weights, self._next = weights, max(first, min(weights + self._ahead + 1, self._steps))
        return range(first, self._next)
