"""Who may have how much of an engine's cache of keys and values. Pure: `seating.py` waits and hangs up.

Two rules that know nothing of each other:

- A new session is *admitted* while the lengths that sessions are expected to reach fit into the cache. That is a matter
  of speed alone: an estimate that is too low costs keys and values that are computed twice.
- A session *samples* only with blocks for everything it may reach in this go. If it is short of blocks, sessions that
  do not sample give theirs up, the youngest first and none that is older than itself. So the oldest one can always go
  on, and nobody waits for ever.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

_WINDOW = 256
"""Sessions that are remembered: lengths drift while a policy learns."""
_ENOUGH = 8
"""Sessions that have ended before their lengths are believed more than the first guess."""
_SHARE = 0.9
"""Of sessions gain at most what is expected of all."""
_FIRST_SHARE, _FIRST_LEAST = 32, 1024
"""The first guess, while nobody has ended: this part of the context, but at least so many ids."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Blocks of keys and values, and how many of them a session takes."""

    blocks: int
    groups: tuple[tuple[int, int], ...]
    """For each kind of layer: ids a block, and the most blocks that a session takes (fewer than the context has, where
    a window slides)."""

    def taken(self, ids: int) -> int:
        """Blocks of a session of `ids` ids."""
        blocks = 0
        for size, most in self.groups:  # asked several times a line: a generator would take twice as long
            blocks += min(-(-ids // size), most)
        return blocks


class Growth:
    """How many ids a session gains after its prompt: what nine in ten of the last ones gained at most."""

    def __init__(self, context_tokens: int, at_most: int | None = None) -> None:
        """`at_most`: what the rollouts' limits leave it; None: unknown."""
        self._ended: deque[int] = deque(maxlen=_WINDOW)
        first = max(context_tokens // _FIRST_SHARE, _FIRST_LEAST)
        self._first = first if at_most is None else min(first, at_most)

    def learn(self, ids: int) -> None:
        """Take into account a session that ended after `ids` further ids."""
        self._ended.append(ids)

    @property
    def expected(self) -> int:
        """Ids that the next one is expected to gain."""
        if not self._ended:
            return self._first
        known = sorted(self._ended)[int(_SHARE * (len(self._ended) - 1))]
        return known if len(self._ended) >= _ENOUGH else max(known, self._first)


@dataclass(slots=True, eq=False)
class Seat:
    """One open session's part of the cache."""

    number: int
    """The younger the session, the higher."""
    prompt: int
    """Ids that it began with."""
    ids: int
    """Ids that it has now, as far as it told."""
    held: int = 0
    """Blocks that are its own, 0 after it was hung up."""
    sampling: bool = False
    wanted: int | None = None
    """Ids for which it waits to have blocks."""


@dataclass(slots=True)
class Seats:
    """The open sessions of one cache."""

    cache: Cache
    growth: Growth
    _open: list[Seat] = field(default_factory=list)
    _waiting: list[Seat] = field(default_factory=list)
    _held: int = 0
    """Blocks that are somebody's."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def open(self) -> Sequence[Seat]:
        """From the oldest to the youngest."""
        return self._open

    def admits(self, prompt: int) -> bool:
        """Whether one more session, of `prompt` ids, is expected to fit; the first one always is."""
        growth = self.growth.expected
        expected = sum(self.cache.taken(max(seat.prompt + growth, seat.ids)) for seat in self._open)
        return not self._open or expected + self.cache.taken(prompt + growth) <= self.cache.blocks

    def enter(self, prompt: int) -> Seat:
        """Open one."""
        seat = Seat(next(self._numbers), prompt, prompt)
        self._open.append(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """Close it."""
        self.forgo(seat)
        self._give(seat, 0)
        self._open.remove(seat)
        self.growth.learn(seat.ids - seat.prompt)

    def want(self, seat: Seat, ids: int) -> None:
        """It waits for blocks for `ids` ids."""
        seat.wanted = ids
        insort(self._waiting, seat, key=lambda other: other.number)

    def forgo(self, seat: Seat) -> None:
        """It waits no more."""
        if seat.wanted is not None:
            seat.wanted = None
            self._waiting.remove(seat)

    def next(self) -> tuple[Seat, list[Seat]] | None:
        """Whose turn it is among those who wait, and who must give up blocks for it, the youngest first.

        The oldest that can be served is. One that only those who are sampling now keep from being served lets no
        younger one before it: they will have to make room. One that older ones keep waiting lets others go first; where
        nobody samples it is served at their cost, so that the engine never stands still.
        """
        for seat in self._waiting:
            if self._over(seat) <= 0:
                return seat, []
            younger = [other for other in self._open if other.number > seat.number]
            victims = self._victims(seat, younger)
            if victims is not None:
                return seat, victims
            if self._over(seat) - sum(other.held for other in younger) <= 0:
                return None
        if self._waiting and not any(seat.sampling for seat in self._open):
            oldest = self._waiting[0]
            return oldest, self._victims(oldest, [seat for seat in self._open if seat is not oldest]) or []
        return None

    def hold(self, seat: Seat) -> None:
        """It has what it wanted, and samples."""
        assert seat.wanted is not None
        self._give(seat, self.cache.taken(seat.wanted))
        self.forgo(seat)
        seat.sampling = True

    def settle(self, seat: Seat, ids: int) -> None:
        """It has sampled, holds `ids` ids, and gives back what it did not need."""
        seat.ids, seat.sampling = ids, False
        # vLLM may have begun to compute the id after the one that ended the chunk
        self._give(seat, min(seat.held, self.cache.taken(ids + 1)))

    def drop(self, seat: Seat) -> None:
        """Its keys and values are gone."""
        self._give(seat, 0)
        seat.sampling = False

    def _give(self, seat: Seat, blocks: int) -> None:
        self._held += blocks - seat.held
        seat.held = blocks

    def _over(self, seat: Seat) -> int:
        """Blocks that are missing for what it wants, if nobody gives any up; 0 or less: none."""
        assert seat.wanted is not None
        return self._held - seat.held + self.cache.taken(seat.wanted) - self.cache.blocks

    def _victims(self, seat: Seat, among: Sequence[Seat]) -> list[Seat] | None:
        """The fewest of `among`, the youngest first, whose blocks suffice; None: they do not."""
        missing, victims = self._over(seat), []
        for other in reversed(among):
            if missing > 0 and other.held and not other.sampling:
                victims.append(other)
                missing -= other.held
        return victims if missing <= 0 else None
