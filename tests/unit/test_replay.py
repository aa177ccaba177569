"""Replay: the console comes back, and differences are noticed at their line, with their cause."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from repl_rl.errors import ConfigError
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.runs.replay import (
    Difference,
    DifferenceCause,
    Replay,
    ShownText,
    get_branch_point,
    guess_cause,
    is_same,
    open_replay,
    validate_replayable,
    verify_all,
    verify_trajectory,
)
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.trajectory.trajectory import (
    Execution,
    Failure,
    FailureKind,
    Line,
    LineEnd,
    LineStatus,
    Prompt,
    Sampled,
    Stop,
    Trajectory,
)
from tests.support.scripted_rollouts import TASK, world

T = TypeVar("T")
SANDBOX = InProcessSandbox()
LINES = ["x = 6\n", "for i in range(2):\n", "    x += i\n", "\n", "x * 6\n", "submit_final_answer(x * 6)\n"]


def played(lines: Sequence[str], limits: RolloutLimits | None = None) -> Trajectory:
    """What a policy that writes `lines` leaves behind."""
    return asyncio.run(world(lines, limits=limits).collect([TASK]))[0]


def replayed(t: Trajectory, act: Callable[[Replay], Awaitable[T]], to_line: int = 0) -> T:
    async def run() -> T:
        async with open_replay(t, SANDBOX, to_line) as replay:
            return await act(replay)

    return asyncio.run(run())


def test_stepping_shows_each_line_with_what_it_prints_now() -> None:
    async def act(replay: Replay) -> list[tuple[int | None, str]]:
        while not replay.ended:
            await replay.run_next()
        return [(step.line, step.shown.text) for step in replay.steps]

    shown = replayed(played(LINES), act)
    assert shown == [(0, ">>> "), (1, "... "), (2, "... "), (3, ">>> "), (4, "42\n>>> "), (5, "")]


def test_a_deterministic_trajectory_shows_what_was_recorded() -> None:
    found = asyncio.run(verify_trajectory(played(LINES), SANDBOX))
    assert (found.lines, found.difference, found.skip_reason) == (6, None, "")


@pytest.mark.parametrize(
    ("lines", "at", "expected"),
    [
        (["x = 1\n", "import time as clock\n", "t = clock.time_ns()\n", "t\n"], 3, DifferenceCause.TIME),
        (["import random\n", "y = random.random()\n", "y\n"], 2, DifferenceCause.RANDOMNESS),
        (["class A: pass\n", "\n", "[A() for _ in range(9)]\n"], 2, DifferenceCause.ADDRESSES),
        (["import os\n", "os.environ['WHERE']\n"], 1, DifferenceCause.ENVIRONMENT),
    ],
)
def test_a_divergent_line_is_named_with_its_cause(
    lines: list[str], at: int, expected: DifferenceCause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "there")
    t = played([*lines, "exit()\n"])
    monkeypatch.setenv("WHERE", "here")
    # These take the places in memory that the recorded objects had.
    kept = [type("A", (), {})() for _ in range(1000)]
    found = asyncio.run(verify_trajectory(t, SANDBOX)).difference
    assert kept
    assert found is not None
    assert (found.line, found.cause) == (at, expected)


def test_what_changes_from_run_to_run_without_a_reason_in_the_lines_is_randomness() -> None:
    recorded, now, again = (ShownText(text, LineStatus.OK) for text in ("1\n", "2\n", "3\n"))
    assert guess_cause(["f()\n"], recorded, now, again) is DifferenceCause.RANDOMNESS
    assert guess_cause(["f()\n"], recorded, now, now) is DifferenceCause.ENVIRONMENT
    late = ShownText("1\n", LineStatus.TIMEOUT)
    assert guess_cause(["f()\n"], recorded, late, late) is DifferenceCause.TIME


def test_a_cut_observation_agrees_when_both_of_its_ends_do() -> None:
    limits = RolloutLimits(max_line_tokens=200, max_observation_tokens=20)
    t = played(["'é' * 200\n", "exit()\n"], limits)
    assert "tokens cut" in str(t.segments[1])
    assert asyncio.run(verify_trajectory(t, SANDBOX)).difference is None
    cut = ShownText("abc\n[... 9 tokens cut ...]\nxyz", LineStatus.OK, truncated=True)
    assert is_same(cut, ShownText("abc---xyz", LineStatus.OK))
    assert not is_same(cut, ShownText("abd---xyz", LineStatus.OK))
    assert not is_same(cut, ShownText("abxyz", LineStatus.OK))
    assert not is_same(cut, ShownText("abc---xyz", LineStatus.EXCEPTION))


def test_a_whole_run_gets_a_score() -> None:
    bad = replace(played(["import time\n", "time.time_ns()\n", "exit()\n"]), id="bad")
    lost = replace(played(LINES), stop=Stop.FAULT, outcome=None, failure=Failure(FailureKind.SANDBOX_FAULT, "lost"))
    called = Line((1,), (-0.1,), "f()", LineEnd.MATCH, Execution(LineStatus.OK, 0.0))
    chat = Trajectory("chat", "t", Prompt("Hi", (1,)), (Sampled((called,)),), Stop.FINISHED, 0, 0, 0.0)
    found = asyncio.run(verify_all([played(LINES), bad, chat, lost], SANDBOX))
    assert (found.verified_count, found.match_rate) == (2, 0.5)
    assert found.divergence_causes == {"time": 1}
    assert [v.id for v in found.divergent] == ["bad"]
    assert "can be shown, but not executed again" in found.verifications[2].skip_reason


def test_a_line_is_edited_and_the_rest_of_the_trajectory_follows_from_it() -> None:
    async def act(replay: Replay) -> tuple[list[str], Difference | None]:
        await replay.run_instead("x = 7")
        await replay.run_typed("y = x")
        while not replay.ended:
            await replay.run_next()
        shown = [step.shown.text for step in replay.steps if step.line in (4, None)]
        return shown, next(step.difference for step in replay.steps if step.line == 4)

    shown, difference = replayed(played(LINES), act)
    assert shown == [">>> ", "48\n>>> "]
    assert difference is not None
    assert difference.cause is DifferenceCause.EDIT


def test_equal_states_have_equal_digests_and_others_have_not() -> None:
    t = played([LINES[0], "import math\n", "def f(): pass\n", "\n", "x * 6\n", "exit()\n"])
    first, second, earlier = (replayed(t, Replay.compute_state_digest, to_line=k) for k in (5, 5, 2))
    assert first == second != earlier
    assert len(first) == 64


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1\n", "x = type('int', (int,), {'__qualname__': 'other'})(1)\n"),
        ("x = lambda: 1\n", "x = lambda: 2\n"),
        ("x = type('A', (), {})(); x.a = 1\n", "x = type('A', (), {})(); x.a = 2\n"),
    ],
)
def test_a_digest_tells_types_code_and_attributes_apart(one: str, other: str) -> None:
    ended = [played([text, "exit()\n"]) for text in (one, other)]
    ones, others = ([replayed(t, Replay.compute_state_digest, to_line=1) for _ in "ab"] for t in ended)
    assert len({*ones}) == len({*others}) == 1
    assert ones != others


def test_a_replay_refuses_what_cannot_be() -> None:
    t = played(LINES)
    with pytest.raises(ConfigError, match="give 0 to 6"):
        replayed(t, Replay.compute_state_digest, to_line=7)
    with pytest.raises(ConfigError, match="within a cell"):
        replayed(t, Replay.compute_state_digest, to_line=2)
    with pytest.raises(ConfigError, match="ended"):
        replayed(t, lambda replay: replay.run_typed("1"), to_line=6)
    with pytest.raises(ConfigError, match="the rollout ended with that line"):
        get_branch_point(t, 6)
    with pytest.raises(ConfigError, match="give 0 to 6"):
        get_branch_point(t, -1)
    told = [replace(x, execution=x.execution and replace(x.execution, ran=())) for x in t.lines]
    with pytest.raises(ConfigError, match="lacks the input of the console"):
        validate_replayable(replace(t, segments=(Sampled(tuple(told)),)))


def test_a_line_that_no_console_ran_is_passed_over() -> None:
    t = played(LINES)
    thought = Line((1,), (-0.1,), "# hm\n", LineEnd.NEWLINE)
    changed = replace(t, segments=(Sampled((thought, *t.lines[:1])), *t.segments[1:]))

    async def act(replay: Replay) -> list[str]:
        assert await replay.run_next() is None
        return [replay.current_prompt]

    assert replayed(changed, act) == [">>> "]
    assert asyncio.run(verify_trajectory(changed, SANDBOX)).difference is None
