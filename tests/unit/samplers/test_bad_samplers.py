"""A sampler that misbehaves in one rollout: that one is dropped with a clear reason, the others do not notice."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.engine import Chunk, Sampling, ScriptedEngine, Watch
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout import ReplSampler, RolloutSampler
from repl_rl.rollout import concurrent_rollouts as hooks
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import FailureKind, Prompt, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, world

LINES = ["x = 6 * 7\n", "submit_final_answer(x)\n"]
TASKS = [Task(name, f"{name}?", "42") for name in ("a", "sick", "b", "c")]


class Sick(ReplSampler):
    """Does `misbehave` on the task `sick`, and is a line console on the others."""

    async def rollout(self, episode: Episode) -> None:
        if episode.task.id == "sick":
            await self.misbehave(episode)
        await super().rollout(episode)

    async def misbehave(self, episode: Episode) -> None:
        raise NotImplementedError


def collect(sampler: RolloutSampler, limits: RolloutLimits | None = None) -> list[Trajectory]:
    return asyncio.run(world(LINES, sampler, limits).collect(TASKS))


def record(t: Trajectory) -> tuple[object, ...]:
    return t.id, t.completion_ids, t.loss_mask, t.logprobs_T(), t.outcome, t.stop


HEALTHY = [record(t) for t in collect(ReplSampler()) if t.task_id != "sick"]


def dropped(sampler: RolloutSampler) -> Trajectory:
    """The record of the sick rollout, after comparing the others with what they are without it."""
    found = collect(sampler)
    assert [record(t) for t in found if t.task_id != "sick"] == HEALTHY
    (sick,) = (t for t in found if t.task_id == "sick")
    assert sick.stop is Stop.FAULT
    assert not sick.trainable
    assert sick.outcome is None
    return sick


def reason(sampler: RolloutSampler) -> str:
    failure = dropped(sampler).failure
    assert failure is not None
    assert failure.kind is FailureKind.USER_ERROR
    return failure.message


def test_a_sampler_that_raises_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Sick):
        async def misbehave(self, episode: Episode) -> None:
            await episode.sample()
            raise KeyError("mine")

    with caplog.at_level(logging.WARNING):
        assert reason(Raises()) == "Raises.rollout raised KeyError('mine')"
    assert "1 of 4 rollouts dropped: Raises.rollout raised" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_named(value: float) -> None:
    class Rewards(Sick):
        async def misbehave(self, episode: Episode) -> None:
            await episode.sample()
            episode.reward(value, name="style")

    assert reason(Rewards()) == f"Rewards.rollout: episode.reward(name='style') is {value!r}; give a finite number"


def test_sampling_twice_at_once_is_named() -> None:
    class Hasty(Sick):
        async def misbehave(self, episode: Episode) -> None:
            await asyncio.gather(episode.sample(), episode.sample())

    assert "await each call to its end" in reason(Hasty())


def test_a_sampler_that_swallows_its_cancellation_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(Sick):
        async def misbehave(self, episode: Episode) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()

    monkeypatch.setattr(hooks, "_CANCEL_S", 0.05)
    found = collect(Stubborn(), RolloutLimits(max_wall_s=1.0))
    assert [record(t) for t in found if t.task_id != "sick"] == HEALTHY
    assert found[1].failure is not None
    assert "let asyncio.CancelledError pass" in found[1].failure.message


def test_a_sampler_that_never_finishes_is_ended_by_the_wall_clock_and_graded() -> None:
    class Waits(Sick):
        async def misbehave(self, episode: Episode) -> None:
            await asyncio.Event().wait()

    found = collect(Waits(), RolloutLimits(max_wall_s=1.0))
    assert [record(t) for t in found if t.task_id != "sick"] == HEALTHY
    assert (found[1].stop, found[1].outcome) == (Stop.WALL_CLOCK, 0.0)


class HalfAChunk:
    """An engine whose calls sample one id and then take for ever, as a slow model does when its time is over."""

    name = "half"
    policy_step = 0
    context_tokens = 1_000
    fallback_reason: str | None = None
    seeds_sessions = True
    forbidden_ids = frozenset[int]()

    @asynccontextmanager
    async def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncIterator["HalfAChunk"]:
        self.ids = list(prompt_ids)
        yield self

    async def sample(
        self, observed: Sequence[int], *, max_tokens: int, stop_ids: frozenset[int], watch: Watch | None = None
    ) -> Chunk:
        self.ids += [*observed, 7]
        await asyncio.Event().wait()
        raise AssertionError

    async def undo(self, call: asyncio.Task[Chunk]) -> int:
        raise NotImplementedError

    async def load_weights(self, folder: Path, policy_step: int) -> None:
        raise NotImplementedError


def test_what_was_sampled_when_the_time_was_over_is_not_recorded() -> None:
    rollouts = replace(world(LINES, limits=RolloutLimits(max_wall_s=0.1)), engine=HalfAChunk())
    (t,) = asyncio.run(rollouts.collect(TASKS[:1]))
    assert (t.stop, t.completion_ids, t.trainable) == (Stop.WALL_CLOCK, (), False)


def test_a_call_that_was_interrupted_cannot_be_followed_by_another() -> None:
    class Impatient(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            try:
                await asyncio.wait_for(episode.sample(), timeout=0.05)
            except TimeoutError:
                await episode.sample()

    rollouts = replace(world(LINES, Impatient()), engine=HalfAChunk())
    with pytest.raises(UserCodeError, match="after one was interrupted"):
        asyncio.run(rollouts.collect(TASKS[:1]))


def test_a_sampler_that_samples_for_ever_is_ended_by_its_lines() -> None:
    class Talks(Sick):
        async def misbehave(self, episode: Episode) -> None:
            while not episode.ended:
                await episode.sample(until="x", max_tokens=5)
                episode.observe("go on")

    scripts = [list(RENDERER.encode("x" * 100))]
    rollouts = replace(world([], Talks()), engine=ScriptedEngine(scripts))
    (t,) = asyncio.run(rollouts.collect([TASKS[1]]))
    assert (t.stop, len(t.lines)) == (Stop.MAX_LINES, 8)


def test_an_observation_of_a_megabyte_is_cut_visibly_and_holds_nobody_up() -> None:
    class Chatty(Sick):
        async def misbehave(self, episode: Episode) -> None:
            await episode.sample()
            episode.observe("é\n" * 500_000)
            episode.finish()

    started = time.perf_counter()
    found = collect(Chatty())
    assert time.perf_counter() - started < 3
    assert [record(t) for t in found if t.task_id != "sick"] == HEALTHY
    observed = found[1].segments[1]
    assert len(observed.token_ids) < 200
    assert "tokens cut" in RENDERER.decode(observed.token_ids)


def test_a_run_stops_when_most_rollouts_fail() -> None:
    class Broken(ReplSampler):
        async def rollout(self, episode: Episode) -> None:
            if episode.task.id != "a":
                raise ValueError("mine")
            await super().rollout(episode)

    with pytest.raises(UserCodeError, match=r"Broken\.rollout raised ValueError\('mine'\)"):
        collect(Broken())


def test_a_prompt_that_raises_is_named_before_anything_is_sampled() -> None:
    class NoPrompt(ReplSampler):
        def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
            raise LookupError("no such image")

    class Refuses(ReplSampler):
        def prompt(self, task: Task, renderer: Renderer, template: str, version: str) -> Prompt:
            raise ConfigError("template", template, "use another")

    with pytest.raises(UserCodeError, match=r"NoPrompt\.prompt raised LookupError\('no such image'\) on task a"):
        collect(NoPrompt())
    with pytest.raises(ConfigError, match="use another"):
        collect(Refuses())


def test_a_prompt_that_fills_the_context_is_dropped_before_anything_is_sampled() -> None:
    tasks = [replace(TASKS[0], id="long", question="long " * 100), *TASKS[2:]]
    rollouts = world(LINES)
    assert isinstance(rollouts.engine, ScriptedEngine)
    rollouts.engine.context_tokens = 150
    found = asyncio.run(rollouts.collect(tasks))
    assert [t.stop for t in found] == [Stop.FAULT, Stop.ANSWERED, Stop.ANSWERED]
    with pytest.raises(ConfigError, match=r"prompt of task long, ids .* the context holds 150; leave the task out"):
        asyncio.run(rollouts.collect(tasks[:1]))
