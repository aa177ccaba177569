"""What ends how when something breaks in the middle of a step."""

import asyncio
import gc
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest

from repl_rl.engine import Chunk, EngineSession, Sampling, ScriptedEngine, Watch, open_engine
from repl_rl.errors import EngineDied
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox, Limits, LineResult, open_sandbox
from repl_rl.sandbox.inprocess import InProcessSession
from repl_rl.trajectory.trajectory import LineStatus, Stop
from repl_rl.utils.package_data import find_asset
from tests.support.scripted_rollouts import RENDERER, TASK, world

LINES = ["x = 6\n", "x * 7\n", "submit_final_answer(42)\n"]


class Dying:
    """A session on an engine whose process is gone after some chunks, for everybody."""

    def __init__(self, inner: EngineSession, chunks: Iterator[int]) -> None:
        self._inner = inner
        self._chunks = chunks

    @property
    def ids(self) -> Sequence[int]:
        return self._inner.ids

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        if next(self._chunks) >= 20:
            raise EngineDied("the process is gone")
        return await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        return await self._inner.undo(call)


class Mortal(ScriptedEngine):
    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        return self._mortal(super().session(prompt_ids, sampling))

    @asynccontextmanager
    async def _mortal(self, opening: AbstractAsyncContextManager[EngineSession]) -> AsyncIterator[EngineSession]:
        async with opening as session:
            yield Dying(session, CHUNKS)


CHUNKS = itertools.count()
"""Counts the chunks of the engine that dies."""


def test_an_engine_that_dies_in_the_middle_of_a_step_ends_the_step_with_its_error() -> None:
    engine = Mortal([[i for line in LINES for i in RENDERER.encode(line)]])
    rollouts = replace(world(LINES, concurrency=8), engine=engine)
    noise: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context["message"]))
        await rollouts.collect([TASK] * 64)

    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(work())
    assert engine.open_sessions == 0
    gc.collect()
    assert noise == []


class CutOff(Dying):
    """Never returns from its second chunk, of which one id was sampled."""

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        if next(self._chunks):
            assert isinstance(self.ids, list)
            self.ids.extend((*observed, 7))
            await asyncio.Event().wait()
        return await self._inner.sample(observed, max_tokens=max_tokens, stop_ids=stop_ids, watch=watch)


class Slow(Mortal):
    @asynccontextmanager
    async def _mortal(self, opening: AbstractAsyncContextManager[EngineSession]) -> AsyncIterator[EngineSession]:
        async with opening as session:
            yield CutOff(session, itertools.count())


def test_what_a_call_sampled_that_the_wall_clock_cut_off_is_not_recorded() -> None:
    engine = Slow([[i for line in LINES for i in RENDERER.encode(line)]])
    (t,) = asyncio.run(replace(world(LINES), engine=engine, limits=RolloutLimits(max_wall_s=0.2)).collect([TASK]))
    assert (t.stop, t.failure, [line.text for line in t.lines]) == (Stop.WALL_CLOCK, None, LINES[:1])


@pytest.mark.heavy
def test_a_killed_vllm_ends_the_step_with_engine_died() -> None:
    folder = find_asset("policies/quickstart")

    class Killing(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample(until=r"[\s\S]")  # one token: only the end token, as the first one, would be the end
            if victims:
                os.kill(victims.pop(), signal.SIGKILL)
            await super().rollout(episode)

    victims: list[int] = []

    async def work() -> None:
        async with open_sandbox("local", warm=4) as sandbox, open_engine("vllm", model=folder) as engine:
            (process,) = engine._llm.engine_core.resources.engine_manager.processes  # type: ignore[attr-defined]
            victims.append(int(process.pid))
            settings, renderer = RolloutSettings("bare", concurrency=8), Renderer.from_folder(folder)
            rollouts = Rollouts(engine, sandbox, renderer, Killing(), RolloutLimits(), settings)
            async with asyncio.timeout(30):
                with pytest.raises(EngineDied):
                    await rollouts.collect([TASK] * 8)
            assert not victims, "it was killed while the step was under way"

    asyncio.run(work())


def test_a_drained_pool_makes_rollouts_wait_and_all_of_them_end() -> None:
    async def work() -> list[Stop]:
        async with open_sandbox("local", warm=1, starting=1) as sandbox:
            rollouts = replace(world(LINES, concurrency=12), sandbox=sandbox)
            return [t.stop for t in await rollouts.collect([TASK] * 12)]

    assert asyncio.run(work()) == [Stop.ANSWERED] * 12


class StuckOnce(InProcessSandbox):
    """Its first console never answers: a kernel whose deadline was lost too."""

    first = True

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        async with super().session() as session:
            stuck, self.first = self.first, False
            yield Stuck(Limits()) if stuck else session


class Stuck(InProcessSession):
    async def push(self, line: str) -> LineResult:
        await asyncio.Event().wait()
        raise AssertionError


def test_a_console_that_never_answers_costs_its_own_rollout_only() -> None:
    limits = RolloutLimits(max_wall_s=1.5)
    rollouts = replace(world(LINES), sandbox=StuckOnce(), limits=limits)
    stops = [t.stop for t in asyncio.run(rollouts.collect([TASK] * 6))]
    assert sorted(stops) == [Stop.ANSWERED] * 5 + [Stop.WALL_CLOCK]


def test_a_line_that_hangs_its_console_times_out_and_the_others_go_on() -> None:
    async def work() -> list[LineStatus]:
        async with open_sandbox("local", limits=Limits(line_timeout_s=1.0), warm=2) as sandbox:
            hanging = replace(world(["while True: pass\n", "\n", "submit_final_answer(1)\n"]), sandbox=sandbox)
            sound = replace(world(LINES), sandbox=sandbox)
            (hung,), (fine,) = await asyncio.gather(hanging.collect([TASK]), sound.collect([TASK]))
            assert fine.stop is Stop.ANSWERED
            return [execution.status for execution in hung.executions]

    assert asyncio.run(work()) == [LineStatus.INCOMPLETE, LineStatus.TIMEOUT, LineStatus.ANSWERED]


def test_a_rollout_of_ten_thousand_lines_ends_at_its_limit() -> None:
    lines = ["x = 1\n", "x\n"] * 5000
    (t,) = asyncio.run(world(lines, limits=RolloutLimits(max_lines=10_000)).collect([TASK]))
    assert (t.stop, len(t.lines)) == (Stop.MAX_LINES, 10_000)
    assert sum(execution.status is LineStatus.OK for execution in t.executions) == 10_000
