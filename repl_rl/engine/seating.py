"""Queue of sessions for their share of the KV cache. `seats.py` decides, and this module waits and evicts."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from repl_rl.engine.base import Pressure
from repl_rl.engine.seats import Seat, Seats

log = logging.getLogger(__name__)
HangUp = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    pass


async def undivided(call: Coroutine[object, object, None]) -> None:
    """Await `call` to its end, even if the caller is cancelled. A partial call would leave an inconsistent state."""
    calling = asyncio.ensure_future(call)
    try:
        await asyncio.shield(calling)
    except asyncio.CancelledError:
        await asyncio.wait({calling})
        raise


class Seating:
    """Access to seats. Sessions are admitted in the order of their requests, and sample in that of `Seats.next`."""

    def __init__(self, seats: Seats, most: int) -> None:
        """Start without sessions. `most` is the largest number of open sessions, regardless of their lengths (>= 1)."""
        self.pressure = Pressure()
        self._seats = seats
        self._most = most
        self._queue: deque[tuple[int, asyncio.Future[Seat]]] = deque()
        self._places: dict[Seat, Place] = {}
        self._granting = asyncio.Lock()

    @asynccontextmanager
    async def place(self, prompt: int, nested: bool = False) -> AsyncIterator["Place"]:
        """Wait until a session with a prompt of `prompt` ids is admitted, and hold its place during the block.

        A `nested` session is admitted at once, because the sessions for whose end it would wait may wait for it. It
        gets blocks like all others, at the cost of sessions that do not sample.
        """
        seat = self._seats.enter(prompt) if nested else await self._admitted(prompt)
        self._places[seat] = place = Place(self, seat)
        try:
            yield place
        finally:
            del self._places[seat]
            self._seats.leave(seat)
            # The end of a session frees a place and blocks.
            self._admit()
            self.call()

    async def take(self, place: "Place", ids: int) -> None:
        """See `Place.take`."""
        self._seats.want(place.seat, ids)
        try:
            if self._at_once(place.seat):
                return
            self.call()
            while not await self._granted(place):
                pass
        finally:
            self._seats.forgo(place.seat)
            self.call()

    def settle(self, seat: Seat, ids: int) -> None:
        """See `Place.settle`."""
        self._seats.settle(seat, ids)
        self.call()

    def drop(self, seat: Seat) -> None:
        """See `Place.dropped`."""
        self._seats.drop(seat)
        self.call()

    def call(self) -> None:
        """Wake the session that is served next. Must be called after every change."""
        turn = self._seats.next()
        if turn is not None:
            self._places[turn[0]].turn.set()

    def _at_once(self, seat: Seat) -> bool:
        """Return True if there is room, so that the session need not wait. This is the usual case."""
        if self._granting.locked() or self._seats.next() != (seat, []):
            return False
        self._seats.hold(seat)
        return True

    async def _granted(self, place: "Place") -> bool:
        await place.turn.wait()
        place.turn.clear()
        # One grant at a time, and only after the blocks of evicted sessions are really free.
        async with self._granting:
            turn = self._seats.next()
            # The order may have changed while this session waited.
            if turn is None or turn[0] is not place.seat:
                return False
            if turn[1]:
                await self._evict(turn[1])
            self._seats.hold(place.seat)
            return True

    async def _evict(self, victims: Sequence[Seat]) -> None:
        # Warn at the first eviction only.
        if not self.pressure.preempted:
            log.warning(
                "the cache is too small for the sessions that are open: keys and values of the youngest are dropped "
                "and computed again; give the engine more memory for them, or lower concurrency"
            )
        for victim in victims:
            before = self.pressure
            self.pressure = replace(before, preempted=before.preempted + 1, recomputed=before.recomputed + victim.ids)
            place = self._places.get(victim)
            # A session without a place was closed meanwhile.
            if place is not None:
                await place.hang_up()

    async def _admitted(self, prompt: int) -> Seat:
        if not self._queue and self._free(prompt):
            return self._seats.enter(prompt)
        turn: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._queue.append((prompt, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            # The seat was granted just before the cancellation, so give it back.
            if not turn.cancelled():
                self._seats.leave(turn.result())
            self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and (self._queue[0][1].done() or self._free(self._queue[0][0])):
            prompt, turn = self._queue.popleft()
            # A request that is done was cancelled.
            if not turn.done():
                turn.set_result(self._seats.enter(prompt))

    def _free(self, prompt: int) -> bool:
        return len(self._seats.open) < self._most and self._seats.admits(prompt)


class Place:
    """Handle of one session to its seat."""

    def __init__(self, seating: Seating, seat: Seat) -> None:
        self.seat = seat
        self.hang_up: HangUp = _nothing
        """Callback that gives up keys and values, then calls `dropped`, as one `undivided` call. It is called while the
        session does not sample."""
        self.turn = asyncio.Event()
        self._seating = seating

    async def take(self, ids: int) -> None:
        """Wait until the cache has blocks for `ids` ids of this session. It counts as sampling from then on.

        Its earlier blocks may be evicted meanwhile.
        """
        await self._seating.take(self, ids)

    def settle(self, ids: int) -> None:
        """Record that the session samples no more, and has `ids` ids."""
        self._seating.settle(self.seat, ids)

    def dropped(self) -> None:
        """Record that its keys and values are gone from the engine, and that it does not sample."""
        self._seating.drop(self.seat)
