"""An engine that dies in the middle of a step: another one takes its place, and what was under way is played again."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.engine import Engine, Sampling
from repl_rl.engine.restarting_engine import MAX_CRASHES, RestartingEngine, open_restarting_engine
from repl_rl.engine.scripted_engine import FaultyEngine, FaultyEngineSequence
from repl_rl.errors import EngineDied, EngineError, UnrecoverableError
from repl_rl.evaluation import Study, run_evaluation
from repl_rl.rollout import ReplSampler, Rollouts, SyncRollouts
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.retry import get_fault_counts
from repl_rl.rollout.rollout_stats import compute_step_metrics
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world

SCRIPTS = [
    ["submit_final_answer(42)\n"],
    ["x = 6\n", "x * 7\n", "submit_final_answer(42)\n"],
    ["x = 6\n", "1 / 0\n", "x\n", "x + 1\n", "submit_final_answer(x)\n"],
    [*["x = 1\n"] * 8, "submit_final_answer(42)\n"],
]
"""Short and long rollouts; which of them one is depends on its seed alone."""
GROUPS = [replace(TASK, id=f"t{n}") for n in range(4) for _ in range(4)]


class Told(ReplSampler):
    """Keeps how each attempt at a rollout began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[str] = []
        self.ended: list[tuple[str, Trajectory | BaseException]] = []

    async def on_start(self, episode: Episode) -> None:
        self.began.append(episode.id)

    async def on_end(self, rollout: str, result: Trajectory | BaseException) -> None:
        self.ended.append((rollout, result))


def engines(chunks: Sequence[int]) -> FaultyEngineSequence:
    """Engines with these lives. Each gives its own log probability, so that one sees who sampled a token."""
    lives: FaultyEngineSequence

    def make() -> FaultyEngine:
        ids = [[i for line in script for i in RENDERER.encode_as_sampled(line)] for script in SCRIPTS]
        logprob = -0.5 / (1 + len(lives.engines))
        return FaultyEngine(ids, logprob=logprob, forbidden_ids=RENDERER.forbidden_ids)

    lives = FaultyEngineSequence(make, chunks)
    return lives


@dataclass
class Step:
    """A batch of rollouts on engines that die."""

    trajectories: Sequence[Trajectory]
    sampler: Told
    rollouts: Rollouts
    lives: FaultyEngineSequence
    faults: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.faults = get_fault_counts(self.rollouts)

    @property
    def replayed(self) -> list[str]:
        """The rollouts that an engine's death ended, once for each time."""
        return [name for name, result in self.sampler.ended if isinstance(result, EngineDied)]


def play(chunks: Sequence[int], sampler: Told | None = None, concurrency: int = 4, tasks: Sequence[Task] = ()) -> Step:
    sampler, lives = sampler or Told(), engines(chunks)

    async def work() -> Step:
        async with open_restarting_engine(lives.open, pause_s=0) as engine:
            rollouts = replace(world(["x\n"], sampler, concurrency=concurrency), engine=engine)
            return Step(await rollouts.collect(tasks or GROUPS), sampler, rollouts, lives)

    step = asyncio.run(work())
    assert all(engine.open_sessions == 0 for engine in lives.engines)
    return step


def told(trajectories: Sequence[Trajectory]) -> list[object]:
    """All that is learned from, but for which engine gave it."""
    return [
        (t.id, t.seed, t.task_id, t.prompt, t.completion_ids, t.outcome, t.stop, [line.text for line in t.lines])
        for t in trajectories
    ]


def test_a_step_whose_engine_dies_is_the_undisturbed_one_and_what_had_ended_is_kept() -> None:
    whole, step = play([]), play([17])
    assert told(step.trajectories) == told(whole.trajectories)
    assert whole.replayed == []
    assert 1 <= len(step.replayed) <= 4, "those under way, and no others"
    assert Counter(step.sampler.began) == Counter([t.id for t in step.trajectories] + step.replayed)
    first = {t.id for t in step.trajectories if t.lines[0].logprobs[0] == -0.5}
    assert first == set(dict(step.sampler.ended[: len(first)])), "whatever the dead engine finished came before it died"
    assert len(first) >= 2
    assert first.isdisjoint(step.replayed)
    assert step.faults == {
        "engine_deaths": 1,
        "consoles_lost": 0,
        "rollouts_replayed": len(step.replayed),
        "rollouts_given_up": 0,
    }
    assert compute_step_metrics(step.sampler, step.rollouts.limits, step.trajectories, None, step.faults) == step.faults


def test_no_token_of_a_rollout_under_which_an_engine_died_is_kept() -> None:
    step = play([17, 9])
    for t in step.trajectories:
        sampled = {logprob for line in t.lines for logprob in line.logprobs}
        assert len(sampled) == 1, "one engine sampled all of it"
        assert t.id not in step.replayed or sampled != {-0.5}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=2), st.integers(1, 16), st.integers(1, 16))
def test_whenever_an_engine_dies_every_rollout_is_there_once_and_every_attempt_is_counted(
    chunks: Sequence[int], concurrency: int, count: int
) -> None:
    step = play(chunks, concurrency=concurrency, tasks=GROUPS[:count])
    assert told(step.trajectories) == told(play([], tasks=GROUPS[:count]).trajectories)
    assert step.faults["engine_deaths"] == sum(engine.is_dead for engine in step.lives.engines)
    assert step.faults["rollouts_replayed"] == len(step.replayed)
    assert len(step.sampler.began) == len(step.sampler.ended) == count + len(step.replayed)


@pytest.mark.parametrize("chunks", [[7], [30, 2]])
def test_an_evaluation_whose_engine_dies_is_the_undisturbed_one(chunks: Sequence[int], tmp_path: Path) -> None:
    def evaluated(lives: FaultyEngineSequence) -> tuple[Study, Mapping[str, int]]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Rollouts]:
            async with open_restarting_engine(lives.open, pause_s=0) as engine:
                yield replace(world(["x\n"], concurrency=4), engine=engine)

        with SyncRollouts(opened, {}) as source:
            source.load_weights(tmp_path, 5)
            return run_evaluation(source, [replace(TASK, id=f"t{n}") for n in range(8)]), source.stats.faults

    (whole, _), lives = evaluated(engines([])), engines(chunks)
    study, faults = evaluated(lives)
    assert study.results == whole.results
    assert faults["engine_deaths"] == len(chunks)
    assert [engine.policy_step for engine in lives.engines] == [5] * (len(chunks) + 1)


class Swallowing(Told):
    """Takes every error for an end."""

    async def rollout(self, episode: Episode) -> None:
        try:
            await super().rollout(episode)
        except EngineError:
            episode.finish()


def test_a_rollout_whose_sampler_swallows_the_death_is_played_again_all_the_same() -> None:
    step = play([17], Swallowing())
    assert told(step.trajectories) == told(play([]).trajectories)
    assert step.replayed


def test_after_three_deaths_in_a_row_the_run_stops_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    lives = engines([5] * 9)

    async def work() -> None:
        async with open_restarting_engine(lives.open, pause_s=0) as engine:
            await replace(world(["x\n"]), engine=engine).collect(GROUPS)

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(UnrecoverableError, match=r"^engine scripted is 'dead 3 times") as raised,
    ):
        asyncio.run(work())
    assert raised.value.exit_code == 3
    assert str(raised.value).endswith("then continue with --resume")
    assert len(lives.engines) == MAX_CRASHES
    assert [record.message.count("another one is opened") for record in caplog.records] == [1, 1]
    assert all(engine.open_sessions == 0 for engine in lives.engines)


async def _lines(engine: RestartingEngine, count: int) -> None:
    """Sample so many chunks, each in a session of its own; of one that dies over it, again."""
    for _ in range(count):
        while True:
            try:
                async with engine.session((1,), Sampling(seed=1)) as session:
                    await session.sample((), max_tokens=1, stop_ids=frozenset())
                break
            except EngineDied:
                continue


def test_an_engine_that_dies_once_a_step_is_replaced_as_often_with_the_weights_of_its_step(tmp_path: Path) -> None:
    lives = engines([2] * 10)

    async def work() -> int:
        async with open_restarting_engine(lives.open, pause_s=0) as engine:
            for step in range(10):
                await engine.load_weights(tmp_path / str(step), step)
                await _lines(engine, 2 if step else 3)
                assert engine.policy_step == step
            return engine.crash_count

    assert asyncio.run(work()) == 10
    given = [[int(folder.name) for folder in engine.loaded_folders] for engine in lives.engines]
    assert given[0][0] == 0
    for before, after in itertools.pairwise(given):
        assert after[0] in (before[-1], before[-1] + 1), "the weights of the step that it died in, or was to begin"


def test_weights_reach_an_engine_that_is_found_dead_when_they_come(tmp_path: Path) -> None:
    lives = engines([0])

    async def work() -> None:
        async with open_restarting_engine(lives.open, pause_s=0) as engine:
            lives.engines[0].is_dead = True
            await engine.load_weights(tmp_path, 4)
            assert (engine.policy_step, engine.crash_count) == (4, 1)
            await _lines(engine, 1)

    asyncio.run(work())
    assert lives.engines[0].loaded_folders == []
    assert set(lives.engines[1].loaded_folders) == {tmp_path}


def test_an_engine_that_cannot_be_opened_again_counts_as_dead_each_time() -> None:
    opened = []

    @asynccontextmanager
    async def once() -> AsyncIterator[Engine]:
        opened.append(1)
        if len(opened) > 1:
            raise EngineError("no memory")
        yield FaultyEngine([[1]], chunks_until_crash=0)

    async def work() -> None:
        async with open_restarting_engine(once, pause_s=0) as engine:
            await _lines(engine, 1)

    with pytest.raises(UnrecoverableError, match="no memory"):
        asyncio.run(work())
    assert len(opened) == MAX_CRASHES


def test_what_dead_engines_say_at_their_end_is_nobodys_error(tmp_path: Path) -> None:
    lives = engines([1, 0])

    @asynccontextmanager
    async def loud() -> AsyncIterator[Engine]:
        async with lives.open() as engine:
            if len(lives.engines) == 2:
                lives.engines[1].is_dead = True  # it dies over the weights that it is given
            yield engine
        if lives.engines[-1].is_dead:
            raise OSError("no such process")

    async def work() -> int:
        async with open_restarting_engine(loud, pause_s=0) as engine:
            await engine.load_weights(tmp_path, 1)
            await _lines(engine, 3)
            return engine.crash_count

    assert asyncio.run(work()) == 2
    assert lives.engines[2].loaded_folders == [tmp_path]


def test_a_cancellation_while_another_engine_is_opened_passes_through_and_leaves_nothing() -> None:
    lives, opening, closed = engines([3]), asyncio.Event(), []

    @asynccontextmanager
    async def slow() -> AsyncIterator[Engine]:
        if lives.engines:
            opening.set()
            try:
                await asyncio.Event().wait()
            finally:
                closed.append(1)
        async with lives.open() as engine:
            yield engine

    async def work() -> None:
        async with open_restarting_engine(slow, pause_s=0) as engine:
            running = asyncio.create_task(replace(world(["x\n"]), engine=engine).collect(GROUPS))
            await opening.wait()
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())
    assert closed == [1]
    assert lives.engines[0].open_sessions == 0
