"""What an episode, an evaluation and a training ask of their engine: how much, when, how hot, and when it may rest."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace

from repl_rl.engine import EngineSession, Sampling, ScriptedEngine
from repl_rl.engine.base import PreemptionStats
from repl_rl.evaluation import play_all, run_evaluation
from repl_rl.rollout import Rollouts, RolloutSampler, SyncRollouts
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineEnd, Observed, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world

PROMPT = len(RENDERER.build_prompt(TASK.question, "bare", "3.11").token_ids)


class Told(RolloutSampler):
    """Writes a line, is told `ids` ids, and writes on for as long as it may."""

    def __init__(self, ids: int) -> None:
        self.ids = ids

    async def rollout(self, episode: Episode) -> None:
        await episode.sample()
        episode.observe(Observed("told", (1,) * self.ids))
        while not episode.ended:
            await episode.sample()


def told(ids: int, context_tokens: int) -> Trajectory:
    rollouts = world(["x = 1\n", "y" * 60 + "\n"], Told(ids), RolloutLimits(max_lines=9, max_line_tokens=20))
    assert isinstance(rollouts.engine, ScriptedEngine)
    rollouts.engine.context_tokens = context_tokens
    return asyncio.run(rollouts.collect([TASK]))[0]


def test_what_is_observed_is_no_longer_there_to_be_sampled() -> None:
    first = len(RENDERER.encode("x = 1\n"))
    t = told(ids=30, context_tokens=PROMPT + first + 30 + 7)
    assert (t.stop, t.lines[-1].end) == (Stop.MAX_TOKENS, LineEnd.LENGTH)
    assert len(t.lines[-1].token_ids) == 7, "the line did not fit; it was not too long by itself"


def test_an_observation_that_fills_the_context_ends_the_rollout() -> None:
    first = len(RENDERER.encode("x = 1\n"))
    t = told(ids=30, context_tokens=PROMPT + first + 30)
    assert t.stop is Stop.MAX_TOKENS
    assert len(t.lines) == 1


@dataclass(slots=True)
class Watched(ScriptedEngine):
    """Remembers at which temperature it was asked, and rests where it may."""

    asked: list[float] = field(default_factory=list)
    rested: list[int] = field(default_factory=list)
    """Sessions that were open each time that it was to rest."""
    preemptions: PreemptionStats = field(default_factory=PreemptionStats)
    """As if each session had taken the place of another one of 9 ids."""

    def session(self, prompt_ids: Sequence[int], sampling: Sampling) -> AbstractAsyncContextManager[EngineSession]:
        self.asked.append(sampling.temperature)
        self.preemptions = PreemptionStats(self.preemptions.preempted + 1, self.preemptions.recomputed + 9)
        return ScriptedEngine.session(self, prompt_ids, sampling)

    async def sleep(self) -> None:
        self.rested.append(self.open_sessions)


def watched() -> tuple[Watched, Rollouts]:
    ids = RENDERER.encode("submit_final_answer(42)\n")
    engine = Watched([ids], forbidden_ids=RENDERER.forbidden_ids)
    return engine, replace(world(["x\n"]), engine=engine)


TASKS = [replace(TASK, id=f"t{n}") for n in range(3)]


def test_an_evaluation_plays_one_half_at_temperature_1_and_the_other_greedily() -> None:
    engine, rollouts = watched()
    with SyncRollouts(lambda: nullcontext(rollouts), {}) as source:
        run_evaluation(source, TASKS)
    assert engine.asked == [1.0] * 3 + [0.0] * 3


def test_an_evaluation_in_portions_does_too() -> None:
    engine, rollouts = watched()

    def play(tasks: Sequence[Task], temperature: float) -> Sequence[Trajectory]:
        return asyncio.run(rollouts.collect(tasks, temperature))

    play_all(TASKS, play, samples=2)
    assert engine.asked == [1.0] * 6 + [0.0] * 3


def test_an_engine_rests_after_the_rollouts_of_every_step_when_no_session_is_open() -> None:
    engine, rollouts = watched()
    with SyncRollouts(lambda: nullcontext(rollouts), {TASK.id: TASK}) as source:
        source.collect([TASK.id, TASK.id], policy_step=0)
        assert engine.rested == [0]
        source.collect([TASK.id], policy_step=0)
        assert engine.rested == [0, 0]


def test_a_cache_that_is_too_small_is_a_metric_of_each_step_and_told_of_the_whole_run() -> None:
    _, rollouts = watched()
    with SyncRollouts(lambda: nullcontext(rollouts), {task.id: task for task in TASKS}) as source:
        for count in (3, 2):
            played = source.collect([task.id for task in TASKS[:count]], policy_step=0)
            source.sample(TASKS[:1])
            assert source.metrics(played) == {"preemptions": count}
    assert source.stats.preemptions == PreemptionStats(preempted=7, recomputed=63)


def test_an_engine_without_such_a_cache_says_nothing_of_it() -> None:
    rollouts = world(["submit_final_answer(42)\n"])
    with SyncRollouts(lambda: nullcontext(rollouts), {TASK.id: TASK}) as source:
        assert source.metrics(source.collect([TASK.id], policy_step=0)) == {}
    assert source.stats.preemptions is None
