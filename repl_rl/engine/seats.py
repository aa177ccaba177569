"""Distribution of an engine's KV cache to sessions. This module only decides; `seating.py` waits and evicts.

Two rules that are independent of each other:

- A new session is *admitted* while the expected lengths of all sessions fit into the cache. This affects speed only: if
  an estimate is too low, some keys and values are computed twice.
- A session *samples* only with blocks for all ids that it may reach in this call. If blocks are missing, sessions that
  do not sample give up theirs. The youngest one is first, and none is older than the session. So the oldest session can
  always continue, and no session waits forever.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

_WINDOW = 256
"""Number of ended sessions that are remembered. Lengths drift while a policy learns."""
_ENOUGH = 8
"""Number of ended sessions after which their lengths replace the first estimate."""
_SHARE = 0.9
"""Share of sessions that gain at most the expected number of ids."""
_FIRST_SHARE, _FIRST_LEAST = 32, 1024
"""First estimate, until a session has ended: the context divided by the first value, but at least the second one."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Size of a KV cache in blocks, and the blocks that a session takes."""

    blocks: int
    groups: tuple[tuple[int, int], ...]
    """Per kind of layer: ids per block, and the most blocks that a session takes. With a sliding window these are fewer
    than a full context has."""

    def taken(self, ids: int) -> int:
        """Return the number of blocks of a session with `ids` ids."""
        blocks = 0
        # Called several times per line. A generator would take twice as long.
        for size, most in self.groups:
            blocks += min(-(-ids // size), most)
        return blocks


class Growth:
    """Estimate of the ids that a session gains after its prompt.

    Nine in ten of the last sessions gained at most that many.
    """

    def __init__(self, context_tokens: int, at_most: int | None = None) -> None:
        """Start with a first estimate. `at_most` is the limit of the rollouts; None means unknown."""
        self._ended: deque[int] = deque(maxlen=_WINDOW)
        first = max(context_tokens // _FIRST_SHARE, _FIRST_LEAST)
        self._first = first if at_most is None else min(first, at_most)

    def learn(self, ids: int) -> None:
        """Record a session that gained `ids` ids."""
        self._ended.append(ids)

    @property
    def expected(self) -> int:
        """Number of ids that the next session is expected to gain."""
        if not self._ended:
            return self._first
        # A quantile of the remembered sessions. While these are few, the first estimate is a lower bound.
        known = sorted(self._ended)[int(_SHARE * (len(self._ended) - 1))]
        return known if len(self._ended) >= _ENOUGH else max(known, self._first)


@dataclass(slots=True, eq=False)
class Seat:
    """Share of one open session in the KV cache."""

    number: int
    """Order of opening; a younger session has a higher number."""
    prompt: int
    """Number of ids of its prompt."""
    ids: int
    """Number of ids that it last reported."""
    held: int = 0
    """Number of blocks that it holds. An eviction sets it to 0."""
    sampling: bool = False
    wanted: int | None = None
    """Number of ids for which it waits for blocks. None means that it does not wait."""


@dataclass(slots=True)
class Seats:
    """Open sessions of one KV cache."""

    cache: Cache
    growth: Growth
    _open: list[Seat] = field(default_factory=list)
    _waiting: list[Seat] = field(default_factory=list)
    _held: int = 0
    """Number of blocks that sessions hold."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def open(self) -> Sequence[Seat]:
        """The open sessions, oldest first."""
        return self._open

    def admits(self, prompt: int) -> bool:
        """Return True if another session, with a prompt of `prompt` ids, is expected to fit. The first always is."""
        growth = self.growth.expected
        # Sessions that are longer than expected count with their real length.
        expected = sum(self.cache.taken(max(seat.prompt + growth, seat.ids)) for seat in self._open)
        return not self._open or expected + self.cache.taken(prompt + growth) <= self.cache.blocks

    def enter(self, prompt: int) -> Seat:
        """Open a session and return its seat."""
        seat = Seat(next(self._numbers), prompt, prompt)
        self._open.append(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """Close a session and record its growth."""
        self.forgo(seat)
        self._give(seat, 0)
        self._open.remove(seat)
        self.growth.learn(seat.ids - seat.prompt)

    def want(self, seat: Seat, ids: int) -> None:
        """Add a session to the waiting ones; it needs blocks for `ids` ids."""
        seat.wanted = ids
        insort(self._waiting, seat, key=lambda other: other.number)

    def forgo(self, seat: Seat) -> None:
        """Remove a session from the waiting ones."""
        if seat.wanted is not None:
            seat.wanted = None
            self._waiting.remove(seat)

    def next(self) -> tuple[Seat, list[Seat]] | None:
        """Return the waiting session that is served next, and the sessions that give up blocks for it, youngest first.

        The oldest session that can be served is next. If only running calls keep it from being served, no younger
        session comes before it, since they will free blocks. If older sessions keep it waiting, younger ones may come
        first.

        If no session samples, the oldest waiting one is served at the cost of older ones, so that the engine never
        idles. None means that no session can be served now.
        """
        for seat in self._waiting:
            # Free blocks suffice.
            if self._over(seat) <= 0:
                return seat, []
            younger = [other for other in self._open if other.number > seat.number]
            # Otherwise younger sessions that do not sample give up blocks.
            victims = self._victims(seat, younger)
            if victims is not None:
                return seat, victims
            # The blocks of all younger sessions would suffice, so wait for those that sample.
            if self._over(seat) - sum(other.held for other in younger) <= 0:
                return None
        # No running call will free blocks, so even older sessions must give up theirs.
        if self._waiting and not any(seat.sampling for seat in self._open):
            oldest = self._waiting[0]
            return oldest, self._victims(oldest, [seat for seat in self._open if seat is not oldest]) or []
        return None

    def hold(self, seat: Seat) -> None:
        """Give a session the blocks that it waits for; it samples from now on."""
        assert seat.wanted is not None
        self._give(seat, self.cache.taken(seat.wanted))
        self.forgo(seat)
        seat.sampling = True

    def settle(self, seat: Seat, ids: int) -> None:
        """Record that a session has sampled and has `ids` ids. It gives back the blocks that it did not need."""
        seat.ids, seat.sampling = ids, False
        # vLLM may already compute the id after the one that ended the chunk.
        self._give(seat, min(seat.held, self.cache.taken(ids + 1)))

    def drop(self, seat: Seat) -> None:
        """Record that the keys and values of a session are gone."""
        self._give(seat, 0)
        seat.sampling = False

    def _give(self, seat: Seat, blocks: int) -> None:
        self._held += blocks - seat.held
        seat.held = blocks

    def _over(self, seat: Seat) -> int:
        """Return the number of blocks that are missing for its wanted ids; 0 or less means none."""
        assert seat.wanted is not None
        return self._held - seat.held + self.cache.taken(seat.wanted) - self.cache.blocks

    def _victims(self, seat: Seat, among: Sequence[Seat]) -> list[Seat] | None:
        """Return the fewest sessions of `among`, youngest first, whose blocks suffice, or None if these do not."""
        missing, victims = self._over(seat), []
        for other in reversed(among):
            if missing > 0 and other.held and not other.sampling:
                victims.append(other)
                missing -= other.held
        return victims if missing <= 0 else None
