"""The public fake: scripts, seeds, and thousands of sessions."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.engine import ChunkEnd, Sampling, ScriptedEngine
from repl_rl.errors import EngineError

NEWLINE = 10


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


async def lines_of(engine: ScriptedEngine, prompt: Sequence[int], sampling: Sampling, count: int) -> list[bytes]:
    async with engine.session(prompt, sampling) as session:
        chunks = [await session.sample((1, 2), max_tokens=99, stop_ids=frozenset({NEWLINE})) for _ in range(count)]
    return [bytes(chunk.token_ids) for chunk in chunks]


def test_lines_come_back_one_a_chunk() -> None:
    engine = ScriptedEngine.from_text(["x = 1\n", "print(x)\n"], encode)
    assert asyncio.run(lines_of(engine, [0], Sampling(), 2)) == [b"x = 1\n", b"print(x)\n"]


def test_a_script_that_ran_out_is_an_error_that_says_so() -> None:
    engine = ScriptedEngine.from_text(["x\n"], encode)
    with pytest.raises(EngineError, match="the script has 2 ids and all were sampled"):
        asyncio.run(lines_of(engine, [0], Sampling(), 2))


def test_a_policy_sees_every_id_so_far() -> None:
    seen: list[list[int]] = []

    def policy(ids: Sequence[int]) -> tuple[int, ...]:
        seen.append(list(ids))
        return (65, NEWLINE, 66)

    asyncio.run(lines_of(ScriptedEngine.from_policy(policy), [7], Sampling(), 2))
    assert seen == [[7, 1, 2], [7, 1, 2, 65, NEWLINE, 1, 2]]


def test_a_policy_without_ids_is_an_error() -> None:
    with pytest.raises(EngineError, match="returned 0 ids"):
        asyncio.run(lines_of(ScriptedEngine.from_policy(lambda _ids: ()), [7], Sampling(), 1))


def test_an_engine_without_script_or_policy_is_refused() -> None:
    with pytest.raises(EngineError, match="0 scripts"):
        ScriptedEngine([])


@given(order=st.permutations(range(12)), seed=st.integers(0, 5))
def test_scripts_depend_on_seed_and_prompt_not_on_the_order_of_arrival(order: list[int], seed: int) -> None:
    scripts = [encode(f"{letter}\n" * 3) for letter in "abcdefgh"]

    async def run(arrivals: Sequence[int]) -> dict[int, list[bytes]]:
        engine = ScriptedEngine(scripts, seed=seed)
        ends = await asyncio.gather(*(lines_of(engine, [i % 3], Sampling(seed=i), 3) for i in arrivals))
        return dict(zip(arrivals, ends, strict=True))

    assert asyncio.run(run(order)) == asyncio.run(run(range(12)))


def test_rollouts_of_one_prompt_differ_by_their_seeds() -> None:
    engine = ScriptedEngine([encode(f"{letter}\n") for letter in "abcdefgh"])

    async def run() -> list[list[bytes]]:
        return await asyncio.gather(*(lines_of(engine, [1], Sampling(seed=i), 1) for i in range(32)))

    assert len({line for (line,) in asyncio.run(run())}) == 8


def test_four_thousand_sessions_run_at_once() -> None:
    engine = ScriptedEngine.from_text(["x = 1\n"] * 4, encode)
    most = 0

    async def one(start: asyncio.Barrier) -> None:
        nonlocal most
        async with engine.session([0], Sampling()) as session:
            await start.wait()
            most = max(most, engine.open_sessions)
            for _ in range(4):
                chunk = await session.sample((1,), max_tokens=50, stop_ids=frozenset({NEWLINE}))
                assert chunk.end is ChunkEnd.STOP_ID

    async def run() -> None:
        start = asyncio.Barrier(4096)
        await asyncio.gather(*(one(start) for _ in range(4096)))

    asyncio.run(run())
    assert (most, engine.open_sessions) == (4096, 0)
