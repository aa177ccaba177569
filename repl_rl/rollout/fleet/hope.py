"""How long a fleet goes on without a node, or on a cluster that does not answer: pure, without a clock."""

from collections.abc import Sequence

from repl_rl.errors import BrokenDown
from repl_rl.rollout.fleet.members import Lost, Waits


class Hope:
    """It lasts from one call of the owner to the next: that nodes are tried for again and again does not renew it."""

    def __init__(self, cluster: str, waits: Waits, now_s: float) -> None:
        """`cluster`: its name, for messages."""
        self._cluster, self._waits = cluster, waits
        self._manned_s = self._answered_s = now_s
        self._silence = ""

    def manned(self, now_s: float) -> None:
        """A node is ready."""
        self._manned_s = now_s

    def answered(self, now_s: float) -> None:
        """The cluster has said where nodes can be."""
        self._answered_s, self._silence = now_s, ""

    def silent(self, why: str) -> None:
        """The cluster has not."""
        self._silence = why

    def left_s(self, now_s: float, opening: bool, lost: Sequence[Lost]) -> float:
        """How long to wait on (> 0).

        Args:
            now_s: by the clock of the other calls.
            opening: there is a node that opens its world. It may take its time: it has a limit of its own.
            lost: nodes that were lost, in order.

        Raises:
            BrokenDown: no longer.
        """
        silent_s = now_s - self._answered_s
        if self._silence and silent_s >= self._waits.silent_s:
            raise self._broken(f"on a cluster that has not answered for {silent_s:.0f} s", self._silence)
        limit_s = self._waits.open_s if opening else self._waits.patience_s
        left_s = self._manned_s + limit_s - now_s
        if left_s <= 0:
            # Of each seat the last one that could play: of those after it none came so far, and it knows more of why.
            last = {one.seat: one for one in sorted(lost, key=lambda one: one.could_play)}
            words = "; ".join(f"{one.name} at {one.seat}: {one.why}" for one in last.values())
            raise self._broken(f"without a node for {limit_s:g} s", words or "none could be started")
        return left_s

    def _broken(self, how: str, words: str) -> BrokenDown:
        remedy = "see that its machines are there, and what `repl-rl fleet status` says"
        return BrokenDown(f"fleet on {self._cluster}", f"{how} ({words})", remedy)
