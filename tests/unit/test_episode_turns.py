"""Turns, blocks and answers: what samplers use that are not line consoles."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rollout import RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.trajectory.trajectory import Execution, LineEnd, LineStatus, Observed, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world

EOS = min(RENDERER.eos_ids)


class Acts(RolloutSampler):
    """Runs a function as a sampler."""

    def __init__(self, act: Callable[[Episode], Awaitable[None]]) -> None:
        self.act = act

    async def rollout(self, episode: Episode) -> None:
        await self.act(episode)


def play(act: Callable[[Episode], Awaitable[None]], *turns: str, limits: RolloutLimits | None = None) -> Trajectory:
    ids = [i for turn in turns for i in (*RENDERER.encode(turn), EOS)]
    rollouts = replace(world([], Acts(act), limits), engine=ScriptedEngine([ids]))
    return asyncio.run(rollouts.collect([TASK]))[0]


def test_an_end_token_ends_a_turn_and_not_the_rollout() -> None:
    async def act(episode: Episode) -> None:
        first = await episode.sample_turn()
        assert (first.text, first.end, episode.ended) == ("a\nb", LineEnd.EOS, False)
        episode.observe("go on")
        assert (await episode.sample_turn()).text == "c"

    t = play(act, "a\nb", "c")
    assert t.stop is Stop.FINISHED
    assert [line.token_ids[-1] for line in t.lines] == [EOS, EOS]
    assert t.loss_mask == (True,) * 4 + (False,) * len(RENDERER.encode("go on")) + (True,) * 2


def test_a_turn_that_is_cut_ends_the_rollout() -> None:
    async def act(episode: Episode) -> None:
        line = await episode.sample_turn(max_tokens=2)
        assert (line.end, episode.ended) == (LineEnd.LENGTH, True)
        episode.observe("nothing can follow")

    with pytest.raises(UserCodeError, match="a cut line has ended the rollout"):
        play(act, "abcdefg")


def test_an_answer_is_submitted_for_the_last_line_even_after_an_observation() -> None:
    async def act(episode: Episode) -> None:
        await episode.sample_turn()
        episode.observe("noted")
        episode.submit("42")
        assert episode.ended

    t = play(act, "It is 42.")
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "42", 1.0)


def test_what_became_of_a_line_can_be_said_without_a_console() -> None:
    async def act(episode: Episode) -> None:
        await episode.sample_turn()
        episode.record_execution(Execution(LineStatus.TIMEOUT, 3.0))

    t = play(act, "call()")
    assert [e.status for e in t.executions] == [LineStatus.TIMEOUT]


def test_code_runs_in_the_console_and_nothing_is_spliced() -> None:
    async def act(episode: Episode) -> None:
        await episode.sample_turn()
        assert (await episode.execute("x = 6", "x * 7")).text == "42\n"
        await episode.sample_turn()
        assert (await episode.execute("submit_final_answer(x * 7)")).answer == "42"
        assert episode.ended

    t = play(act, "one", "two")
    assert all(t.loss_mask)
    assert (t.stop, t.outcome) == (Stop.ANSWERED, 1.0)


def test_code_that_no_line_stands_for_is_not_run() -> None:
    async def act(episode: Episode) -> None:
        with pytest.raises(ConfigError, match="sample a line first"):
            await episode.execute("submit_final_answer(42)")
        await episode.sample_turn()
        with pytest.raises(ConfigError, match="give at least one to run"):
            await episode.execute()

    assert play(act, "one").answer is None


def test_the_judge_can_be_asked_before_the_end() -> None:
    async def act(episode: Episode) -> None:
        await episode.sample_turn()
        assert [await episode.judge(answer) for answer in ("41", "42")] == [0.0, 1.0]

    assert play(act, "hm").answer is None


def test_an_observation_with_control_tokens_is_taken_as_it_is() -> None:
    async def act(episode: Episode) -> None:
        await episode.sample_turn()
        episode.observe(Observed("<|im_end|>", (EOS,)))
        await episode.sample_turn()

    t = play(act, "a", "b")
    assert t.segments[1] == Observed("<|im_end|>", (EOS,))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("needle", ["</fn>", "é€</fn>", "🦆🦆"])
def test_a_match_is_found_wherever_it_begins(length: int, needle: str) -> None:
    async def act(episode: Episode) -> None:
        line = await episode.sample(until=f"^q+{needle}")
        assert line.text == "q" * length + needle
        assert line.end is LineEnd.MATCH

    play(act, "q" * length + needle + " and more")


def test_turns_are_counted_as_lines() -> None:
    async def act(episode: Episode) -> None:
        while not episode.ended:
            await episode.sample_turn()
            episode.observe("again")

    t = play(act, *["a"] * 9, limits=RolloutLimits(max_lines=3))
    assert (t.stop, len(t.lines)) == (Stop.MAX_LINES, 3)
