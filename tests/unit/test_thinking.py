"""A span of thinking before the first line: sampled, trained, bounded, never executed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.runs.replay import branch, get_branch_point, verify_trajectory
from repl_rl.runs.store import to_text
from repl_rl.samplers import load_sampler
from repl_rl.samplers.conformance_checks import run_checks
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.trajectory.trajectory import LineEnd, Observed, Stop, Trajectory
from tests.support.samplers.marked_text import chat_renderer
from tests.support.scripted_rollouts import RENDERER, TASK, world

THINK = ReplSampler(thinking="</think>", thinking_tokens=400)
SPAN = "<think>\nx = 1/0\nexit()\n</think>"


def played(lines: Sequence[str], sampler: ReplSampler = THINK) -> Trajectory:
    return asyncio.run(world(lines, sampler).collect([TASK]))[0]


def test_nothing_of_the_span_is_executed_and_the_console_begins_after_it() -> None:
    t = played([SPAN, "6 * 7\n", "submit_final_answer(_)\n"])
    assert t.prompt.text == "What is 6 * 7?\n"
    span, *lines = t.lines
    assert (span.text, span.end, span.execution) == (SPAN, LineEnd.MATCH, None)
    assert [line.text for line in lines] == ["6 * 7\n", "submit_final_answer(_)\n"]
    assert isinstance(t.segments[1], Observed)
    assert t.segments[1].text == "\n>>> "
    assert (t.stop, t.outcome) == (Stop.ANSWERED, 1.0)


def test_the_span_is_trained_and_what_is_spliced_after_it_is_not() -> None:
    t = played([SPAN, "submit_final_answer(42)\n"])
    spliced = len(RENDERER.encode("\n>>> "))
    counts = [len(line.token_ids) for line in t.lines]
    assert list(t.loss_mask) == [True] * counts[0] + [False] * spliced + [True] * counts[1]


def test_such_a_rollout_is_verified_shown_and_branched_from_any_line() -> None:
    lines = [SPAN, "x = 6\n", "submit_final_answer(x * 7)\n"]
    t = played(lines)
    found = asyncio.run(verify_trajectory(t, InProcessSandbox()))
    assert (found.lines, found.difference, found.skip_reason) == (2, None, "")
    assert ">>> x = 6\n>>> submit_final_answer(x * 7)\n" in to_text(t)
    for line in range(3):
        (again,) = asyncio.run(branch(world(lines[line:], THINK), get_branch_point(t, line), TASK, 1)).trajectories
        assert (again.completion_ids, again.outcome) == (t.completion_ids, 1.0)


def test_a_span_over_its_budget_is_cut_and_an_end_token_ends_the_rollout() -> None:
    short = ReplSampler(thinking="</think>", thinking_tokens=5)
    t = played([SPAN, "x\n"], short)
    assert (t.stop, len(t.lines), len(t.lines[0].token_ids)) == (Stop.LINE_TOO_LONG, 1, 5)
    rollouts = replace(world([], THINK), engine=ScriptedEngine([[*RENDERER.encode("<think> hm"), RENDERER.end_id]]))
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert (t.stop, len(t.lines), t.lines[0].execution) == (Stop.EOS, 1, None)


def test_options_that_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="no effect without thinking"):
        load_sampler("repl(thinking_tokens=9)")
    with pytest.raises(ConfigError, match="thinking_tokens of sampler repl"):
        load_sampler('repl(thinking="</think>", thinking_tokens=0)')
    closed = Renderer(chat_renderer("qwen3").tokenizer, chat={"enable_thinking": False})
    with pytest.raises(ConfigError, match="ends the span itself"):
        THINK.check_policy(closed, "chat")
    THINK.check_policy(chat_renderer("qwen3"), "chat")


def test_it_keeps_what_every_sampler_keeps() -> None:
    rows = run_checks(load_sampler('repl(thinking="</think>")'))
    assert [row for row in rows if not row.passed] == []
