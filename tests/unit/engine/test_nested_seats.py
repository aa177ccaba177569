"""Sessions that others wait for while they hold their own: none of them waits for a seat, and all of them end."""

import asyncio

import pytest

from repl_rl.engine.kv_admission import (
    AdmissionQueue,
    KvAdmission,
    KvBlockLayout,
    KvReservationHandle,
    SessionGrowthEstimator,
    shield_call,
)
from tests.unit.engine.test_seats import Pool

PARENTS, BLOCKS = 5, 8
"""A session grows to 7 blocks: the cache has room for one."""


class Asking:
    """Sessions that ask others in the middle of their growth."""

    def __init__(self, *, nested: bool) -> None:
        cache = KvBlockLayout(BLOCKS, ((4, 16),))
        self.nested = nested
        self.pool = Pool(cache)
        self.seating = AdmissionQueue(KvAdmission(cache, SessionGrowthEstimator(64, 2)), max_sessions=PARENTS)
        self.ended = 0

    async def session(self, depth: int) -> None:
        """One that asks another one, as long as `depth` is above 0."""
        async with self.seating.reserve(4, nested=self.nested and depth < 2) as place:
            self._let_go(place)
            ids = await self._grown(place, 4)
            if depth:
                await self.session(depth - 1)
            await self._grown(place, ids)
            await place.preempt()
        self.ended += 1

    async def _grown(self, place: KvReservationHandle, ids: int) -> int:
        await place.acquire_blocks(ids + 12)
        for _ in range(11):
            ids += 1
            self.pool.grow(place.reservation.number, ids)
            await asyncio.sleep(0)
        place.release_unused(ids)
        return ids

    def _let_go(self, place: KvReservationHandle) -> None:
        async def aborted() -> None:
            await asyncio.sleep(0)
            self.pool.used.pop(place.reservation.number, None)
            place.mark_dropped()

        async def hang_up() -> None:
            await shield_call(aborted())

        place.preempt = hang_up

    async def all(self, timeout_s: float) -> int:
        """How many sessions end, of `PARENTS` that ask one which asks another."""
        tasks = [asyncio.create_task(self.session(2)) for _ in range(PARENTS)]
        _, waiting = await asyncio.wait(tasks, timeout=timeout_s)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return self.ended


def test_sessions_within_sessions_end_in_a_cache_with_room_for_one() -> None:
    async def main() -> int:
        return await Asking(nested=True).all(60)

    assert asyncio.run(main()) == 3 * PARENTS


@pytest.mark.timeout(30)
def test_they_would_wait_for_each_other_if_they_queued_for_a_seat() -> None:
    async def main() -> int:
        return await Asking(nested=False).all(0.5)

    assert asyncio.run(main()) < 3 * PARENTS
