"""Admission of sessions to an engine's KV cache.

`KvAdmission` decides only. `AdmissionQueue` waits for its decisions and evicts. Two rules are independent of each
other:

- A new session is *admitted* while the expected lengths of all sessions fit into the cache. This affects speed only: if
  an estimate is too low, some keys and values are computed twice.
- A session *samples* only with blocks for all ids that it may reach in this call. If blocks are missing, sessions that
  do not sample give up theirs. The youngest one is first, and none is older than the session. So the oldest session can
  always continue, and no session waits forever.
"""

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count

from repl_rl.engine.base import PreemptionStats

log = logging.getLogger(__name__)

_WINDOW = 256
"""Number of ended sessions that are remembered. Lengths drift while a policy learns."""
_ENOUGH = 8
"""Number of ended sessions after which their lengths replace the first estimate."""
_SHARE = 0.9
"""Share of sessions that gain at most the expected number of ids."""
_FIRST_SHARE, _FIRST_LEAST = 32, 1024
"""First estimate, until a session has ended: the context divided by the first value, but at least the second one."""

PreemptSession = Callable[[], Awaitable[None]]
"""Callback that gives up the keys and values of a session."""


@dataclass(frozen=True, slots=True)
class KvBlockLayout:
    """Size of a KV cache in blocks, and the blocks that a session takes."""

    blocks: int
    groups: tuple[tuple[int, int], ...]
    """Per kind of layer: ids per block, and the most blocks that a session takes. With a sliding window these are fewer
    than a full context has."""

    def count_blocks(self, ids: int) -> int:
        """Return the number of blocks of a session with `ids` ids."""
        blocks = 0
        # Called several times per line. A generator would take twice as long.
        for size, most in self.groups:
            blocks += min(-(-ids // size), most)
        return blocks


class SessionGrowthEstimator:
    """Estimate of the ids that a session gains after its prompt.

    Nine in ten of the last sessions gained at most that many.
    """

    def __init__(self, context_tokens: int, at_most: int | None = None) -> None:
        """Start with a first estimate. `at_most` is the limit of the rollouts; None means unknown."""
        self._ended: deque[int] = deque(maxlen=_WINDOW)
        first = max(context_tokens // _FIRST_SHARE, _FIRST_LEAST)
        self._first = first if at_most is None else min(first, at_most)

    def update(self, ids: int) -> None:
        """Record a session that gained `ids` ids."""
        self._ended.append(ids)

    @property
    def expected_ids(self) -> int:
        """Number of ids that the next session is expected to gain."""
        if not self._ended:
            return self._first
        # A quantile of the remembered sessions. While these are few, the first estimate is a lower bound.
        known = sorted(self._ended)[int(_SHARE * (len(self._ended) - 1))]
        return known if len(self._ended) >= _ENOUGH else max(known, self._first)


@dataclass(slots=True, eq=False)
class KvReservation:
    """Share of one open session in the KV cache."""

    number: int
    """Order of opening; a younger session has a higher number."""
    prompt: int
    """Number of ids of its prompt."""
    ids: int
    """Number of ids that it last reported."""
    held_blocks: int = 0
    """Number of blocks that it holds. An eviction sets it to 0."""
    is_sampling: bool = False
    wanted_ids: int | None = None
    """Number of ids for which it waits for blocks. None means that it does not wait."""


@dataclass(slots=True)
class KvAdmission:
    """Open sessions of one KV cache."""

    layout: KvBlockLayout
    growth_estimator: SessionGrowthEstimator
    _open: list[KvReservation] = field(default_factory=list)
    _waiting: list[KvReservation] = field(default_factory=list)
    _held: int = 0
    """Number of blocks that sessions hold."""
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def open_reservations(self) -> Sequence[KvReservation]:
        """The open sessions, oldest first."""
        return self._open

    def can_admit(self, prompt: int) -> bool:
        """Return True if another session, with a prompt of `prompt` ids, is expected to fit. The first always is."""
        growth = self.growth_estimator.expected_ids
        # Sessions that are longer than expected count with their real length.
        expected = sum(self.layout.count_blocks(max(seat.prompt + growth, seat.ids)) for seat in self._open)
        return not self._open or expected + self.layout.count_blocks(prompt + growth) <= self.layout.blocks

    def open_reservation(self, prompt: int) -> KvReservation:
        """Open a session and return its reservation."""
        seat = KvReservation(next(self._numbers), prompt, prompt)
        self._open.append(seat)
        return seat

    def close_reservation(self, seat: KvReservation) -> None:
        """Close a session and record its growth."""
        self.cancel_request(seat)
        self._set_held_blocks(seat, 0)
        self._open.remove(seat)
        self.growth_estimator.update(seat.ids - seat.prompt)

    def request_blocks(self, seat: KvReservation, ids: int) -> None:
        """Add a session to the waiting ones; it needs blocks for `ids` ids."""
        seat.wanted_ids = ids
        insort(self._waiting, seat, key=lambda other: other.number)

    def cancel_request(self, seat: KvReservation) -> None:
        """Remove a session from the waiting ones."""
        if seat.wanted_ids is not None:
            seat.wanted_ids = None
            self._waiting.remove(seat)

    def choose_next(self) -> tuple[KvReservation, list[KvReservation]] | None:
        """Return the waiting session that is served next, and the sessions that give up blocks for it, youngest first.

        The oldest session that can be served is next. If only running calls keep it from being served, no younger
        session comes before it, since they will free blocks. If older sessions keep it waiting, younger ones may come
        first.

        If no session samples, the oldest waiting one is served at the cost of older ones, so that the engine never
        idles. None means that no session can be served now.
        """
        for seat in self._waiting:
            # Free blocks suffice.
            if self._count_missing_blocks(seat) <= 0:
                return seat, []
            younger = [other for other in self._open if other.number > seat.number]
            # Otherwise younger sessions that do not sample give up blocks.
            victims = self._choose_victims(seat, younger)
            if victims is not None:
                return seat, victims
            # The blocks of all younger sessions would suffice, so wait for those that sample.
            if self._count_missing_blocks(seat) - sum(other.held_blocks for other in younger) <= 0:
                return None
        # No running call will free blocks, so even older sessions must give up theirs.
        if self._waiting and not any(seat.is_sampling for seat in self._open):
            oldest = self._waiting[0]
            return oldest, self._choose_victims(oldest, [seat for seat in self._open if seat is not oldest]) or []
        return None

    def grant_blocks(self, seat: KvReservation) -> None:
        """Give a session the blocks that it waits for; it samples from now on."""
        assert seat.wanted_ids is not None
        self._set_held_blocks(seat, self.layout.count_blocks(seat.wanted_ids))
        self.cancel_request(seat)
        seat.is_sampling = True

    def release_unused(self, seat: KvReservation, ids: int) -> None:
        """Record that a session has sampled and has `ids` ids. It gives back the blocks that it did not need."""
        seat.ids, seat.is_sampling = ids, False
        # vLLM may already compute the id after the one that ended the chunk.
        self._set_held_blocks(seat, min(seat.held_blocks, self.layout.count_blocks(ids + 1)))

    def drop_blocks(self, seat: KvReservation) -> None:
        """Record that the keys and values of a session are gone."""
        self._set_held_blocks(seat, 0)
        seat.is_sampling = False

    def _set_held_blocks(self, seat: KvReservation, blocks: int) -> None:
        self._held += blocks - seat.held_blocks
        seat.held_blocks = blocks

    def _count_missing_blocks(self, seat: KvReservation) -> int:
        """Return the number of blocks that are missing for its wanted ids; 0 or less means none."""
        assert seat.wanted_ids is not None
        return self._held - seat.held_blocks + self.layout.count_blocks(seat.wanted_ids) - self.layout.blocks

    def _choose_victims(self, seat: KvReservation, among: Sequence[KvReservation]) -> list[KvReservation] | None:
        """Return the fewest sessions of `among`, youngest first, whose blocks suffice, or None if these do not."""
        missing, victims = self._count_missing_blocks(seat), []
        for other in reversed(among):
            if missing > 0 and other.held_blocks and not other.is_sampling:
                victims.append(other)
                missing -= other.held_blocks
        return victims if missing <= 0 else None


class AdmissionQueue:
    """Queue of sessions for their share of the KV cache.

    Sessions are admitted in the order of their requests, and sample in that of `KvAdmission.choose_next`.
    """

    def __init__(self, seats: KvAdmission, most: int) -> None:
        """Start without sessions. `most` is the largest number of open sessions, regardless of their lengths (>= 1)."""
        self.preemptions = PreemptionStats()
        self._seats = seats
        self._most = most
        self._queue: deque[tuple[int, asyncio.Future[KvReservation]]] = deque()
        self._places: dict[KvReservation, KvReservationHandle] = {}
        self._granting = asyncio.Lock()

    @asynccontextmanager
    async def reserve(self, prompt: int, nested: bool = False) -> AsyncIterator["KvReservationHandle"]:
        """Wait until a session with a prompt of `prompt` ids is admitted, and hold its place during the block.

        A `nested` session is admitted at once, because the sessions for whose end it would wait may wait for it. It
        gets blocks like all others, at the cost of sessions that do not sample.
        """
        seat = self._seats.open_reservation(prompt) if nested else await self._wait_for_admission(prompt)
        self._places[seat] = place = KvReservationHandle(self, seat)
        try:
            yield place
        finally:
            del self._places[seat]
            self._seats.close_reservation(seat)
            # The end of a session frees a place and blocks.
            self._admit_waiting()
            self.wake_next()

    async def acquire_blocks(self, place: "KvReservationHandle", ids: int) -> None:
        """See `KvReservationHandle.acquire_blocks`."""
        self._seats.request_blocks(place.reservation, ids)
        try:
            if self._grant_immediately(place.reservation):
                return
            # Otherwise wait for turns, until one of them grants the blocks.
            self.wake_next()
            while not await self._grant(place):
                pass
        finally:
            self._seats.cancel_request(place.reservation)
            self.wake_next()

    def release_unused(self, seat: KvReservation, ids: int) -> None:
        """See `KvReservationHandle.release_unused`."""
        self._seats.release_unused(seat, ids)
        self.wake_next()

    def drop_blocks(self, seat: KvReservation) -> None:
        """See `KvReservationHandle.mark_dropped`."""
        self._seats.drop_blocks(seat)
        self.wake_next()

    def wake_next(self) -> None:
        """Wake the session that is served next. Must be called after every change."""
        turn = self._seats.choose_next()
        if turn is not None:
            self._places[turn[0]].turn_event.set()

    def _grant_immediately(self, seat: KvReservation) -> bool:
        """Return True if there is room, so that the session need not wait. This is the usual case."""
        if self._granting.locked() or self._seats.choose_next() != (seat, []):
            return False
        self._seats.grant_blocks(seat)
        return True

    async def _grant(self, place: "KvReservationHandle") -> bool:
        await place.turn_event.wait()
        place.turn_event.clear()
        # One grant at a time, and only after the blocks of evicted sessions are really free.
        async with self._granting:
            turn = self._seats.choose_next()
            # The order may have changed while this session waited.
            if turn is None or turn[0] is not place.reservation:
                return False
            if turn[1]:
                await self._preempt(turn[1])
            self._seats.grant_blocks(place.reservation)
            return True

    async def _preempt(self, victims: Sequence[KvReservation]) -> None:
        # Warn at the first eviction only.
        if not self.preemptions.preempted:
            log.warning(
                "the cache is too small for the sessions that are open: keys and values of the youngest are dropped "
                "and computed again; give the engine more memory for them, or lower concurrency"
            )
        for victim in victims:
            before = self.preemptions
            self.preemptions = replace(
                before, preempted=before.preempted + 1, recomputed=before.recomputed + victim.ids
            )
            place = self._places.get(victim)
            # A session without a place was closed meanwhile.
            if place is not None:
                await place.preempt()

    async def _wait_for_admission(self, prompt: int) -> KvReservation:
        if not self._queue and self._has_room(prompt):
            return self._seats.open_reservation(prompt)
        turn: asyncio.Future[KvReservation] = asyncio.get_running_loop().create_future()
        self._queue.append((prompt, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            # The session was admitted just before the cancellation, so close it again.
            if not turn.cancelled():
                self._seats.close_reservation(turn.result())
            self._admit_waiting()
            raise

    def _admit_waiting(self) -> None:
        while self._queue and (self._queue[0][1].done() or self._has_room(self._queue[0][0])):
            prompt, turn = self._queue.popleft()
            # A request that is done was cancelled.
            if not turn.done():
                turn.set_result(self._seats.open_reservation(prompt))

    def _has_room(self, prompt: int) -> bool:
        return len(self._seats.open_reservations) < self._most and self._seats.can_admit(prompt)


class KvReservationHandle:
    """Handle of one session to its reservation."""

    def __init__(self, seating: AdmissionQueue, seat: KvReservation) -> None:
        self.reservation = seat
        self.preempt: PreemptSession = _do_nothing
        """Callback that gives up keys and values, then calls `mark_dropped`, as one `shield_call` call.

        It is called while the session does not sample.
        """
        self.turn_event = asyncio.Event()
        self._seating = seating

    async def acquire_blocks(self, ids: int) -> None:
        """Wait until the cache has blocks for `ids` ids of this session. It counts as sampling from then on.

        Its earlier blocks may be evicted meanwhile.
        """
        await self._seating.acquire_blocks(self, ids)

    def release_unused(self, ids: int) -> None:
        """Record that the session samples no more, and has `ids` ids."""
        self._seating.release_unused(self.reservation, ids)

    def mark_dropped(self) -> None:
        """Record that its keys and values are gone from the engine, and that it does not sample."""
        self._seating.drop_blocks(self.reservation)


async def shield_call(call: Coroutine[object, object, None]) -> None:
    """Await `call` to its end, even if the caller is cancelled. A partial call would leave an inconsistent state."""
    calling = asyncio.ensure_future(call)
    try:
        await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait({calling})
        raise


async def _do_nothing() -> None:
    pass
