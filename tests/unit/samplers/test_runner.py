"""Many rollouts at once, and their synchronous face."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError, EngineDied, UserCodeError
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler, SyncRollouts
from repl_rl.rollout.episode import Episode
from repl_rl.samplers import load_sampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world


def thread(rollouts: Rollouts) -> SyncRollouts:
    return SyncRollouts(lambda: nullcontext(rollouts), {TASK.id: TASK})


def untimed(trajectories: list[Trajectory]) -> list[tuple[object, ...]]:
    return [(t.id, t.seed, t.completion_ids, t.loss_mask, t.outcome, t.stop) for t in trajectories]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_the_same_seed_gives_the_same_trajectories_whatever_the_concurrency(concurrency: int) -> None:
    scripts = [[i for line in lines for i in RENDERER.encode(line)] for lines in SCRIPTS]
    tasks = [Task(str(i), f"task {i % 7}", "3") for i in range(40)]

    def play(places: int) -> list[tuple[object, ...]]:
        rollouts = replace(world([], concurrency=places), engine=ScriptedEngine(scripts, seed=5))
        return untimed(asyncio.run(rollouts.collect(tasks)))

    assert play(concurrency) == play(8)


SCRIPTS = [
    ["x = 3\n", "submit_final_answer(x)\n"],
    ["1/0\n", "submit_final_answer(3)\n"],
    ["submit_final_answer(4)\n"],
    ["if 1:\n", "    5\n", "\n", "submit_final_answer(3)\n"],
]


def test_no_more_rollouts_are_under_way_than_there_are_places() -> None:
    under_way = most = 0

    class Counter(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0)
            under_way -= 1

    rollouts = world(["x\n"], Counter(), concurrency=4)
    asyncio.run(rollouts.collect([TASK] * 30))
    assert most == 4


def test_an_error_in_one_rollout_cancels_the_others_and_rises_as_itself() -> None:
    ended: list[str] = []

    class Fragile(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            if episode.task.id == "bad":
                raise EngineDied("the engine's process is gone") from ConnectionError("lost")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(episode.task.id)

    tasks = [replace(TASK, id="a"), replace(TASK, id="b"), replace(TASK, id="bad")]
    with pytest.raises(EngineDied) as raised:
        asyncio.run(world(["x\n"], Fragile()).collect(tasks))
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert sorted(ended) == ["a", "b"]


def test_the_engine_is_left_without_open_sessions_after_an_error() -> None:
    class Faulty(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            raise ValueError("mine")

    rollouts = world(["x\n"], Faulty())
    with pytest.raises(UserCodeError, match="Faulty"):
        asyncio.run(rollouts.collect([TASK] * 5))
    assert isinstance(rollouts.engine, ScriptedEngine)
    assert rollouts.engine.open_sessions == 0


def test_the_thread_gives_trajectories_in_the_order_of_the_ids() -> None:
    with thread(world(["submit_final_answer(42)\n"])) as source:
        found = source.collect([TASK.id] * 3, policy_step=0)
    assert [t.id for t in found] == ["0-t1-0", "0-t1-1", "0-t1-2"]


def test_what_fails_while_opening_rises_and_what_was_opened_is_closed() -> None:
    closed: list[str] = []

    async def broken() -> None:
        raise ConfigError("thing", 1, "correct it")

    @asynccontextmanager
    async def opener() -> AsyncIterator[Rollouts]:
        try:
            await broken()
            yield world([])
        finally:
            closed.append("first")

    with pytest.raises(ConfigError, match="correct it"), SyncRollouts(opener, {}):
        pass
    assert closed == ["first"]


def test_an_error_in_the_thread_rises_in_the_caller_and_the_thread_goes_on() -> None:
    class Once(RolloutSampler):
        failed = False

        async def rollout(self, episode: Episode) -> None:
            if not self.failed:
                self.failed = True
                raise ValueError("mine")

    with thread(world(["x\n"], Once())) as source:
        with pytest.raises(UserCodeError):
            source.collect([TASK.id], 0)
        assert len(source.collect([TASK.id], 0)) == 1


def test_samplers_are_found_by_name_and_by_path() -> None:
    assert isinstance(load_sampler("repl"), ReplSampler)
    assert isinstance(load_sampler("repl_rl.rollout.sampler_base:ReplSampler"), ReplSampler)


@pytest.mark.parametrize("name", ["nope", "no.such.module:X", "json:Nope", "json:JSONDecoder"])
def test_what_is_no_sampler_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name.partition(":")[0]):
        load_sampler(name)
