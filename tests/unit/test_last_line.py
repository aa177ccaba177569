"""A last line that ends in the end token is executed like one that ends in a newline."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from examples.minimal_grpo import batch_of
from repl_rl.cli.rollout import format_transcript
from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.runs.replay import branch, get_branch_point, open_replay, verify_trajectory
from repl_rl.runs.store import to_text
from repl_rl.runs.store.trajectory_json import dump_record, parse_record
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.trajectory.trajectory import LineEnd, LineStatus, Observed, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world

END = min(RENDERER.eos_ids)


def played(lines: Sequence[str], sampler: RolloutSampler | None = None) -> Trajectory:
    """A rollout of a policy that writes `lines` and then the end token; what it would write after that is an error."""
    ids = [
        *(i for line in lines for i in RENDERER.encode_as_sampled(line)),
        END,
        *RENDERER.encode_as_sampled("1/0\n") * 50,
    ]
    rollouts = replace(world([], sampler), engine=ScriptedEngine([ids]))
    return asyncio.run(rollouts.collect([TASK]))[0]


def last(t: Trajectory) -> tuple[LineEnd, LineStatus | None, tuple[str, ...]]:
    run = t.lines[-1].execution
    return t.lines[-1].end, run.status if run else None, run.ran if run else ()


def test_an_answer_on_a_line_that_the_end_token_closes_is_given_and_graded() -> None:
    t = played(["x = 6 * 7\n", "submit_final_answer(x)"])
    assert (t.stop, t.answer, t.outcome) == (Stop.ANSWERED, "42", 1.0)
    assert last(t) == (LineEnd.EOS, LineStatus.ANSWERED, ("submit_final_answer(x)",))
    assert t.lines[-1].token_ids[-1] == END
    assert t.lines[-1].text == "submit_final_answer(x)"
    assert len(t.lines[-1].logprobs) == len(t.lines[-1].token_ids)


def test_what_the_last_line_prints_is_recorded_without_a_prompt_and_nothing_more_is_sampled() -> None:
    t = played(["x = 6 * 7\n", "x"])
    assert (t.stop, t.answer, len(t.lines)) == (Stop.EOS, None, 2)
    assert isinstance(t.segments[-1], Observed)
    assert t.segments[-1].text == "42\n"
    assert t.loss_mask[-1] is False


@pytest.mark.parametrize(
    ("lines", "status", "ran", "printed"),
    [
        (["for i in range(2):\n", "    print(i)"], LineStatus.OK, ("    print(i)", ""), "0\n1\n"),
        (["for i in range(2):\n", "    print(i)\n"], LineStatus.OK, ("",), "0\n1\n"),
        (["for i in range(2): i"], LineStatus.OK, ("for i in range(2): i", ""), "0\n1\n"),
        (["for i in range(2):\n", "    i\n", "  "], LineStatus.OK, ("  ", ""), "0\n1\n"),
        (["sum([1,"], LineStatus.INCOMPLETE, ("sum([1,", ""), ""),
    ],
)
def test_a_cell_that_is_open_at_the_end_token_is_closed_as_by_a_blank_line(
    lines: list[str], status: LineStatus, ran: tuple[str, ...], printed: str
) -> None:
    t = played(lines)
    assert last(t) == (LineEnd.EOS, status, ran)
    assert (t.segments[-1].text if isinstance(t.segments[-1], Observed) else "") == printed
    assert t.stop is Stop.EOS


@pytest.mark.parametrize("text", ["", "  "])
def test_an_end_token_after_nothing_runs_nothing(text: str) -> None:
    t = played(["x = 1\n", text])
    assert (last(t), t.stop, len(t.lines)) == ((LineEnd.EOS, None, ()), Stop.EOS, 2)


@pytest.mark.parametrize(
    ("text", "status", "stop"),
    [("1/0", LineStatus.EXCEPTION, Stop.EOS), ("x = = 1", LineStatus.SYNTAX_ERROR, Stop.EOS),
     ("exit()", LineStatus.EXITED, Stop.EOS)],
)  # fmt: skip
def test_the_status_of_the_last_line_is_what_the_console_made_of_it(text: str, status: LineStatus, stop: Stop) -> None:
    t = played(["x = 1\n", text])
    assert (last(t), t.stop) == ((LineEnd.EOS, status, (text,)), stop)


ENDINGS = [["x = 6 * 7\n", "submit_final_answer(x)"], ["print('>>> ', end='')"], ["if 1:\n", "    7"], ["1/0"]]


@pytest.mark.parametrize("lines", ENDINGS)
def test_it_is_verified_stored_and_shown_like_any_other_line(lines: list[str]) -> None:
    t = played(lines)
    found = asyncio.run(verify_trajectory(t, InProcessSandbox()))
    assert (found.lines, found.difference, found.skip_reason) == (len(lines), None, "")
    assert parse_record(dump_record(CreditedTrajectory(t, ())), "here").trajectory == t
    assert f"{lines[-1]}\n" in to_text(t)
    assert f"{lines[-1]}\n" in format_transcript(t).plain


@pytest.mark.parametrize("lines", ENDINGS)
def test_nothing_goes_on_after_it_and_a_branch_before_it_runs_it_again(lines: list[str]) -> None:
    t = played(lines)
    with pytest.raises(ConfigError, match="ended with that line"):
        get_branch_point(t, len(t.lines))
    ids = [*RENDERER.encode_as_sampled(lines[-1]), END]
    rollouts = replace(world([], ReplSampler()), engine=ScriptedEngine([ids]))
    (again,) = asyncio.run(branch(rollouts, get_branch_point(t, len(t.lines) - 1), TASK, 1)).trajectories
    assert (again.completion_ids, again.stop, again.outcome) == (t.completion_ids, t.stop, t.outcome)


def test_a_line_typed_after_a_replay_does_not_continue_it() -> None:
    t = played(["x = 6 * 7"])

    async def work() -> str:
        async with open_replay(t, InProcessSandbox(), 1) as replay:
            return (await replay.run_typed("x")).shown.text

    assert asyncio.run(work()) == "42\n>>> "


def test_all_samplers_that_loop_over_lines_are_given_it() -> None:
    class Own(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            async for line in episode.lines():
                await episode.push(line)
                episode.reward(1.0, name="line")

    t = played(["x = 1\n", "submit_final_answer(42)"], Own())
    assert [len(line.rewards) for line in t.lines] == [1, 1]
    assert t.outcome == 1.0


def test_a_turn_that_is_pushed_runs_to_its_end() -> None:
    class Turns(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.push(await episode.sample_turn())

    t = played(["for i in range(2):\n    i"], Turns())
    assert last(t)[2] == ("for i in range(2):", "    i", "")
    assert isinstance(t.segments[-1], Observed)
    assert t.segments[-1].text == "0\n1\n>>> "


def test_the_loop_on_one_page_trains_its_tokens_with_the_end_token() -> None:
    batch = batch_of([[played(["submit_final_answer(42)"]), played(["1/0"])]])
    assert batch.sampled_B_S.sum().item() == len(batch.sampler_N)
    rows = [row[mask].tolist() for row, mask in zip(batch.ids_B_S, batch.sampled_B_S, strict=True)]
    assert [row[-1] for row in rows] == [END, END]
