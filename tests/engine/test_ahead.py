"""Sampling ahead: what is kept and what is taken back, and that nobody can tell from the ids."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.engine import Engine, Sampling, ScriptedEngine
from repl_rl.engine.ahead import Guess, Tally, ahead
from repl_rl.errors import EngineError
from tests.engine.models import STOPS, Host

Step = tuple[tuple[int, ...], tuple[int, ...] | None]
"""What is observed, and what was guessed before; None: no guess."""


async def play(engine: Engine, steps: Sequence[Step], tally: Tally) -> list[int]:
    """Ids of a greedy session of one chunk, then one a step."""
    async with engine.session((5, 9), Sampling(temperature=0.0)) as inner, ahead(inner, tally) as session:
        await session.sample((), max_tokens=12, stop_ids=STOPS)
        for observed, guessed in steps:
            before = list(session.ids)
            if guessed is not None:
                session.guess(Guess(guessed, 12, STOPS))
                await asyncio.sleep(0)
            assert list(session.ids) == before
            await session.sample(observed, max_tokens=12, stop_ids=STOPS)
        return list(session.ids)


def asking() -> ScriptedEngine:
    return ScriptedEngine.asking(lambda ids: [sum(ids) % 380 + 1])


few = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@given(st.lists(st.tuples(few, st.none() | few), max_size=6))
def test_guesses_change_no_id_and_each_is_kept_or_counted_as_wasted(steps: list[Step]) -> None:
    tally = Tally()
    with_guesses = asyncio.run(play(asking(), steps, tally))
    assert with_guesses == asyncio.run(play(asking(), [(observed, None) for observed, _ in steps], Tally()))
    assert tally.kept_chunks == sum(guessed == observed for observed, guessed in steps)
    assert tally.wasted_chunks == sum(guessed not in (None, observed) for observed, guessed in steps)


STEPS: list[Step] = [((7,), (7,)), ((8,), (7,)), ((), ()), ((7,), None), ((9, 9), (8,)), ((7,), (7,))]


@pytest.mark.parametrize("kind", ["vllm_host", "transformers_host"])
def test_greedy_ids_are_the_same_with_and_without_guesses(kind: str, request: pytest.FixtureRequest) -> None:
    host: Host = request.getfixturevalue(kind)
    tally = Tally()
    plain = host.run(play(host.engine, [(observed, None) for observed, _ in STEPS], Tally()))
    assert host.run(play(host.engine, STEPS, tally)) == plain
    assert (tally.kept_chunks, tally.wasted_chunks) == (3, 2)


def test_all_that_vllm_sampled_in_vain_is_counted(vllm_host: Host) -> None:
    """Nobody is woken in the middle of a chunk, so the ids of an unfinished one are asked for."""

    async def work() -> tuple[int, int]:
        tally = Tally()
        async with vllm_host.engine.session((5, 9), Sampling()) as inner, ahead(inner, tally) as session:
            await session.sample((), max_tokens=1, stop_ids=frozenset())
            call = asyncio.create_task(inner.sample((), max_tokens=200, stop_ids=frozenset()))
            async with vllm_host.engine.session((1, 2), Sampling()) as other:  # takes as many steps of the model
                await other.sample((), max_tokens=30, stop_ids=frozenset())
            return await inner.undo(call), len(inner.ids)

    wasted, left = vllm_host.run(work())
    assert 20 <= wasted < 200
    assert left == 3


def test_an_error_of_a_wrong_guess_is_nobodys_and_of_a_right_one_is_raised() -> None:
    def engine() -> ScriptedEngine:
        made = asking()
        made.context_tokens = 8
        return made

    async def work(observed: tuple[int, ...]) -> int:
        async with engine().session((1, 2), Sampling()) as inner, ahead(inner, Tally()) as session:
            await session.sample((), max_tokens=2, stop_ids=frozenset())
            session.guess(Guess((3,) * 9, 1, frozenset()))
            return len((await session.sample(observed, max_tokens=1, stop_ids=frozenset())).token_ids)

    assert asyncio.run(work((1,))) == 1
    with pytest.raises(EngineError, match="context is full"):
        asyncio.run(work((3,) * 9))


def test_a_session_that_ends_while_it_samples_ahead_leaves_nothing_behind() -> None:
    engine, tally = asking(), Tally()

    async def work() -> None:
        async with engine.session((1, 2), Sampling()) as inner, ahead(inner, tally) as session:
            await session.sample((), max_tokens=2, stop_ids=frozenset())
            session.guess(Guess((), 5, frozenset()))
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())
    assert engine.open_sessions == 0
    assert (tally.wasted_chunks, tally.wasted_tokens) == (1, 0)
