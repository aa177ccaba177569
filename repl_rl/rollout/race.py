"""More groups than are needed: those that are done first are kept, and whatever the others have begun is cut."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from repl_rl.record.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Raced:
    """How a race ended."""

    groups: tuple[tuple[Trajectory, ...], ...]
    """The groups that are kept, whole, in the order in which they were asked for."""
    cut: int
    """Rollouts of the others, finished or not."""
    cut_tokens: int
    """Tokens after the prompt that those had, sampled and observed; of one that was under way, as far as the engine had
    them."""


class Referee:
    """Decides which groups are kept: those whose last rollout ends first.

    A group in which a rollout failed is kept only where too few others are left: failures come fast.
    """

    def __init__(self, sizes: Sequence[int], keep: int) -> None:
        """`sizes` are the groups' numbers of rollouts, which stand one group after the other; `keep` is >= 1."""
        self._group_of = [number for number, size in enumerate(sizes) for _ in range(size)]
        self._left = list(sizes)
        self._failed = [False] * len(sizes)
        self._done: list[int] = []
        self._keep = keep
        self._enough = asyncio.Event()

    @property
    def kept(self) -> list[int]:
        """Numbers of the groups that are kept, as decided so far."""
        ranked = sorted(self._done, key=lambda group: self._failed[group])  # stable: in the order they were done
        return sorted(ranked[: self._keep])

    async def decide(self, running: Mapping[int, "asyncio.Task[Trajectory]"]) -> None:
        """Wait until enough groups are done, then cancel the rollouts of all others. `running` has them by place."""
        for place, rollout in running.items():
            rollout.add_done_callback(partial(self._note, self._group_of[place]))
        await self._enough.wait()
        kept = set(self.kept)
        for place, rollout in running.items():
            if self._group_of[place] not in kept:
                rollout.cancel()

    def _note(self, group: int, rollout: "asyncio.Task[Trajectory]") -> None:
        if rollout.cancelled() or rollout.exception() is not None:
            return
        self._left[group] -= 1
        self._failed[group] |= rollout.result().failure is not None
        if not self._left[group]:
            self._done.append(group)
        sound = sum(not self._failed[group] for group in self._done)
        if sound >= self._keep or len(self._done) == len(self._left):
            self._enough.set()

    def ended(self, running: Mapping[int, "asyncio.Task[Trajectory]"], tokens: int) -> Raced:
        """What came of it, once every rollout has ended. `tokens` had those that were cut while they were under way."""
        kept = {number: list[Trajectory]() for number in self.kept}
        cut = 0
        for place, group in enumerate(self._group_of):
            rollout = running[place]
            if group in kept:
                kept[group].append(rollout.result())
                continue
            cut += 1
            if not rollout.cancelled():
                tokens += len(rollout.result().completion_ids)
        return Raced(tuple(map(tuple, kept.values())), cut, tokens)
