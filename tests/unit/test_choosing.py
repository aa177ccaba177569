"""Several lines written at one place: the rollout goes on from one, and the others stay in the record."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from repl_rl.credit.credited_trajectory import CreditedTrajectory, add_child_rows
from repl_rl.engine import ScriptedEngine
from repl_rl.errors import InvariantError
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSettings
from repl_rl.rollout.episode import Choice, ChooseLine, Episode, choose_by_majority
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.runs.replay import branch, get_branch_point, verify_all
from repl_rl.runs.store.trajectory_json import dump_record, parse_record, to_record
from repl_rl.samplers.conformance_checks import RecordingEngine, compare_with_recording
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.trajectory.trajectory import Alternative, Line, LineEnd, Sampled, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world

TEXTS = ["x = 1\n", "x = 6 * 7\n", "x = 2\n", "x\n", "submit_final_answer(x)\n", "1/0\n"]


class Chooses(ReplSampler):
    """Three lines at each place."""

    def __init__(self, choose: ChooseLine) -> None:
        super().__init__()
        self.choose = choose

    async def rollout(self, episode: Episode) -> None:
        async for line in episode.lines(lambda: episode.choose(3, self.choose)):
            await episode.push(line)


def witness(texts: Sequence[str]) -> RecordingEngine:
    """A policy that writes `texts` one after the other, also where one of them is taken back."""
    left = iter(texts)
    found = RecordingEngine([[0]], 1 << 20, forbidden_ids=RENDERER.forbidden_ids)
    found.inner = ScriptedEngine.from_policy(
        lambda _: RENDERER.encode_as_sampled(next(left)), forbidden_ids=RENDERER.forbidden_ids
    )
    return found


def play(
    choose: ChooseLine, texts: Sequence[str] = TEXTS, limits: RolloutLimits | None = None
) -> tuple[Trajectory, RecordingEngine]:
    engine = witness(texts)
    limits = limits or RolloutLimits(max_line_tokens=200)
    rollouts = Rollouts(engine, InProcessSandbox(), RENDERER, Chooses(choose), limits, RolloutSettings("bare"))
    (found,) = asyncio.run(rollouts.collect([TASK]))
    return found, engine


def second(lines: Sequence[Line]) -> Choice:
    return Choice(1)


def test_the_rollout_goes_on_from_the_line_that_is_chosen_and_keeps_the_others() -> None:
    t, _ = play(second)
    assert [line.text for line in t.lines] == ["x = 6 * 7\n", "submit_final_answer(x)\n"]
    assert [[other.text for other in line.alternatives] for line in t.lines] == [
        ["x = 1\n", "x = 2\n"],
        ["x\n", "1/0\n"],
    ]
    assert (t.answer, t.outcome, t.sampled_tokens) == ("42", 1.0, sum(len(line.token_ids) for line in t.lines))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_whichever_is_chosen_the_record_is_what_the_engine_sampled_and_was_given(at: int) -> None:
    texts = ["a = 1\n", "b = 1\n", "c = 1\n", "1\n", "2\n", "3\n", *["submit_final_answer(42)\n"] * 3]
    t, engine = play(lambda lines: Choice(at), texts)
    assert t.outcome == 1.0
    compare_with_recording(t, engine.recordings[-1])


def test_an_alternative_that_the_engine_never_sampled_there_is_told() -> None:
    t, engine = play(second)
    head, *rest = t.segments
    assert isinstance(head, Sampled)
    other = t.lines[1]
    forged = replace(t.lines[0].alternatives[0], token_ids=other.token_ids, logprobs=other.logprobs)
    lines = (replace(t.lines[0], alternatives=(forged,)),)
    with pytest.raises(AssertionError, match="sampled no 'x = 1"):
        compare_with_recording(replace(t, segments=(replace(head, lines=lines), *rest)), engine.recordings[-1])


def test_alternatives_are_stored_verified_and_taken_over_by_a_branch_and_a_line_without_has_none_in_its_record() -> (
    None
):
    t, _ = play(second)
    assert parse_record(dump_record(CreditedTrajectory(t)), "here").trajectory == t

    async def again() -> None:
        assert (await verify_all([t], InProcessSandbox())).match_rate == 1.0
        found = await branch(world(["submit_final_answer(x)\n"]), get_branch_point(t, 1), TASK, 1)
        assert (found.mean_outcome, found.trajectories[0].lines[0]) == (1.0, t.lines[0])

    asyncio.run(again())
    bare = (replace(line, alternatives=()) for line in t.lines[:1])
    plain = replace(t, segments=(Sampled(tuple(bare)),), stop=Stop.FINISHED)
    assert "alternatives" not in str(to_record(CreditedTrajectory(plain)))


def test_alternatives_are_no_rows_of_an_update_unless_their_sampler_gave_them_an_advantage() -> None:
    plain, _ = play(second)
    assert add_child_rows([plain], [(0.5, 0.5)]) == ([plain], [(0.5, 0.5)])
    t, _ = play(lambda lines: Choice(1, (0.25, 9.0, -0.25)))
    rows, values = add_child_rows([t], [(0.5, 0.5)])
    assert [row.id for row in rows] == [t.id, *(f"{t.id}~{line}.{place}" for line in (0, 1) for place in (0, 1))]
    assert values[1:] == [(0.25,), (-0.25,)] * 2
    before = len(t.completion_ids) - len(t.lines[1].token_ids)
    assert rows[1].prompt.token_ids == t.prompt.token_ids
    assert rows[3].prompt.token_ids == (*t.prompt.token_ids, *t.completion_ids[:before])
    assert [row.lines[0].text for row in rows[1:]] == ["x = 1\n", "x = 2\n", "x\n", "1/0\n"]


@pytest.mark.parametrize(
    ("choose", "told"),
    [
        (lambda lines: Choice(3), "give a Choice among 3 lines"),
        (lambda lines: 1, "give a Choice among 3 lines"),
        (lambda lines: Choice(0, (1.0,)), "give one for each of 3 lines"),
        (lambda lines: Choice(0, (0.0, float("nan"), 0.0)), "an advantage is a finite number"),
    ],
)
def test_a_choice_that_is_none_drops_the_rollout_and_names_it(choose: ChooseLine, told: str) -> None:
    with pytest.raises(Exception, match=told):
        play(choose)


def test_an_async_function_may_choose_and_a_cut_line_that_is_chosen_ends_the_rollout() -> None:
    async def last(lines: Sequence[Line]) -> Choice:
        await asyncio.sleep(0)
        return Choice(2)

    cut, _ = play(last, ["x\n", "y\n", "x = 1234567890123\n"], RolloutLimits(max_line_tokens=4))
    assert (cut.stop.value, cut.lines[0].end) == ("line_too_long", LineEnd.LENGTH)


class Until(ReplSampler):
    async def rollout(self, episode: Episode) -> None:
        await episode.choose(3, second, until="ab")


def test_each_of_several_texts_ends_at_its_own_match() -> None:
    engine = witness(["12ab\n", "345ab\n", "6ab\n"])
    rollouts = Rollouts(
        engine, InProcessSandbox(), RENDERER, Until(), RolloutLimits(max_line_tokens=200), RolloutSettings("bare")
    )
    (t,) = asyncio.run(rollouts.collect([TASK]))
    texts = [t.lines[0].text, *(other.text for other in t.lines[0].alternatives)]
    assert [text.rstrip("\n") for text in texts] == ["345ab", "12ab", "6ab"]
    assert t.lines[0].end is LineEnd.MATCH


def line(text: str, logprob: float) -> Line:
    return Line((1,), (logprob,), text, LineEnd.NEWLINE)


def test_the_line_that_was_written_most_often_is_agreed_on_and_of_several_such_the_likeliest() -> None:
    assert choose_by_majority([line("a\n", -0.1), line("b\n", -2.0), line("b\n", -1.0)]).at == 2
    assert choose_by_majority([line("a\n", -0.3), line("b\n", -0.2), line("c\n", -0.2)]).at == 1


def test_the_line_console_asks_for_candidates_and_counts_what_it_did_not_choose() -> None:
    sampler = ReplSampler(candidates=3)
    engine = witness(["x = 2\n", "x = 42\n", "x = 42\n", *["submit_final_answer(x)\n"] * 3])
    rollouts = Rollouts(
        engine, InProcessSandbox(), RENDERER, sampler, RolloutLimits(max_line_tokens=200), RolloutSettings("bare")
    )
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert (t.outcome, t.lines[0].text) == (1.0, "x = 42\n")
    spent = sum(len(other.token_ids) for each in t.lines for other in each.alternatives)
    assert sampler.metrics([t])["alternative_tokens"] == spent > 0
    assert ReplSampler().metrics([t]) == {}


def test_an_alternative_holds_what_a_policy_can_write() -> None:
    with pytest.raises(InvariantError, match=r"Alternative\.logprobs"):
        Alternative((1,), (), "x\n", LineEnd.NEWLINE)
    with pytest.raises(InvariantError, match=r"Line\.alternatives"):
        replace(line("x\n", -1.0), alternatives=cast("tuple[Alternative, ...]", []))
