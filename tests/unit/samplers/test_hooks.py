"""What a sampler has for each rollout: an id of its own, a beginning and an end, whatever happens in between."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from repl_rl.errors import EngineDied, SandboxFault
from repl_rl.rollout import ReplSampler, RolloutSampler, RolloutSettings
from repl_rl.rollout import concurrent_rollouts as hooks
from repl_rl.rollout.episode import Episode
from repl_rl.samplers.retry_with_feedback_sampler import Exchange, Feedback, FeedbackSampler
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import FailureKind, Stop, Trajectory
from tests.support.samplers.marked_text import chat_renderer, rollouts_of, written
from tests.support.scripted_rollouts import TASK, world

LINES = ["x = 6 * 7\n", "submit_final_answer(x)\n"]
Work = Callable[[Episode], Awaitable[None]]


class Kept(ReplSampler):
    """Has a value for each rollout, and does `work` in the middle of it."""

    def __init__(self, work: Work | None = None) -> None:
        super().__init__()
        self.work = work
        self.open: set[str] = set()
        self.began: list[str] = []
        self.ended: list[tuple[str, Trajectory | BaseException]] = []
        self.all_began = asyncio.Event()
        self.awaited = 1

    async def on_start(self, episode: Episode) -> None:
        self.began.append(episode.id)
        self.open.add(episode.id)
        if len(self.began) == self.awaited:
            self.all_began.set()

    async def rollout(self, episode: Episode) -> None:
        assert episode.id in self.open
        if self.work is not None:
            await self.work(episode)
        await super().rollout(episode)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        self.open.remove(rollout)
        self.ended.append((rollout, result))

    def once_each(self) -> None:
        """Every rollout that began has ended once, after it began."""
        assert self.open == set()
        assert Counter(self.began) == Counter(name for name, _ in self.ended)
        assert set(Counter(self.began).values()) <= {1}


def test_a_rollout_begins_and_ends_once_and_its_end_has_the_graded_trajectory() -> None:
    sampler = Kept()
    found = asyncio.run(world(LINES, sampler).collect([TASK] * 3))
    sampler.once_each()
    assert dict(sampler.ended) == {t.id: t for t in found}
    assert [t.outcome for t in found] == [1.0] * 3


async def raises(episode: Episode) -> None:
    raise KeyError("mine")


async def faults(episode: Episode) -> None:
    raise SandboxFault("the console is gone")


async def hangs(episode: Episode) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("work", "kind"), [(raises, FailureKind.USER_ERROR), (faults, FailureKind.SANDBOX_FAULT)])
def test_a_rollout_that_is_dropped_ends_with_its_failure(work: Work, kind: FailureKind) -> None:
    async def sometimes(episode: Episode) -> None:
        if episode.task.id == "bad":
            await work(episode)

    sampler = Kept(sometimes)
    asyncio.run(world(LINES, sampler).collect([TASK, TASK, replace(TASK, id="bad")]))
    sampler.once_each()
    (dropped,) = (r for _, r in sampler.ended if isinstance(r, Trajectory) and r.failure is not None)
    assert dropped.failure is not None
    assert dropped.failure.kind is kind


def test_a_rollout_that_waits_for_ever_ends_by_the_clock() -> None:
    sampler = Kept(hangs)
    rollouts = world(LINES, sampler)
    asyncio.run(replace(rollouts, limits=replace(rollouts.limits, max_wall_s=0.05)).collect([TASK]))
    sampler.once_each()
    assert [r.stop for _, r in sampler.ended if isinstance(r, Trajectory)] == [Stop.WALL_CLOCK]


def test_cancelled_rollouts_end_too() -> None:
    sampler = Kept(hangs)
    sampler.awaited = 5

    async def cancelled() -> None:
        run = asyncio.ensure_future(world(LINES, sampler).collect([TASK] * 5))
        await sampler.all_began.wait()
        run.cancel()
        await asyncio.wait({run})

    asyncio.run(cancelled())
    sampler.once_each()
    assert all(isinstance(result, asyncio.CancelledError) for _, result in sampler.ended)


def test_an_error_that_stops_the_run_ends_all_rollouts() -> None:
    async def dies(episode: Episode) -> None:
        if episode.task.id == "bad":
            raise EngineDied("gone")
        await hangs(episode)

    sampler = Kept(dies)
    with pytest.raises(EngineDied):
        asyncio.run(world(LINES, sampler).collect([TASK, TASK, replace(TASK, id="bad")]))
    sampler.once_each()
    assert {type(result) for _, result in sampler.ended} == {EngineDied, asyncio.CancelledError}


def no_judge(task: Task, answer: str) -> float:
    raise ValueError("mine")


def test_a_beginning_that_fails_drops_the_rollout_and_is_ended() -> None:
    class Fails(Kept):
        async def on_start(self, episode: Episode) -> None:
            await super().on_start(episode)
            if episode.task.id == "bad":
                raise ValueError("mine")

    sampler = Fails()
    *_, bad = asyncio.run(world(LINES, sampler).collect([TASK, TASK, replace(TASK, id="bad")]))
    sampler.once_each()
    assert bad.failure is not None
    assert bad.failure.message == "Fails.on_start raised ValueError('mine')"
    assert not bad.lines


def test_an_end_that_fails_drops_the_rollout() -> None:
    class Fails(Kept):
        async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
            await super().on_end(rollout, result)
            if "bad" in rollout:
                raise ValueError("mine")

    sampler = Fails()
    *good, bad = asyncio.run(world(LINES, sampler).collect([TASK, TASK, replace(TASK, id="bad")]))
    sampler.once_each()
    assert [t.outcome for t in good] == [1.0, 1.0]
    assert bad.failure is not None
    assert bad.failure.message == "Fails.on_end raised ValueError('mine')"
    assert bad.outcome is None


def test_an_end_that_fails_while_the_run_stops_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Kept):
        async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
            raise ValueError("mine")

    async def dies(episode: Episode) -> None:
        raise EngineDied("gone")

    with caplog.at_level(logging.WARNING), pytest.raises(EngineDied, match="gone"):
        asyncio.run(world(LINES, Fails(dies)).collect([TASK]))
    assert "Fails.on_end raised ValueError('mine')" in caplog.text


def test_an_end_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_CANCEL_S", 0.05)

    class Hangs(Kept):
        async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
            await super().on_end(rollout, result)
            if "bad" in rollout:
                await asyncio.Event().wait()

    sampler = Hangs()
    *_, bad = asyncio.run(world(LINES, sampler).collect([TASK, TASK, replace(TASK, id="bad")]))
    sampler.once_each()
    assert bad.failure is not None
    assert "Hangs.on_end took longer than 0.05 s" in bad.failure.message


def test_a_second_cancellation_does_not_take_the_end_away() -> None:
    sampler = Kept(hangs)

    async def cancelled() -> None:
        run = asyncio.ensure_future(world(LINES, sampler).collect([TASK]))
        await sampler.all_began.wait()
        while not run.done():
            run.cancel()
            await asyncio.sleep(0)

    asyncio.run(cancelled())
    sampler.once_each()


def test_no_two_rollouts_of_a_run_share_an_id_and_a_resumed_run_gives_it_again() -> None:
    async def ids() -> list[str]:
        sampler = Kept()
        rollouts = world(LINES, sampler)
        for step in range(3):
            rollouts.engine.policy_step = step
            await rollouts.collect([TASK, TASK, replace(TASK, id="other")])
            await rollouts.collect([TASK, replace(TASK, id="other")], temperature=0.0)
            await replace(rollouts, settings=RolloutSettings("bare", purpose="tampered")).collect([TASK])
            await replace(rollouts, settings=RolloutSettings("bare", replica=1)).collect([TASK])
        return sampler.began

    found = asyncio.run(ids())
    assert len(set(found)) == len(found)
    assert found == asyncio.run(ids())


class Remembers:
    """An interaction of a user: counts what it heard in its own rollout."""

    open = 0

    def __init__(self, task: Task) -> None:
        type(self).open += 1
        self.heard: list[str] = []

    async def __call__(self, exchange: Exchange) -> Feedback:
        self.heard.append(exchange.rollout)
        assert set(self.heard) == {exchange.rollout}
        return Feedback(f"That was try {len(self.heard)}.")

    async def close(self) -> None:
        type(self).open -= 1


def test_members_of_a_group_have_each_their_own_interaction_and_none_is_left() -> None:
    renderer = chat_renderer()
    sampler: RolloutSampler = FeedbackSampler(interaction=Remembers)
    ids = written(renderer, "\\boxed{1}<|im_end|>") * 3
    found = asyncio.run(rollouts_of(sampler, [ids], renderer).collect([TASK] * 8))
    for t in found:
        assert "That was try 2." in renderer.decode(t.completion_ids)
        assert "That was try 3." not in renderer.decode(t.completion_ids)
    assert Remembers.open == 0
