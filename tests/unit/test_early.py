"""Rollouts that begin before the step that learns from them: weights change between their lines; nothing is left."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from repl_rl.errors import UserCodeError
from repl_rl.judges import GroupJudge
from repl_rl.rollout import ReplSampler, SyncRollouts
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.prefetch_rollouts import Prefetched
from repl_rl.rollout.rollout_hooks import GroupJudging
from repl_rl.tasks import Task, Workspace
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.scripted_rollouts import TASK, world

LINES = ["x = 3\n", "x\n", "submit_final_answer(x)\n"]
OTHER = Task("t2", "What is 1 + 2?", "3")
TASKS = {task.id: task for task in (TASK, OTHER)}


async def until(true: Callable[[], bool]) -> None:
    """Let the event loop turn until that is so."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)


class Waiting(ReplSampler):
    """The console sampler, whose rollouts wait after their first line until they are let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[str] = []
        self.written, self.on = asyncio.Semaphore(0), asyncio.Event()

    async def rollout(self, episode: Episode) -> None:
        self.began.append(episode.id)
        async for line in episode.lines():
            await episode.push(line)
            if not self.on.is_set():
                self.written.release()
                await self.on.wait()

    async def wrote(self, rollouts: int) -> None:
        for _ in range(rollouts):
            await self.written.acquire()

    async def continue_after_answer(self) -> None:
        self.on.set()


def opened(sampler: ReplSampler, lines: Sequence[str] = LINES, concurrency: int = 64) -> SyncRollouts:
    played = world(lines, sampler, concurrency=concurrency)
    return SyncRollouts(lambda: nullcontext(played), TASKS)


def test_weights_that_come_in_between_are_those_of_the_lines_after_them() -> None:
    sampler = Waiting()
    with opened(sampler) as source:
        source.start_rollouts(["t1", "t1"], 3)
        source.run(sampler.wrote(2))
        source.load_weights(Path("weights"), 2)
        source.run(sampler.continue_after_answer())
        played = source.collect(["t1", "t1"], 3)
    assert [[line.policy_step for line in t.lines] for t in played] == [[0, 2, 2]] * 2
    assert [t.policy_step for t in played] == [3, 3]


def test_ids_and_seeds_are_those_of_the_step_that_learns_whatever_weights_it_begins_with() -> None:
    with opened(ReplSampler()) as early, opened(ReplSampler()) as late:
        early.start_rollouts(["t1", "t2", "t1"], 7)
        late.load_weights(Path("weights"), 7)
        told = [[(t.id, t.seed, t.completion_ids) for t in s.collect(["t1", "t2", "t1"], 7)] for s in (early, late)]
    assert told[0] == told[1]
    assert [id for id, _, _ in told[0]] == ["7-t1-0", "7-t2-0", "7-t1-1"]


def test_steps_that_began_first_get_their_places_first() -> None:
    sampler = Waiting()
    with opened(sampler, concurrency=2) as source:
        for step in (1, 2):
            source.start_rollouts(["t1", "t1", "t1"], step)
        source.run(sampler.continue_after_answer())
        for step in (1, 2):
            source.collect(["t1", "t1", "t1"], step)
    assert sorted(sampler.began[:3]) == [f"1-t1-{n}" for n in range(3)]


def test_what_has_ended_is_told_and_is_not_played_again() -> None:
    with opened(ReplSampler()) as source:
        source.start_rollouts(["t1", "t2"], 1)
        whole = source.collect(["t1", "t2"], 1)
    sampler, workspace = Waiting(), Workspace({"x": 1})
    with opened(sampler) as source:
        source.tasks = {**TASKS, "t2": replace(OTHER, workspace=workspace)}
        source.start_rollouts(["t1", "t2"], 1, {1: whole[1]})
        source.run(sampler.continue_after_answer())
        played = source.collect(["t1", "t2"], 1)
    assert sampler.began == ["1-t1-0"]
    assert played[1] == replace(whole[1], workspace=workspace), "a record has the workspace's name alone"


def test_how_long_rollouts_took_is_learned_when_their_step_comes_and_by_a_run_that_goes_on_once() -> None:
    with opened(ReplSampler()) as source:
        source.start_rollouts(["t1", "t2"], 1)
        source._prefetched[1].rollouts.wait()
        before = source.state_dict()
        assert json.loads(json.loads(before)["lengths"]) == {}, "a clock says how far a step to come is"
        whole = source.collect(["t1", "t2"], 1)
        learned = json.loads(source.state_dict())["lengths"]
    with opened(ReplSampler()) as source:
        source.load_state_dict(before)
        source.start_rollouts(["t1", "t2"], 1, dict(enumerate(whole)))
        source.collect(["t1", "t2"], 1)
        assert json.loads(source.state_dict())["lengths"] == learned != "{}"


def test_those_that_ended_well_are_known_while_the_others_go_on() -> None:
    class Halting(Waiting):
        async def rollout(self, episode: Episode) -> None:
            if episode.id.endswith("0"):
                await super().rollout(episode)
            else:
                await ReplSampler.rollout(self, episode)
            if episode.id.endswith("2"):
                raise RuntimeError("no")

    sampler = Halting()
    with opened(sampler) as source:
        source.start_rollouts(["t1"] * 4, 1)
        source.run(sampler.wrote(1))
        source.run(until(lambda: len(source.get_finished_rollouts(1)) == 2))
        assert sorted(source.get_finished_rollouts(1)) == [1, 3], "who failed is played again"
        source.run(sampler.continue_after_answer())
        assert [t.failure is None for t in source.collect(["t1"] * 4, 1)] == [True, True, False, True]


def test_nothing_is_left_under_way_at_the_end() -> None:
    sampler = Waiting()
    with opened(sampler) as source:
        for step in (1, 2):
            source.start_rollouts(["t1", "t1"], step)
        source.run(sampler.wrote(4))
        engine = source.rollouts.engine
        assert engine.open_sessions == 4  # type: ignore[attr-defined]
    assert engine.open_sessions == 0  # type: ignore[attr-defined]


def test_an_error_of_a_step_to_come_is_raised_when_it_is_asked_for() -> None:
    class Broken(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            raise RuntimeError("no")

    with opened(Broken()) as source:
        source.start_rollouts(["t1", "t1"], 1)
        with pytest.raises(UserCodeError, match="no"):
            source.collect(["t1", "t1"], 1)


def test_a_probe_is_a_line_of_the_policy_of_now_that_no_console_runs() -> None:
    sampler = Waiting()
    with opened(sampler, concurrency=1) as source:
        source.start_rollouts(["t1"], 4)
        source.run(sampler.wrote(1))
        source.load_weights(Path("weights"), 2)
        (probe,) = source.sample_probe_lines("t1")
    (line,) = probe.lines
    assert (line.text, line.policy_step, line.execution) == ("x = 3\n", 2, None)
    assert probe.prompt.text.startswith("What is 6 * 7?")


def test_the_time_in_which_something_is_under_way_is_counted_once() -> None:
    sampler = Waiting()
    with opened(sampler) as source:
        assert source.rollout_busy_s == 0.0
        for step in (1, 2):
            source.start_rollouts(["t1"], step)
        source.run(sampler.wrote(2))
        first = source.rollout_busy_s
        assert source.rollout_busy_s > first > 0.0
        source.run(sampler.continue_after_answer())
        for step in (1, 2):
            source.collect(["t1"], step)
        assert source.rollout_busy_s == source.rollout_busy_s


def test_a_rollout_that_was_cancelled_has_not_ended_well() -> None:
    async def cancelled() -> Prefetched:
        early = Prefetched(1, asyncio.Semaphore(1))
        rollout = asyncio.create_task(asyncio.Event().wait())
        rollout.cancel()
        await asyncio.wait({rollout})
        early.record_result(0, rollout)  # type: ignore[arg-type]
        return early

    assert asyncio.run(cancelled()).finished_rollouts == {}


def test_a_group_that_has_ended_is_told_while_another_goes_on_and_waited_for_where_none_has() -> None:
    class Halting(Waiting):
        async def rollout(self, episode: Episode) -> None:
            await (super().rollout if "t1" in episode.id else partial(ReplSampler.rollout, self))(episode)

    sampler = Halting()
    with opened(sampler) as source, ThreadPoolExecutor(1) as beside:
        source.start_rollouts(["t1", "t1", "t2", "t2"], 1)
        assert source.wait_for_first_group([(1, [0, 1]), (1, [2, 3])]) == 1
        assert sorted(source.get_ended_groups(1)) == [2, 3]
        waiting = beside.submit(source.wait_for_first_group, [(1, [0, 1])])
        source.run(sampler.wrote(2))
        assert not waiting.done()
        source.run(sampler.continue_after_answer())
        assert waiting.result() == 0
        played = source.collect(["t1", "t1", "t2", "t2"], 1)
    assert [t.id for t in played] == ["1-t1-0", "1-t1-1", "1-t2-0", "1-t2-1"]


def test_what_is_told_of_a_group_that_has_ended_is_what_its_step_will_give_after_the_judges() -> None:
    judged = replace(world(LINES), hooks=(GroupJudging([GroupJudge("shortest", shortest)]),))
    with SyncRollouts(lambda: nullcontext(judged), TASKS) as source:
        source.start_rollouts(["t1", "t1", "t2"], 1)
        source.wait_for_first_group([(1, [0, 1])])
        told = {**source.get_ended_groups(1)}
        unjudged = source.get_finished_rollouts(1)
        played = source.collect(["t1", "t1", "t2"], 1)
    assert [told[0], told[1]] == played[:2]
    assert unjudged[0].outcome != played[0].outcome


def shortest(task: Task, group: Sequence[Trajectory]) -> list[float]:
    return [float(len(t.lines)) for t in group]


def test_who_waits_for_a_group_of_a_step_that_fails_waits_no_longer() -> None:
    def unable(task: Task, group: Sequence[Trajectory]) -> list[float]:
        raise RuntimeError("no")

    sampler = Waiting()
    judged = replace(world(LINES, sampler), hooks=(GroupJudging([GroupJudge("unable", unable)]),))
    with SyncRollouts(lambda: nullcontext(judged), TASKS) as source, ThreadPoolExecutor(1) as beside:
        source.start_rollouts(["t1", "t2"], 1)
        source.run(sampler.wrote(2))
        waiting = beside.submit(source.wait_for_first_group, [(1, [0]), (1, [1])])
        source.run(until(lambda: bool(source._changed._waiters)))
        source.run(sampler.continue_after_answer())
        assert waiting.result(60) == 0
        with pytest.raises(UserCodeError, match="no"):
            source.collect(["t1", "t2"], 1)
