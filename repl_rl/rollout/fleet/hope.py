"""Liveness timer of a worker pool, without a clock.

It limits the time without a worker, and without an answer of the cluster.
"""

from collections.abc import Sequence

from repl_rl.errors import BrokenDown
from repl_rl.rollout.fleet.members import Lost, Waits


class Hope:
    """Timer over all calls of the owner. Retrying to start workers does not reset it."""

    def __init__(self, cluster: str, waits: Waits, now_s: float) -> None:
        """Start the timer. `cluster` is the name of the cluster in messages."""
        self._cluster, self._waits = cluster, waits
        self._manned_s = self._answered_s = now_s
        self._silence = ""

    def manned(self, now_s: float) -> None:
        """Record that a worker is ready."""
        self._manned_s = now_s

    def answered(self, now_s: float) -> None:
        """Record that the cluster has listed its slots."""
        self._answered_s, self._silence = now_s, ""

    def silent(self, why: str) -> None:
        """Record that the cluster has not answered."""
        self._silence = why

    def left_s(self, now_s: float, opening: bool, lost: Sequence[Lost]) -> float:
        """Return the remaining time to wait, seconds (> 0).

        Args:
            now_s: time on the clock that the other calls use.
            opening: True if a worker opens its engine, which has a longer timeout.
            lost: lost workers, in order.

        Raises:
            BrokenDown: the time is over.
        """
        silent_s = now_s - self._answered_s
        if self._silence and silent_s >= self._waits.silent_s:
            raise self._broken(f"on a cluster that has not answered for {silent_s:.0f} s", self._silence)
        # Opening a large model may take longer than the wait for any worker.
        limit_s = self._waits.open_s if opening else self._waits.patience_s
        left_s = self._manned_s + limit_s - now_s
        if left_s <= 0:
            # Per slot, report the last worker that was ready, else the last one: its error shows most of the cause.
            last = {one.seat: one for one in sorted(lost, key=lambda one: one.could_play)}
            words = "; ".join(f"{one.name} at {one.seat}: {one.why}" for one in last.values())
            raise self._broken(f"without a node for {limit_s:g} s", words or "none could be started")
        return left_s

    def _broken(self, how: str, words: str) -> BrokenDown:
        remedy = "see that its machines are there, and what `repl-rl fleet status` says"
        return BrokenDown(f"fleet on {self._cluster}", f"{how} ({words})", remedy)
