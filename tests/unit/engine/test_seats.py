"""Who gets how much of a cache: nobody waits for ever, nobody gets what is not there."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.engine.kv_admission import AdmissionQueue, KvAdmission, KvBlockLayout, SessionGrowthEstimator, shield_call
from repl_rl.rollout.rollout_limits import RolloutLimits

CONTEXT = 131_072
LLAMA_8B = KvBlockLayout(50 * 2**30 // (16 * 2 * 32 * 8 * 128 * 2) - 1, ((16, CONTEXT // 16),))
"""50 GiB in bfloat16: blocks of 16 ids; keys and values of 32 layers with 8 heads of 128. One block is vLLM's own."""


def seats_of(blocks: int, size: int = 4, context: int = 64, guess: int | None = None) -> KvAdmission:
    return KvAdmission(KvBlockLayout(blocks, ((size, -(-context // size)),)), SessionGrowthEstimator(context, guess))


def admitted(seats: KvAdmission, prompt: int, most: int = 1000) -> int:
    while seats.can_admit(prompt) and len(seats.open_reservations) < most:
        seats.open_reservation(prompt)
    return len(seats.open_reservations)


def given_blocks(seats: KvAdmission) -> list[int]:
    """Numbers of those that are served, one after the other, until nobody can be; victims are negative."""
    told: list[int] = []
    while (turn := seats.choose_next()) is not None:
        for victim in turn[1]:
            seats.drop_blocks(victim)
            told.append(-victim.number)
        seats.grant_blocks(turn[0])
        told.append(turn[0].number)
    return told


def test_64_rollouts_of_the_bundled_lengths_are_admitted_where_three_contexts_fit() -> None:
    assert LLAMA_8B.blocks // LLAMA_8B.count_blocks(CONTEXT) == 3
    bundled = RolloutLimits()
    assert admitted(KvAdmission(LLAMA_8B, SessionGrowthEstimator(CONTEXT, bundled.max_growth_tokens)), prompt=300) >= 64
    assert admitted(KvAdmission(LLAMA_8B, SessionGrowthEstimator(CONTEXT)), prompt=300) >= 64, (
        "nor need the limits be known"
    )


def test_64_rollouts_are_admitted_for_as_long_as_what_the_last_ones_gained_fits() -> None:
    for gained, expected in ((400, 500), (6000, 64), (60_000, 6), (CONTEXT - 300, 3)):
        seats = KvAdmission(LLAMA_8B, SessionGrowthEstimator(CONTEXT))
        for _ in range(20):
            seats.growth_estimator.update(gained)
        assert expected <= admitted(seats, prompt=300) < 2 * expected + 200


def test_nine_in_ten_gain_at_most_what_is_expected_and_old_lengths_are_forgotten() -> None:
    growth = SessionGrowthEstimator(64 * 1024)
    assert growth.expected_ids == 2048
    growth.update(5000)
    assert growth.expected_ids == 5000, "longer than the first guess is believed at once"
    for gained in range(1, 101):
        growth.update(gained)
    assert growth.expected_ids in (90, 91)
    for _ in range(300):
        growth.update(7)
    assert growth.expected_ids == 7


def test_the_first_guess_is_no_more_than_the_limits_leave() -> None:
    assert SessionGrowthEstimator(CONTEXT, at_most=1408).expected_ids == 1408
    assert (
        SessionGrowthEstimator(CONTEXT, at_most=10**6).expected_ids
        == SessionGrowthEstimator(CONTEXT).expected_ids
        == 4096
    )


def test_a_session_is_expected_to_keep_what_it_has_grown_to() -> None:
    seats = seats_of(blocks=20, guess=4)
    old = seats.open_reservation(4)
    assert seats.can_admit(4)
    seats.request_blocks(old, 64)
    given_blocks(seats)
    seats.release_unused(old, 64)
    assert seats.can_admit(4)
    seats.open_reservation(4)
    assert seats.can_admit(4)
    seats.open_reservation(4)
    assert not seats.can_admit(4), "16 blocks and two sessions of 2 are there; 20 is all"


def test_blocks_of_every_kind_of_layer_count_and_a_window_takes_no_more_than_it_is_long() -> None:
    cache = KvBlockLayout(100, ((16, 8), (16, 2), (128, 1)))
    assert [cache.count_blocks(ids) for ids in (1, 16, 17, 33, 128)] == [3, 3, 5, 6, 11]


def test_the_youngest_give_way_to_an_older_one_and_never_the_other_way_round() -> None:
    seats = seats_of(blocks=8)
    a, b, c = (seats.open_reservation(4) for _ in range(3))
    for seat, ids in ((a, 8), (b, 8), (c, 16)):
        seats.request_blocks(seat, ids)
    assert given_blocks(seats) == [0, 1, 2]
    for seat, ids in ((a, 7), (b, 7), (c, 15)):
        seats.release_unused(seat, ids)
    seats.request_blocks(a, 12)
    assert given_blocks(seats) == [-2, 0]
    seats.release_unused(a, 11)
    seats.request_blocks(c, 20)
    seats.request_blocks(b, 12)
    assert given_blocks(seats) == [1], "2 waits: what is free does not suffice, and the others are older"
    seats.release_unused(b, 11)
    seats.close_reservation(a)
    assert given_blocks(seats) == [2]


def test_who_only_waits_for_those_that_sample_lets_no_younger_one_before_it() -> None:
    seats = seats_of(blocks=8)
    a, b, c = (seats.open_reservation(4) for _ in range(3))
    for seat, ids in ((a, 8), (b, 8), (c, 16)):
        seats.request_blocks(seat, ids)
    given_blocks(seats)
    seats.release_unused(a, 7)
    seats.release_unused(b, 7)
    seats.request_blocks(a, 24)
    seats.request_blocks(b, 8)
    assert given_blocks(seats) == [], "2 samples; b would fit, and might go on for ever before a"
    seats.release_unused(c, 15)
    assert given_blocks(seats) == [-2, 0, 1]


def test_who_waits_for_older_ones_lets_younger_ones_go_first() -> None:
    seats = seats_of(blocks=10)
    a, b, c = (seats.open_reservation(4) for _ in range(3))
    seats.request_blocks(a, 24)
    seats.request_blocks(b, 20)
    seats.request_blocks(c, 8)
    assert given_blocks(seats) == [0, 2]


def test_the_engine_does_not_stand_still_for_an_old_session_whose_console_works() -> None:
    seats = seats_of(blocks=10)
    a, b = seats.open_reservation(4), seats.open_reservation(4)
    seats.request_blocks(a, 24)
    given_blocks(seats)
    seats.release_unused(a, 23)
    seats.request_blocks(b, 20)
    assert given_blocks(seats) == [0, 1] or a.held_blocks == 0
    assert b.is_sampling


class Pool:
    """An engine's blocks, which it gives out as sessions really need them, and never more than there are."""

    def __init__(self, cache: KvBlockLayout) -> None:
        self.cache = cache
        self.used: dict[int, int] = {}
        self.most_open = 0

    def grow(self, number: int, ids: int) -> None:
        self.used[number] = self.cache.count_blocks(ids)
        assert sum(self.used.values()) <= self.cache.blocks, "more blocks than there are"


async def live(
    pool: Pool, seating: AdmissionQueue, prompt: int, chunks: Sequence[tuple[int, int]], slice_ids: int
) -> int:
    """A session that observes and samples, with a console in between; its ids at the end."""
    async with seating.reserve(prompt) as place:
        number, ids = place.reservation.number, prompt

        async def aborted() -> None:
            await asyncio.sleep(0)
            pool.used.pop(number, None)
            place.mark_dropped()

        async def hang_up() -> None:
            await shield_call(aborted())

        place.preempt = hang_up
        try:
            for observed, sampled in chunks:
                ids += observed
                while sampled:
                    size = min(slice_ids, sampled)
                    await place.acquire_blocks(ids + size + 1)
                    for _ in range(size):
                        ids, sampled = ids + 1, sampled - 1
                        pool.grow(number, ids)
                        await asyncio.sleep(0)
                    place.release_unused(ids)
                for _ in range(observed):
                    await asyncio.sleep(0)
        finally:
            await hang_up()
        return ids


async def crowd(seed: int, sessions: int, blocks: int, cancelled: int = 0) -> AdmissionQueue:
    draw = random.Random(seed)
    cache = KvBlockLayout(blocks, ((4, 16),))
    seating, pool = (
        AdmissionQueue(KvAdmission(cache, SessionGrowthEstimator(64, 8)), max_sessions=sessions),
        Pool(cache),
    )
    chunks = [[(draw.randrange(3), draw.randrange(1, 9)) for _ in range(draw.randrange(1, 6))] for _ in range(sessions)]
    tasks = [asyncio.create_task(live(pool, seating, draw.randrange(1, 9), plan, 5)) for plan in chunks]
    for task in draw.sample(tasks, cancelled):
        for _ in range(draw.randrange(20)):
            await asyncio.sleep(0)
        task.cancel()
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(end, int) for end in ends) >= sessions - cancelled, ends
    assert not seating._admission.open_reservations
    assert not seating._queue
    return seating


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(17, 40), st.integers(0, 6))
def test_however_much_sessions_grow_all_of_them_end_and_none_has_what_is_not_there(
    seed: int, sessions: int, blocks: int, cancelled: int
) -> None:
    asyncio.run(crowd(seed, sessions, blocks, min(cancelled, sessions)))


def test_a_cache_that_is_too_small_is_told_once_in_the_log_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    seating = asyncio.run(crowd(seed=3, sessions=12, blocks=17))
    assert seating.preemptions.preempted > 1
    assert seating.preemptions.recomputed > seating.preemptions.preempted
    assert caplog.text.count("cache is too small") == 1


def test_sessions_are_admitted_in_the_order_in_which_they_ask_also_past_one_that_is_cancelled() -> None:
    order: list[int] = []

    async def enter(seating: AdmissionQueue, number: int, done: asyncio.Event) -> None:
        async with seating.reserve(4):
            order.append(number)
            await done.wait()

    async def work() -> None:
        seating = AdmissionQueue(seats_of(blocks=100), max_sessions=1)
        done = asyncio.Event()
        tasks = [asyncio.create_task(enter(seating, number, done)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        done.set()
        await asyncio.wait(tasks)

    asyncio.run(work())
    assert order == [0, 2, 3]


async def visit(seating: AdmissionQueue, prompt: int, done: asyncio.Event) -> None:
    async with seating.reserve(prompt):
        await done.wait()


def test_one_that_is_cancelled_at_the_moment_of_its_admission_leaves_the_place_to_the_next() -> None:
    async def work() -> None:
        seating, done, never = AdmissionQueue(seats_of(blocks=100), max_sessions=1), asyncio.Event(), asyncio.Event()
        async with seating.reserve(4):
            second, third = asyncio.create_task(visit(seating, 4, never)), asyncio.create_task(visit(seating, 4, done))
            await asyncio.sleep(0)
        second.cancel()  # it was admitted a moment ago, and does not know it yet
        done.set()
        async with asyncio.timeout(10):
            await third
        assert second.cancelled()

    asyncio.run(work())


def test_when_one_that_asks_for_much_gives_up_those_behind_it_are_admitted_at_once() -> None:
    async def work() -> None:
        seating, done, never = (
            AdmissionQueue(seats_of(blocks=20, guess=4), max_sessions=9),
            asyncio.Event(),
            asyncio.Event(),
        )
        async with seating.reserve(32):
            much, little = asyncio.create_task(visit(seating, 60, never)), asyncio.create_task(visit(seating, 4, done))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            much.cancel()
            done.set()
            async with asyncio.timeout(10):
                await little

    asyncio.run(work())


def test_when_one_that_waits_for_blocks_gives_up_those_behind_it_are_served_at_once() -> None:
    async def work() -> None:
        seating = AdmissionQueue(seats_of(blocks=8, guess=1), max_sessions=9)
        async with seating.reserve(1) as a, seating.reserve(1) as b, seating.reserve(1) as c:
            await c.acquire_blocks(16)
            waiting = asyncio.create_task(a.acquire_blocks(32))
            await asyncio.sleep(0)
            behind = asyncio.create_task(b.acquire_blocks(8))
            for _ in range(9):
                await asyncio.sleep(0)
            assert not behind.done(), "it might go on for ever before the older one"
            waiting.cancel()
            async with asyncio.timeout(10):
                await behind

    asyncio.run(work())
