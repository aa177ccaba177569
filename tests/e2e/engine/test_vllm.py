"""What only a real vLLM can show."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from repl_rl.engine import Chunk, RequestMode, Sampling, open_engine
from repl_rl.engine.conformance_checks import (
    a_continued_session_equals_a_fresh_one,
    a_watch_ends_the_chunk_after_its_id,
)
from repl_rl.engine.vllm_engine import VllmEngine, await_or_raise_death
from repl_rl.errors import EngineDied, EngineError
from tests.support.engine.tiny_models import Host, bench, gap_to_torch, rollout, save_policy


def vllm_of(host: Host) -> VllmEngine:
    assert isinstance(host.engine, VllmEngine)
    return host.engine


def load(host: Host, folder: Path, step: int = 1) -> None:
    host.run(host.engine.load_weights(folder, step))


def core_pid(engine: VllmEngine) -> int:
    (process,) = engine._llm.engine_core.resources.engine_manager.processes
    return int(process.pid)


def test_vllm_runs_sessions_and_reports_no_fallback(vllm_host: Host) -> None:
    assert vllm_of(vllm_host).request_mode is RequestMode.SESSION
    assert vllm_of(vllm_host).fallback_reason is None


def test_logprobs_are_those_of_a_torch_forward(vllm_host: Host, policy_folder: Path) -> None:
    load(vllm_host, policy_folder)
    assert gap_to_torch(vllm_host, policy_folder) < 1e-4


def test_loaded_weights_are_those_that_sample(vllm_host: Host, policy_folder: Path, other_folder: Path) -> None:
    load(vllm_host, other_folder)
    try:
        assert gap_to_torch(vllm_host, other_folder) < 1e-4
        assert gap_to_torch(vllm_host, policy_folder) > 0.1
    finally:
        load(vllm_host, policy_folder)


def test_an_open_session_goes_on_with_the_weights_that_were_loaded_meanwhile(
    vllm_host: Host, policy_folder: Path, other_folder: Path
) -> None:
    engine = vllm_of(vllm_host)
    greedy = Sampling(temperature=0.0)

    async def work() -> tuple[Chunk, Chunk]:
        async with engine.session((5, 1), greedy) as session:
            await session.sample((2,), max_tokens=9, stop_ids=frozenset())
            await engine.load_weights(other_folder, 2)
            ids = [*session.ids, 3]
            after = await session.sample((3,), max_tokens=9, stop_ids=frozenset())
        async with engine.session(ids, greedy) as fresh:
            return after, await fresh.sample((), max_tokens=9, stop_ids=frozenset())

    load(vllm_host, policy_folder)
    try:
        after, fresh = vllm_host.run(work())
    finally:
        load(vllm_host, policy_folder)
    assert after.token_ids == fresh.token_ids
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_sessions_and_requests_a_line_give_the_same_greedy_ids(vllm_host: Host) -> None:
    engine = vllm_of(vllm_host)
    greedy = Sampling(temperature=0.0)

    async def both() -> tuple[object, object]:
        streamed = await asyncio.gather(*(rollout(engine, greedy, (5, i + 1)) for i in range(32)))
        sessions = engine._state
        engine.set_request_mode(RequestMode.REQUEST)
        try:
            requested = await asyncio.gather(*(rollout(engine, greedy, (5, i + 1)) for i in range(32)))
        finally:
            engine._state = sessions
        return [ids for ids, _ in streamed], [ids for ids, _ in requested]

    streamed, requested = vllm_host.run(both())
    assert streamed == requested


@pytest.mark.parametrize("check", [a_continued_session_equals_a_fresh_one, a_watch_ends_the_chunk_after_its_id])
def test_requests_a_line_keep_the_promises_too(vllm_host: Host, policy_folder: Path, check: object) -> None:
    engine = vllm_of(vllm_host)
    sessions = engine._state
    engine.set_request_mode(RequestMode.REQUEST)

    async def work() -> None:
        await check(engine, bench(policy_folder))  # type: ignore[operator]

    try:
        vllm_host.run(work())
    finally:
        engine._state = sessions


def test_a_failed_health_check_falls_back_and_says_so(
    vllm_host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vllm_of(vllm_host)
    sessions = engine._state
    honest = engine._sample_greedy

    async def lying(drive: RequestMode) -> list[int]:
        ids = await honest(drive)
        return ids if drive is RequestMode.REQUEST else [*ids, 0]

    monkeypatch.setattr(engine, "_sample_greedy", lying)
    try:
        vllm_host.run(engine.check_streaming())
        assert engine.request_mode is RequestMode.REQUEST
        assert "greedy ids" in str(engine.fallback_reason)
        assert "one request per line" in caplog.text
    finally:
        engine._state, engine.fallback_reason = sessions, None


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(
    vllm_host: Host, policy_folder: Path, tmp_path: Path
) -> None:
    load(vllm_host, policy_folder, step=4)
    tied = save_policy(tmp_path / "tied", seed=3, tied=True)
    with pytest.raises(EngineError, match=r"lm_head\.weight is None"):
        load(vllm_host, tied, step=5)
    with pytest.raises(EngineError, match=r"has no model\.safetensors and no "):
        load(vllm_host, tmp_path, step=5)
    assert vllm_host.engine.policy_step == 4
    assert gap_to_torch(vllm_host, policy_folder) < 1e-4


def test_all_ids_of_a_call_that_is_taken_back_are_counted(vllm_host: Host) -> None:
    """Nobody is woken in the middle of a chunk, so the ids of an unfinished one are asked for."""

    async def work() -> tuple[int, int]:
        async with vllm_host.engine.session((5, 9), Sampling()) as session:
            await session.sample((), max_tokens=1, stop_ids=frozenset())
            call = asyncio.create_task(session.sample((), max_tokens=200, stop_ids=frozenset()))
            async with vllm_host.engine.session((1, 2), Sampling()) as other:  # takes as many steps of the model
                await other.sample((), max_tokens=30, stop_ids=frozenset())
            return await session.undo(call), len(session.ids)

    undone, left = vllm_host.run(work())
    assert 20 <= undone < 200
    assert left == 3


def test_a_cancelled_session_leaves_nothing_in_vllm(vllm_host: Host) -> None:
    engine = vllm_of(vllm_host)

    async def work() -> None:
        begun = asyncio.Event()

        async def long() -> None:
            async with engine.session((1, 2), Sampling()) as session:
                await session.sample((), max_tokens=1, stop_ids=frozenset())
                begun.set()
                await session.sample((), max_tokens=250, stop_ids=frozenset())

        task = asyncio.create_task(long())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert engine._llm.get_num_unfinished_requests() == 0

    vllm_host.run(work())


def test_the_processes_of_consoles_do_not_inherit_what_vllm_preloads(vllm_host: Host) -> None:
    assert "LD_PRELOAD" not in os.environ


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("tied"), seed=0, tied=True)


@pytest.fixture(scope="module")
def tied_host(tied_folder: Path) -> Iterator[Host]:
    host = Host(open_engine("vllm", model=tied_folder, max_sessions=32))
    yield host
    host.close()


@pytest.mark.heavy
def test_tied_models_load_their_output_layer_too(tied_host: Host, tied_folder: Path, tmp_path: Path) -> None:
    assert gap_to_torch(tied_host, tied_folder) < 1e-4
    after = save_policy(tmp_path / "after", seed=1, tied=True)
    load(tied_host, after)
    assert gap_to_torch(tied_host, after) < 1e-4
    assert gap_to_torch(tied_host, tied_folder) > 0.1


def test_every_open_session_hears_that_the_process_died(tied_host: Host, tied_folder: Path) -> None:
    engine = vllm_of(tied_host)

    async def work() -> list[object]:
        begun = asyncio.Semaphore(0)

        async def endless() -> None:
            while True:
                async with engine.session((1, 2), Sampling()) as session:
                    for _ in range(10):
                        await session.sample((), max_tokens=20, stop_ids=frozenset())
                        begun.release()

        tasks = [asyncio.create_task(endless()) for _ in range(16)]
        for _ in tasks:
            await begun.acquire()
        os.kill(core_pid(engine), signal.SIGKILL)
        async with asyncio.timeout(20):
            return await asyncio.gather(*tasks, return_exceptions=True)

    ends = tied_host.run(work())
    assert all(isinstance(end, EngineDied) for end in ends), ends
    with pytest.raises(EngineDied):
        load(tied_host, tied_folder)


class Dead:
    """An engine's process that died over a call."""

    errored = True


def test_a_call_that_a_dead_process_never_answers_ends_with_the_reason() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(EngineDied, match="died during a call"):
        asyncio.run(await_or_raise_death(Dead(), never()))


def test_an_answer_is_given_even_where_the_process_died_after_it() -> None:
    async def seven() -> int:
        return 7

    assert asyncio.run(await_or_raise_death(Dead(), seven())) == 7
