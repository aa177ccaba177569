"""A real vLLM whose cache is too small for the sessions that are open: all of them end, and their ids are the same."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from vllm.engine.protocol import StreamingInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from repl_rl.engine import Sampling, Vllm
from repl_rl.engine.base import EngineSession, PreemptionStats
from repl_rl.engine.config import EngineOptions
from repl_rl.engine.vllm_engine import VllmEngine, open_vllm
from tests.support.engine.tiny_models import CONTEXT, STOPS, Host

GREEDY = Sampling(temperature=0.0)
SESSIONS = 8
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def tight_host(policy_folder: Path) -> Iterator[Host]:
    """20 blocks of 32 ids, one of them vLLM's own: two contexts and a bit."""
    opening = EngineOptions(policy_folder, max_sessions=32, max_growth_tokens=8)
    host = Host(open_vllm(opening, Vllm(), cache_blocks=20))
    yield host
    host.close()


def vllm_of(host: Host) -> VllmEngine:
    assert isinstance(host.engine, VllmEngine)
    return host.engine


async def long(engine: VllmEngine, number: int, arrived: asyncio.Barrier | None = None) -> list[int]:
    """Ids of a session that grows to 5 blocks, in lines, with a console in between that lets the others go on."""
    async with engine.session((5, number + 1), GREEDY) as session:
        if arrived is not None:
            await arrived.wait()
        for observed in ((), (7, 8), (300,), (), (11, 12, 13), ()):
            await session.sample(observed, max_tokens=24, stop_ids=NEVER)
            await asyncio.sleep(0)
        return list(session.ids)


@pytest.mark.heavy
def test_the_cache_is_vllms_own_without_the_block_that_stands_for_none(tight_host: Host) -> None:
    cache = vllm_of(tight_host).kv_layout
    assert (cache.blocks, cache.groups) == (19, ((32, CONTEXT // 32),))


@pytest.mark.heavy
def test_in_ten_runs_nobody_waits_for_ever_and_ids_are_those_of_a_cache_with_room_for_all(
    vllm_host: Host, tight_host: Host
) -> None:
    tight = vllm_of(tight_host)

    async def alone() -> list[list[int]]:
        return list(await asyncio.gather(*(long(vllm_of(vllm_host), n) for n in range(SESSIONS))))

    async def pressed() -> list[list[int]]:
        # otherwise those that are expected to grow too much are not even admitted
        tight._admission_queue._admission.growth_estimator._growths.clear()
        arrived = asyncio.Barrier(SESSIONS)
        async with asyncio.timeout(120):
            return list(await asyncio.gather(*(long(tight, n, arrived) for n in range(SESSIONS))))

    expected = vllm_host.run(alone())
    for run in range(10):
        before = tight.preemptions
        assert tight_host.run(pressed()) == expected, run
        lost = tight.preemptions.subtract(before)
        assert lost.preempted >= 1, "40 blocks were wanted and 19 are there"
        assert lost.recomputed > lost.preempted
    assert tight._llm.get_num_unfinished_requests() == 0


def test_sessions_that_are_expected_to_grow_wait_outside_and_none_is_preempted(tight_host: Host) -> None:
    tight = vllm_of(tight_host)
    for _ in range(9):
        tight._admission_queue._admission.growth_estimator.update(6 * 24 + 6)
    before, open_at_once = tight.preemptions, [0]

    async def counted(number: int) -> None:
        async with tight.session((5, number + 1), GREEDY) as session:
            open_at_once.append(len(tight._sessions))
            await session.sample((), max_tokens=9, stop_ids=STOPS)

    async def work() -> None:
        await asyncio.gather(*(counted(n) for n in range(SESSIONS)))

    tight_host.run(work())
    assert max(open_at_once) == 3, "5 blocks each"
    assert tight.preemptions.subtract(before) == PreemptionStats()


def test_weights_are_loaded_while_a_session_waits_for_blocks(
    tight_host: Host, policy_folder: Path, vllm_host: Host
) -> None:
    """A load waits for calls under way, and one of them for blocks of sessions that the load keeps from going on."""
    tight = vllm_of(tight_host)
    tight._admission_queue._admission.growth_estimator._growths.clear()

    async def fill(session: EngineSession) -> None:
        await session.sample((1,) * 200, max_tokens=9, stop_ids=NEVER)

    async def work() -> list[int]:
        async with (
            tight.session((5, 1), GREEDY) as first,
            tight.session((5, 2), GREEDY) as second,
            tight.session((5, 3), GREEDY) as third,
            asyncio.timeout(120),
        ):
            await asyncio.gather(fill(first), fill(second))
            sampling = asyncio.create_task(first.sample((), max_tokens=20, stop_ids=NEVER))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(fill(third))
            await asyncio.sleep(0)
            await tight.load_weights(policy_folder, 1)
            await sampling
            await waiting
            await second.sample((), max_tokens=5, stop_ids=NEVER)
            return list(second.ids)

    async def alone() -> list[int]:
        async with vllm_of(vllm_host).session((5, 2), GREEDY) as session:
            await fill(session)
            await session.sample((), max_tokens=5, stop_ids=NEVER)
            return list(session.ids)

    assert tight_host.run(work()) == vllm_host.run(alone())


def test_a_chunk_longer_than_what_is_reserved_goes_on_in_slices(tight_host: Host, vllm_host: Host) -> None:
    async def whole(engine: VllmEngine, watched: Sequence[int]) -> list[int]:
        seen: list[int] = []

        def watch(token_id: int) -> bool:
            seen.append(token_id)
            return len(seen) in watched

        async with engine.session((5, 9, 300, 7), GREEDY) as session:
            await session.sample((), max_tokens=70, stop_ids=NEVER, watch=watch if watched else None)
            call = asyncio.create_task(session.sample((4,), max_tokens=40, stop_ids=NEVER))
            await asyncio.sleep(0)
            await session.undo(call)
            await session.sample((3,), max_tokens=40, stop_ids=NEVER)
            return list(session.ids)

    tight = vllm_of(tight_host)
    shared = tight._state
    for watched in ([], [16], [17], [50]):
        tight._state = replace(shared, slice_ids=16)
        try:
            sliced = tight_host.run(whole(tight, watched))
        finally:
            tight._state = shared
        assert sliced == vllm_host.run(whole(vllm_of(vllm_host), watched))


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_watched_chunk_that_is_not_cut_short_leaves_the_session_open(vllm_host: Host, ends: str) -> None:
    engine = vllm_of(vllm_host)

    async def work() -> int:
        async with engine.session((5, 9), GREEDY) as session:
            for _ in range(3):
                stops = STOPS if ends == "stop" else NEVER
                await session.sample((), max_tokens=60, stop_ids=stops, watch=lambda token_id: False)
            (requests,) = {opened._requests for opened in engine._sessions}
            return requests

    assert vllm_host.run(work()) == 1


class Counting:
    """vLLM, and how many ids of each request it did not find in its prefix cache."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.output_processor = llm.output_processor
        self.computed: list[int] = []

    async def generate(
        self, prompt: AsyncGenerator[StreamingInput, None], parameters: SamplingParams, name: str
    ) -> AsyncGenerator[RequestOutput, None]:
        first = True
        async for output in self._llm.generate(prompt, parameters, name):
            if first:
                self.computed.append(len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0))
            first = False
            yield output


def test_after_a_match_at_most_one_block_of_ids_is_computed_again(vllm_host: Host) -> None:
    """What a watch costs a session (F19): a fenced sampler's blocks, whose every chunk ends in a match."""
    engine = vllm_of(vllm_host)
    ((block, _),) = engine.kv_layout.groups

    async def work() -> tuple[list[int], int]:
        async with engine.session((5, 9), GREEDY) as session:
            (opened,) = engine._sessions
            counting = Counting(opened._llm)
            opened._llm = cast(AsyncLLM, counting)
            for chunk in range(4):
                left = iter(range(30 + chunk))
                await session.sample((7, 8), max_tokens=60, stop_ids=NEVER, watch=partial(ended, left))
            return counting.computed, len(session.ids)

    computed, length = vllm_host.run(work())
    assert len(computed) == 4, "a match ends the request"
    assert max(computed) <= block + 2
    assert length > 4 * block


def ended(left: Iterator[int], token_id: int) -> bool:
    return next(left, None) is None
