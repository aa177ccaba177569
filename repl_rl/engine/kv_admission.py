"""Admission of sessions to an engine's KV cache.

`KvAdmission` decides only. `AdmissionQueue` waits for its decisions and evicts. Two rules are independent of each
other:

- A new session is *admitted* while the expected lengths of all sessions fit into the cache. This affects speed only: if
  an estimate is too low, some keys and values are computed twice.
- A session *samples* only with blocks for all ids that it may reach in this call. If blocks are missing, younger
  sessions that are not sampling are evicted, youngest first. So the oldest session can always continue, and no session
  waits forever. Only if no session samples, older sessions may be evicted, too.
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
_MIN_SESSIONS = 8
"""Number of ended sessions after which their lengths replace the first estimate."""
_QUANTILE = 0.9
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
        for size, max_blocks in self.groups:
            blocks += min(-(-ids // size), max_blocks)
        return blocks


class SessionGrowthEstimator:
    """Estimate of the ids that a session gains after its prompt.

    Nine in ten of the last sessions gained at most that many.
    """

    def __init__(self, context_tokens: int, at_most: int | None = None) -> None:
        """Start with a first estimate. `at_most` is the limit of the rollouts; None means unknown."""
        self._growths: deque[int] = deque(maxlen=_WINDOW)
        estimate = max(context_tokens // _FIRST_SHARE, _FIRST_LEAST)
        self._first_estimate = estimate if at_most is None else min(estimate, at_most)

    def update(self, ids: int) -> None:
        """Record a session that gained `ids` ids."""
        self._growths.append(ids)

    @property
    def expected_ids(self) -> int:
        """Number of ids that the next session is expected to gain."""
        if not self._growths:
            return self._first_estimate
        # A quantile of the remembered sessions. While these are few, the first estimate is a lower bound.
        quantile = sorted(self._growths)[int(_QUANTILE * (len(self._growths) - 1))]
        return quantile if len(self._growths) >= _MIN_SESSIONS else max(quantile, self._first_estimate)


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
        expected = sum(
            self.layout.count_blocks(max(reservation.prompt + growth, reservation.ids)) for reservation in self._open
        )
        return not self._open or expected + self.layout.count_blocks(prompt + growth) <= self.layout.blocks

    def open_reservation(self, prompt: int) -> KvReservation:
        """Open a session and return its reservation."""
        reservation = KvReservation(next(self._numbers), prompt, prompt)
        self._open.append(reservation)
        return reservation

    def close_reservation(self, reservation: KvReservation) -> None:
        """Close a session and record its growth."""
        self.cancel_request(reservation)
        self._set_held_blocks(reservation, 0)
        self._open.remove(reservation)
        self.growth_estimator.update(reservation.ids - reservation.prompt)

    def request_blocks(self, reservation: KvReservation, ids: int) -> None:
        """Add a session to the waiting ones; it needs blocks for `ids` ids."""
        reservation.wanted_ids = ids
        insort(self._waiting, reservation, key=lambda other: other.number)

    def cancel_request(self, reservation: KvReservation) -> None:
        """Remove a session from the waiting ones."""
        if reservation.wanted_ids is not None:
            reservation.wanted_ids = None
            self._waiting.remove(reservation)

    def choose_next(self) -> tuple[KvReservation, list[KvReservation]] | None:
        """Return the waiting session that is served next, and the sessions that give up blocks for it, youngest first.

        The oldest waiting session that can be served is next. A session may have to wait only for running calls of
        younger sessions, which will free blocks. No younger waiting session is then served before it. If it has to
        wait for older sessions, younger ones may be served first.

        If no session samples, the oldest waiting session is served, and even older sessions are evicted for it, so that
        the engine never idles. None means that no session can be served now.
        """
        for reservation in self._waiting:
            # Free blocks suffice.
            if self._count_missing_blocks(reservation) <= 0:
                return reservation, []
            younger = [other for other in self._open if other.number > reservation.number]
            # Otherwise younger sessions that do not sample give up blocks.
            victims = self._choose_victims(reservation, younger)
            if victims is not None:
                return reservation, victims
            # The blocks of all younger sessions would suffice, so wait for those that sample.
            if self._count_missing_blocks(reservation) - sum(other.held_blocks for other in younger) <= 0:
                return None
        # No running call will free blocks, so even older sessions must give up theirs.
        if self._waiting and not any(reservation.is_sampling for reservation in self._open):
            oldest = self._waiting[0]
            return oldest, self._choose_victims(
                oldest, [reservation for reservation in self._open if reservation is not oldest]
            ) or []
        return None

    def grant_blocks(self, reservation: KvReservation) -> None:
        """Give a session the blocks that it waits for; it samples from now on."""
        assert reservation.wanted_ids is not None
        self._set_held_blocks(reservation, self.layout.count_blocks(reservation.wanted_ids))
        self.cancel_request(reservation)
        reservation.is_sampling = True

    def release_unused(self, reservation: KvReservation, ids: int) -> None:
        """Record that a session has sampled and has `ids` ids. It gives back the blocks that it did not need."""
        reservation.ids, reservation.is_sampling = ids, False
        # vLLM may already compute the id after the one that ended the chunk.
        self._set_held_blocks(reservation, min(reservation.held_blocks, self.layout.count_blocks(ids + 1)))

    def drop_blocks(self, reservation: KvReservation) -> None:
        """Record that the keys and values of a session are gone."""
        self._set_held_blocks(reservation, 0)
        reservation.is_sampling = False

    def _set_held_blocks(self, reservation: KvReservation, blocks: int) -> None:
        self._held += blocks - reservation.held_blocks
        reservation.held_blocks = blocks

    def _count_missing_blocks(self, reservation: KvReservation) -> int:
        """Return the number of blocks that are missing for its wanted ids; 0 or less means none."""
        assert reservation.wanted_ids is not None
        return (
            self._held - reservation.held_blocks + self.layout.count_blocks(reservation.wanted_ids) - self.layout.blocks
        )

    def _choose_victims(
        self, reservation: KvReservation, candidates: Sequence[KvReservation]
    ) -> list[KvReservation] | None:
        """Return the fewest sessions of `candidates`, youngest first, whose blocks suffice, or None if these do not."""
        missing, victims = self._count_missing_blocks(reservation), []
        for other in reversed(candidates):
            if missing > 0 and other.held_blocks and not other.is_sampling:
                victims.append(other)
                missing -= other.held_blocks
        return victims if missing <= 0 else None


class AdmissionQueue:
    """Queue of sessions for their share of the KV cache.

    Sessions are admitted in the order of their requests, and sample in that of `KvAdmission.choose_next`.
    """

    def __init__(self, admission: KvAdmission, max_sessions: int) -> None:
        """Start without sessions. At most `max_sessions` (>= 1) are open, regardless of their lengths."""
        self.preemptions = PreemptionStats()
        self._admission = admission
        self._max_sessions = max_sessions
        self._queue: deque[tuple[int, asyncio.Future[KvReservation]]] = deque()
        self._handles: dict[KvReservation, KvReservationHandle] = {}
        self._grant_lock = asyncio.Lock()

    @asynccontextmanager
    async def reserve(self, prompt: int, nested: bool = False) -> AsyncIterator["KvReservationHandle"]:
        """Wait until a session with a prompt of `prompt` ids is admitted, and hold its reservation during the block.

        A `nested` session is admitted at once. Otherwise it could wait for a session that waits for it. It gets blocks
        by the same rules as other sessions, so idle sessions may be evicted for it.
        """
        reservation = self._admission.open_reservation(prompt) if nested else await self._wait_for_admission(prompt)
        self._handles[reservation] = handle = KvReservationHandle(self, reservation)
        try:
            yield handle
        finally:
            del self._handles[reservation]
            self._admission.close_reservation(reservation)
            # The end of a session frees its reservation and its blocks.
            self._admit_waiting()
            self.wake_next()

    async def acquire_blocks(self, handle: "KvReservationHandle", ids: int) -> None:
        """See `KvReservationHandle.acquire_blocks`."""
        self._admission.request_blocks(handle.reservation, ids)
        try:
            if self._grant_immediately(handle.reservation):
                return
            # Otherwise wait for turns, until one of them grants the blocks.
            self.wake_next()
            while not await self._grant(handle):
                pass
        finally:
            self._admission.cancel_request(handle.reservation)
            self.wake_next()

    def release_unused(self, reservation: KvReservation, ids: int) -> None:
        """See `KvReservationHandle.release_unused`."""
        self._admission.release_unused(reservation, ids)
        self.wake_next()

    def drop_blocks(self, reservation: KvReservation) -> None:
        """See `KvReservationHandle.mark_dropped`."""
        self._admission.drop_blocks(reservation)
        self.wake_next()

    def wake_next(self) -> None:
        """Wake the session that is served next. Must be called after every change."""
        turn = self._admission.choose_next()
        if turn is not None:
            self._handles[turn[0]].turn_event.set()

    def _grant_immediately(self, reservation: KvReservation) -> bool:
        """Return True if there is room, so that the session need not wait. This is the usual case."""
        if self._grant_lock.locked() or self._admission.choose_next() != (reservation, []):
            return False
        self._admission.grant_blocks(reservation)
        return True

    async def _grant(self, handle: "KvReservationHandle") -> bool:
        await handle.turn_event.wait()
        handle.turn_event.clear()
        # One grant at a time, and only after the blocks of evicted sessions are really free.
        async with self._grant_lock:
            turn = self._admission.choose_next()
            # The order may have changed while this session waited.
            if turn is None or turn[0] is not handle.reservation:
                return False
            if turn[1]:
                await self._preempt(turn[1])
            self._admission.grant_blocks(handle.reservation)
            return True

    async def _preempt(self, victims: Sequence[KvReservation]) -> None:
        # Warn at the first eviction only.
        if not self.preemptions.preempted:
            log.warning(
                "the KV cache is too small for the open sessions: keys and values of the youngest are dropped "
                "and computed again; give the engine more memory for its cache, or lower concurrency"
            )
        for victim in victims:
            before = self.preemptions
            self.preemptions = replace(
                before, preempted=before.preempted + 1, recomputed=before.recomputed + victim.ids
            )
            handle = self._handles.get(victim)
            # A session without a handle was closed meanwhile.
            if handle is not None:
                await handle.preempt()

    async def _wait_for_admission(self, prompt: int) -> KvReservation:
        if not self._queue and self._has_room(prompt):
            return self._admission.open_reservation(prompt)
        turn: asyncio.Future[KvReservation] = asyncio.get_running_loop().create_future()
        self._queue.append((prompt, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            # The session was admitted just before the cancellation, so close it again.
            if not turn.cancelled():
                self._admission.close_reservation(turn.result())
            self._admit_waiting()
            raise

    def _admit_waiting(self) -> None:
        while self._queue and (self._queue[0][1].done() or self._has_room(self._queue[0][0])):
            prompt, turn = self._queue.popleft()
            # A request that is done was cancelled.
            if not turn.done():
                turn.set_result(self._admission.open_reservation(prompt))

    def _has_room(self, prompt: int) -> bool:
        return len(self._admission.open_reservations) < self._max_sessions and self._admission.can_admit(prompt)


class KvReservationHandle:
    """Handle of one session to its reservation."""

    def __init__(self, queue: AdmissionQueue, reservation: KvReservation) -> None:
        self.reservation = reservation
        self.preempt: PreemptSession = _do_nothing
        """Callback that gives up keys and values, then calls `mark_dropped`, as one `shield_call` call.

        It is called while the session does not sample.
        """
        self.turn_event = asyncio.Event()
        self._admission_queue = queue

    async def acquire_blocks(self, ids: int) -> None:
        """Wait until the cache has blocks for `ids` ids of this session. It counts as sampling from then on.

        Its earlier blocks may be evicted meanwhile.
        """
        await self._admission_queue.acquire_blocks(self, ids)

    def release_unused(self, ids: int) -> None:
        """Record that the session samples no more, and has `ids` ids."""
        self._admission_queue.release_unused(self.reservation, ids)

    def mark_dropped(self) -> None:
        """Record that its keys and values are gone from the engine, and that it does not sample."""
        self._admission_queue.drop_blocks(self.reservation)


async def shield_call(call: Coroutine[object, object, None]) -> None:
    """Await `call` to its end, even if the caller is cancelled. A partial call would leave an inconsistent state."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def _do_nothing() -> None:
    pass
