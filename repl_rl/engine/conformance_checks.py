"""Conformance suite for engines: checks of the promises of an engine. Each raises AssertionError with a sentence.

Use it for your own engine::

    fixture = EngineFixture(prompt=(1, 2), observed=(3,), stop_ids=frozenset({4}), weights=folder)
    for check in CHECKS:
        await check(engine, fixture)
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Chunk, ChunkEnd, Engine, Sampling
from repl_rl.errors import EngineError

GREEDY = Sampling(temperature=0.0)
NONE: frozenset[int] = frozenset()


@keeps_old_names
@dataclass(frozen=True, slots=True)
class EngineFixture:
    """Ids that are meaningful to the engine under test. All must be in its vocabulary."""

    prompt: tuple[int, ...]
    observed: tuple[int, ...]
    stop_ids: frozenset[int]
    """Stop ids; a chunk of `patience` ids should very likely contain one of them."""
    weights: Path
    """Folder that `load_weights` accepts."""
    patience: int = 200
    concurrent_sessions: int = 64
    """Number of sessions in the check of concurrency."""
    keeps_kv_on_sync: bool = False
    """True if open sessions keep keys and values when weights change, and report the oldest policy step."""


def assert_promise(promise: bool, text: str) -> None:
    """Raise AssertionError(text) unless `promise` holds."""
    if not promise:
        raise AssertionError(text)


async def ids_are_the_prompt_then_sampled_and_observed_ids(engine: Engine, bench: EngineFixture) -> None:
    """Check that ids are only appended, in the order in which they were given or sampled."""
    expected = list(bench.prompt)
    async with engine.session(bench.prompt, Sampling()) as session:
        assert_promise(list(session.ids) == expected, "a fresh session has the prompt's ids")
        for observed in ((), bench.observed, (), bench.observed):
            chunk = await session.sample(observed, max_tokens=7, stop_ids=bench.stop_ids)
            expected += [*observed, *chunk.token_ids]
            assert_promise(list(session.ids) == expected, f"ids are {list(session.ids)}, appended were {expected}")


async def a_stop_id_ends_the_chunk_and_is_its_last(engine: Engine, bench: EngineFixture) -> None:
    """Check that a chunk keeps its stop id, has no other one, and ends with it."""
    async with engine.session(bench.prompt, Sampling(seed=1)) as session:
        for _ in range(3):
            chunk = await session.sample((), max_tokens=bench.patience, stop_ids=bench.stop_ids)
            assert_promise(
                chunk.end is ChunkEnd.STOP_ID, f"a chunk of up to {bench.patience} ids hits a stop id: {chunk.end}"
            )
            assert_promise(
                [i in bench.stop_ids for i in chunk.token_ids].index(True) == len(chunk.token_ids) - 1, "it is last"
            )


async def max_tokens_ends_the_chunk(engine: Engine, bench: EngineFixture) -> None:
    """Check that a chunk without a stop has exactly `max_tokens` ids, even right after a chunk that a stop id ended."""
    async with engine.session(bench.prompt, Sampling(seed=2)) as session:
        await session.sample((), max_tokens=bench.patience, stop_ids=bench.stop_ids)
        # The end of the chunk before is a stop id. It must not end these chunks.
        for max_tokens in (1, 5):
            chunk = await session.sample(bench.observed, max_tokens=max_tokens, stop_ids=NONE)
            assert_promise(
                len(chunk.token_ids) == max_tokens,
                f"{len(chunk.token_ids)} ids were sampled, {max_tokens} were requested",
            )
            assert_promise(chunk.end is ChunkEnd.LENGTH, f"the end is {chunk.end}")


async def every_id_has_one_finite_logprob(engine: Engine, bench: EngineFixture) -> None:
    """Check that there is one log probability per id, finite and at most 0, at any temperature."""
    for temperature in (0.0, 0.7, 1.0):
        async with engine.session(bench.prompt, Sampling(temperature=temperature)) as session:
            for _ in range(3):
                chunk = await session.sample(bench.observed, max_tokens=9, stop_ids=bench.stop_ids)
                assert_promise(len(chunk.logprobs) == len(chunk.token_ids), "as many log probabilities as ids")
                assert_promise(
                    all(math.isfinite(p) and p <= 0 for p in chunk.logprobs), f"finite and <= 0: {chunk.logprobs}"
                )


async def greedy_sampling_repeats_itself(engine: Engine, bench: EngineFixture) -> None:
    """Check that the same greedy session gives the same ids twice."""
    assert_promise(
        await _sample_session_ids(engine, bench) == await _sample_session_ids(engine, bench),
        "greedy ids are the same twice",
    )


async def a_seed_repeats_its_draws(engine: Engine, bench: EngineFixture) -> None:
    """Check that the same seed gives the same ids at temperature 1, if the engine has `seeds_sessions`."""
    if not engine.seeds_sessions:
        return
    first = await _sample_session_ids(engine, bench, Sampling(seed=5))
    assert_promise(first == await _sample_session_ids(engine, bench, Sampling(seed=5)), "seeded ids are the same twice")


async def a_continued_session_equals_a_fresh_one(engine: Engine, bench: EngineFixture) -> None:
    """Check that a continued session computes exactly the same as a fresh one that starts from the same ids."""
    async with engine.session(bench.prompt, GREEDY) as session:
        for _ in range(3):
            await session.sample(bench.observed, max_tokens=6, stop_ids=bench.stop_ids)
        # The fresh session gets all these ids as its prompt.
        start = [*session.ids, *bench.observed]
        continued = await session.sample(bench.observed, max_tokens=12, stop_ids=NONE)
    async with engine.session(start, GREEDY) as fresh:
        again = await fresh.sample((), max_tokens=12, stop_ids=NONE)
    assert_promise(
        continued.token_ids == again.token_ids, f"{continued.token_ids} were sampled, afresh {again.token_ids}"
    )
    gap = max(abs(a - b) for a, b in zip(continued.logprobs, again.logprobs, strict=True))
    assert_promise(gap < 1e-3, f"log probabilities differ by {gap} nats")


async def a_watch_ends_the_chunk_after_its_id(engine: Engine, bench: EngineFixture) -> None:
    """Check that ids past the watched one appear nowhere, and that sampling then continues as without a watch."""
    async with engine.session(bench.prompt, GREEDY) as session:
        unwatched = await session.sample(bench.observed, max_tokens=20, stop_ids=NONE)
    # Stop at the first id, and in the middle of the chunk.
    for cut in (1, 8):
        watched_ids: list[int] = []
        async with engine.session(bench.prompt, GREEDY) as session:
            chunk = await session.sample(
                bench.observed, max_tokens=20, stop_ids=NONE, watch=_make_stop_after(cut, watched_ids)
            )
            assert_promise(chunk.end is ChunkEnd.WATCH, f"the end is {chunk.end}")
            assert_promise(
                chunk.token_ids == unwatched.token_ids[:cut], f"{chunk.token_ids} were sampled before the watch stopped"
            )
            assert_promise(
                watched_ids == list(chunk.token_ids), "the watch sees each id once, in order, and none after its stop"
            )
            assert_promise(
                list(session.ids) == [*bench.prompt, *bench.observed, *chunk.token_ids], "no id past it is kept"
            )
            remaining = await session.sample((), max_tokens=20 - cut, stop_ids=NONE)
        assert_promise(
            chunk.token_ids + remaining.token_ids == unwatched.token_ids,
            "the rest is what the policy gives without a watch",
        )


async def a_call_taken_back_leaves_no_trace(engine: Engine, bench: EngineFixture) -> None:
    """Check that `undo` of a running or finished call restores the ids, and that sampling continues from there."""
    async with engine.session(bench.prompt, GREEDY) as session:
        first = await session.sample((), max_tokens=9, stop_ids=NONE)
        expected = await session.sample(bench.observed, max_tokens=9, stop_ids=NONE)
    for finished in (True, False):
        async with engine.session(bench.prompt, GREEDY) as session:
            await session.sample((), max_tokens=9, stop_ids=NONE)
            # Take back a call that is done, then one that has only started.
            call = asyncio.create_task(session.sample((), max_tokens=30, stop_ids=NONE))
            await (asyncio.wait({call}) if finished else asyncio.sleep(0))
            sampled = await session.undo(call)
            assert_promise(sampled == 30 or not finished, f"{sampled} ids were taken back, 30 were sampled")
            assert_promise(list(session.ids) == [*bench.prompt, *first.token_ids], "ids are those before the call")
            again = await session.sample(bench.observed, max_tokens=9, stop_ids=NONE)
            assert_promise(
                again.token_ids == expected.token_ids, "the policy continues as if the call had never happened"
            )


async def many_sessions_do_not_disturb_each_other(engine: Engine, bench: EngineFixture) -> None:
    """Check that each of many concurrent sessions gives the same ids as alone."""
    expected = await _sample_session_ids(engine, bench)
    results = await asyncio.gather(*(_sample_session_ids(engine, bench) for _ in range(bench.concurrent_sessions)))
    assert_promise(
        all(ids == expected for ids in results),
        f"{sum(ids != expected for ids in results)} of {bench.concurrent_sessions} sessions differ",
    )


async def a_cancelled_session_frees_the_engine(engine: Engine, bench: EngineFixture) -> None:
    """Check that a cancellation passes through, and that the engine serves other sessions at once."""
    expected = await _sample_session_ids(engine, bench)
    started = asyncio.Event()

    def watch(_token_id: int) -> bool:
        started.set()
        return False

    async def sample_endlessly() -> None:
        async with engine.session(bench.prompt, GREEDY) as session:
            while True:
                await session.sample((), max_tokens=50, stop_ids=NONE, watch=watch)

    # Cancel sessions in the middle of a call.
    tasks = [asyncio.create_task(sample_endlessly()) for _ in range(4)]
    await started.wait()
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert_promise(all(isinstance(end, asyncio.CancelledError) for end in ends), f"the tasks ended with {ends}")
    assert_promise(await _sample_session_ids(engine, bench) == expected, "a session after that is served as before")
    # A load waits for running calls. A cancelled one must not count as running.
    async with asyncio.timeout(60):
        await engine.load_weights(bench.weights, engine.policy_step)


async def a_closed_session_refuses(engine: Engine, bench: EngineFixture) -> None:
    """Check that sampling after the block is an error."""
    async with engine.session(bench.prompt, Sampling()) as session:
        await session.sample((), max_tokens=2, stop_ids=NONE)
    await _assert_refused(session.sample((), max_tokens=2, stop_ids=NONE), "a closed session")


async def what_makes_no_sense_is_refused(engine: Engine, bench: EngineFixture) -> None:
    """Check that an empty prompt and a chunk of no ids are errors, and that the engine survives them."""
    try:
        async with engine.session((), Sampling()):
            pass
    except EngineError:
        pass
    else:
        raise AssertionError("a session without a prompt is refused")
    async with engine.session(bench.prompt, Sampling()) as session:
        await _assert_refused(session.sample((), max_tokens=0, stop_ids=NONE), "a chunk of no ids")
        await session.sample((), max_tokens=1, stop_ids=NONE)


async def a_full_context_is_an_error(engine: Engine, bench: EngineFixture) -> None:
    """Check that the last chunk ends where the context ends, and that the next one is refused."""
    # Leave room for two ids.
    filled = [bench.prompt[0]] * (engine.context_tokens - 2)
    async with engine.session(filled, Sampling()) as session:
        chunk = await session.sample((), max_tokens=5, stop_ids=NONE)
        assert_promise(len(chunk.token_ids) == 2, f"2 ids fit, {len(chunk.token_ids)} were sampled")
        assert_promise(chunk.end is ChunkEnd.LENGTH, f"the end is {chunk.end}")
        await _assert_refused(session.sample((), max_tokens=1, stop_ids=NONE), "a full context")


async def loading_weights_sets_the_policy_step(engine: Engine, bench: EngineFixture) -> None:
    """Check that `policy_step` is that of the loaded weights."""
    step = engine.policy_step + 1
    await engine.load_weights(bench.weights, step)
    assert_promise(engine.policy_step == step, f"the policy step is {engine.policy_step}, loaded was {step}")


async def weights_are_replaced_between_two_calls(engine: Engine, bench: EngineFixture) -> None:
    """Check that a running call finishes before weights change, and that the next one has all ids and new weights."""
    step = engine.policy_step + 1
    async with engine.session(bench.prompt, GREEDY) as session:
        # Expected ids of three calls. The loaded weights are the same as the old ones, so the ids do not change.
        calls = [await session.sample(bench.observed, max_tokens=8, stop_ids=NONE) for _ in range(3)]
    async with engine.session(bench.prompt, GREEDY) as session:
        await session.sample(bench.observed, max_tokens=8, stop_ids=NONE)
        order: list[str] = []
        started = asyncio.Event()

        def watch(_token_id: int) -> bool:
            started.set()
            return False

        async def sample() -> None:
            chunk = await session.sample(bench.observed, max_tokens=8, stop_ids=NONE, watch=watch)
            order.append("sampled")
            assert_promise(
                (chunk.token_ids, chunk.policy_step) == (calls[1].token_ids, step - 1), "it keeps its policy"
            )

        async def load() -> None:
            await started.wait()
            await engine.load_weights(bench.weights, step)
            order.append("loaded")

        # The load starts while the second call is sampling.
        await asyncio.gather(sample(), load())
        assert_promise(order == ["sampled", "loaded"], f"a load waits for the running call: {order}")
        chunk = await session.sample(bench.observed, max_tokens=8, stop_ids=NONE)
        assert_promise(chunk.token_ids == calls[2].token_ids, "an open session continues with all of its ids")
        assert_promise(
            (chunk.policy_step, engine.policy_step) == (step - bench.keeps_kv_on_sync, step),
            f"policy step {chunk.policy_step}",
        )


async def forbidden_ids_are_never_sampled(engine: Engine, bench: EngineFixture) -> None:
    """Check that forbidden ids are never sampled, greedily, at a high temperature, or after a load.

    They may be observed.
    """
    # Observe one of them, so that it is in the context as well.
    given = sorted(engine.forbidden_ids)[:1]
    for temperature in (0.0, 2.0, 1.0):
        async with engine.session(bench.prompt, Sampling(temperature, seed=3)) as session:
            chunks = [await session.sample(given, max_tokens=bench.patience // 8, stop_ids=NONE) for _ in range(4)]
        wrong = [i for chunk in chunks for i in chunk.token_ids if i in engine.forbidden_ids]
        assert_promise(not wrong, f"forbidden ids were sampled at temperature {temperature}: {wrong}")
        await engine.load_weights(bench.weights, engine.policy_step)


EngineCheck = Callable[[Engine, EngineFixture], Awaitable[None]]
CHECKS: Sequence[EngineCheck] = (
    ids_are_the_prompt_then_sampled_and_observed_ids,
    a_stop_id_ends_the_chunk_and_is_its_last,
    max_tokens_ends_the_chunk,
    every_id_has_one_finite_logprob,
    greedy_sampling_repeats_itself,
    a_seed_repeats_its_draws,
    a_continued_session_equals_a_fresh_one,
    a_watch_ends_the_chunk_after_its_id,
    a_call_taken_back_leaves_no_trace,
    many_sessions_do_not_disturb_each_other,
    a_cancelled_session_frees_the_engine,
    a_closed_session_refuses,
    what_makes_no_sense_is_refused,
    a_full_context_is_an_error,
    loading_weights_sets_the_policy_step,
    weights_are_replaced_between_two_calls,
    forbidden_ids_are_never_sampled,
)
"""All checks. Each leaves the engine unchanged, except for the policy step."""


async def _sample_session_ids(engine: Engine, bench: EngineFixture, sampling: Sampling = GREEDY) -> list[int]:
    """Return all ids of a session of four chunks."""
    async with engine.session(bench.prompt, sampling) as session:
        for _ in range(4):
            await session.sample(bench.observed, max_tokens=8, stop_ids=bench.stop_ids)
        return list(session.ids)


def _make_stop_after(count: int, watched_ids: list[int]) -> Callable[[int], bool]:
    """Return a watch that appends each id to `watched_ids` and stops after `count` ids."""

    def watch(token_id: int) -> bool:
        watched_ids.append(token_id)
        return len(watched_ids) == count

    return watch


async def _assert_refused(call: Awaitable[Chunk | None], description: str) -> None:
    try:
        await call
    except EngineError:
        return
    raise AssertionError(f"{description} must raise an EngineError, but did not")
