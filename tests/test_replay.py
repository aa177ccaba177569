"""Replay: the console comes back, differences are noticed at their line, and branches begin with the very same ids."""

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from repl_rl.cli import main
from repl_rl.episode import Episode
from repl_rl.errors import ConfigError, SandboxFault
from repl_rl.record import RolloutLimits
from repl_rl.replay import (
    Cause,
    Continue,
    Replay,
    Shown,
    branch,
    open_replay,
    start_at,
    start_of,
    verify,
    verify_all,
)
from repl_rl.replay.compare import cause, same
from repl_rl.replay.session import check
from repl_rl.samplers import RolloutSampler
from repl_rl.sandbox.inprocess import InProcessSandbox
from repl_rl.store import write_step
from repl_rl.trajectory import (
    Failure,
    Line,
    LineEnd,
    LineStatus,
    Observed,
    Prompt,
    Sampled,
    Stop,
    Trajectory,
)
from tests.worlds import RENDERER, TASK, world

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
            await replay.step()
        return [(step.line, step.shown.text) for step in replay.steps]

    shown = replayed(played(LINES), act)
    assert shown == [(0, ">>> "), (1, "... "), (2, "... "), (3, ">>> "), (4, "42\n>>> "), (5, "")]


def test_a_deterministic_trajectory_shows_what_was_recorded() -> None:
    found = asyncio.run(verify(played(LINES), SANDBOX))
    assert (found.lines, found.difference, found.skipped) == (6, None, "")


@pytest.mark.parametrize(
    ("lines", "at", "expected"),
    [
        (["x = 1\n", "import time as clock\n", "t = clock.time_ns()\n", "t\n"], 3, Cause.TIME),
        (["import random\n", "y = random.random()\n", "y\n"], 2, Cause.RANDOMNESS),
        (["class A: pass\n", "\n", "[A() for _ in range(9)]\n"], 2, Cause.ADDRESSES),
        (["import os\n", "os.environ['WHERE']\n"], 1, Cause.ENVIRONMENT),
    ],
)
def test_a_divergent_line_is_named_with_its_cause(
    lines: list[str], at: int, expected: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "there")
    t = played([*lines, "exit()\n"])
    monkeypatch.setenv("WHERE", "here")
    # These take the places in memory that the recorded objects had.
    kept = [type("A", (), {})() for _ in range(1000)]
    found = asyncio.run(verify(t, SANDBOX)).difference
    assert kept
    assert found is not None
    assert (found.line, found.cause) == (at, expected)


def test_what_changes_from_run_to_run_without_a_reason_in_the_lines_is_randomness() -> None:
    recorded, now, again = (Shown(text, LineStatus.OK) for text in ("1\n", "2\n", "3\n"))
    assert cause(["f()\n"], recorded, now, again) is Cause.RANDOMNESS
    assert cause(["f()\n"], recorded, now, now) is Cause.ENVIRONMENT
    late = Shown("1\n", LineStatus.TIMEOUT)
    assert cause(["f()\n"], recorded, late, late) is Cause.TIME


def test_a_cut_observation_agrees_when_both_of_its_ends_do() -> None:
    limits = RolloutLimits(max_line_tokens=200, max_observation_tokens=20)
    t = played(["'é' * 200\n", "exit()\n"], limits)
    assert "tokens cut" in str(t.segments[1])
    assert asyncio.run(verify(t, SANDBOX)).difference is None
    cut = Shown("abc\n[... 9 tokens cut ...]\nxyz", LineStatus.OK)
    assert same(cut, Shown("abc---xyz", LineStatus.OK))
    assert not same(cut, Shown("abd---xyz", LineStatus.OK))
    assert not same(cut, Shown("abxyz", LineStatus.OK))
    assert not same(cut, Shown("abc---xyz", LineStatus.EXCEPTION))


def test_a_whole_run_gets_a_score() -> None:
    bad = replace(played(["import time\n", "time.time_ns()\n", "exit()\n"]), id="bad")
    lost = replace(played(LINES), stop=Stop.FAULT, outcome=None, failure=Failure("SandboxFault", "lost"))
    chat = Trajectory("chat", "t", Prompt("Hi", (1,)), played(LINES).segments[:1], Stop.FINISHED, 0, 0, 0.0)
    found = asyncio.run(verify_all([played(LINES), bad, chat, lost], SANDBOX))
    assert (found.verified, found.score) == (2, 0.5)
    assert found.causes == {"time": 1}
    assert [v.id for v in found.divergent] == ["bad"]
    assert "can be shown, but not executed again" in found.verifications[2].skipped


def test_a_line_is_edited_and_the_rest_of_the_trajectory_follows_from_it() -> None:
    async def act(replay: Replay) -> list[str]:
        await replay.edit("x = 7")
        await replay.type("y = x")
        while not replay.ended:
            await replay.step()
        return [step.shown.text for step in replay.steps if step.line in (4, None)]

    assert replayed(played(LINES), act) == [">>> ", "48\n>>> "]


def test_equal_states_have_equal_digests_and_others_have_not() -> None:
    t = played([LINES[0], "import math\n", "def f(): pass\n", "\n", "x * 6\n", "exit()\n"])
    first, second, earlier = (replayed(t, Replay.state, to_line=k) for k in (5, 5, 2))
    assert first == second != earlier
    assert len(first) == 64


def test_a_replay_refuses_what_cannot_be() -> None:
    t = played(LINES)
    with pytest.raises(ConfigError, match="give 0 to 6"):
        replayed(t, Replay.state, to_line=7)
    with pytest.raises(ConfigError, match="within a cell"):
        replayed(t, Replay.state, to_line=2)
    with pytest.raises(ConfigError, match="ended"):
        replayed(t, lambda replay: replay.type("1"), to_line=6)
    with pytest.raises(ConfigError, match="the rollout ended with that line"):
        start_at(t, 6)
    with pytest.raises(ConfigError, match="give 0 to 6"):
        start_at(t, -1)
    with pytest.raises(ConfigError, match="can be shown"):
        check(replace(t, prompt=Prompt("Hi", (1,))))


@pytest.mark.parametrize("line", range(6))
def test_branches_begin_with_the_recorded_ids_and_the_recorded_state(line: int) -> None:
    t = played(LINES)
    start = start_at(t, line)
    seen: list[str] = []

    class Probe(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            await episode.execute("print('x' in globals() and x)")
            seen.append("probed")

    found = asyncio.run(branch(world(LINES[line:], Probe()), start, TASK, 3)).trajectories
    recorded = (*t.prompt.token_ids, *t.completion_ids)
    for each in found:
        assert (*each.prompt.token_ids, *each.completion_ids)[: len(start.token_ids)] == start.token_ids
        assert start.token_ids == recorded[: len(start.token_ids)]
        assert each.lines[:line] == t.lines[:line]
        assert each.id.startswith(f"{t.id}+{line}.")
    assert len(seen) == 3


@pytest.mark.parametrize("line", range(6))
def test_a_policy_goes_on_from_any_line_as_it_would_have(line: int) -> None:
    t = played(LINES)
    found = asyncio.run(branch(world(LINES[line:]), start_at(t, line), TASK, 2))
    assert [each.completion_ids for each in found.trajectories] == [t.completion_ids] * 2
    assert found.value == 1.0
    assert asyncio.run(branch(world(LINES[line:]), start_at(t, line), None, 1)).value is None


def test_the_policy_goes_on_from_an_edited_line_which_is_masked() -> None:
    t = played(LINES)

    async def act(replay: Replay) -> Trajectory:
        await replay.edit("x = 5")
        start = start_of(replay, RENDERER.encode)
        assert start.token_ids[: len(t.prompt.token_ids)] == t.prompt.token_ids
        return (await branch(world(["x * 6\n", "submit_final_answer(x * 6)\n"]), start, TASK, 1)).trajectories[0]

    from_the_prompt = replayed(t, act)
    assert from_the_prompt.prompt.text == t.prompt.text + "x = 5\n>>> "
    assert from_the_prompt.answer == "30"
    later = replayed(t, act, to_line=4)
    assert later.lines[:4] == t.lines[:4]
    assert later.segments[7] == Observed(">>> x = 5\n>>> ", (*t.segments[7].token_ids, *RENDERER.encode("x = 5\n>>> ")))
    assert later.answer == "30"


def test_a_replay_without_edits_branches_as_recorded_and_an_ended_one_not() -> None:
    t = played(LINES)

    async def act(replay: Replay) -> None:
        assert start_of(replay, RENDERER.encode) == start_at(t, 2)
        await replay.to_line(4)
        await replay.edit("submit_final_answer(0)")
        with pytest.raises(ConfigError, match="nothing can follow"):
            start_of(replay, RENDERER.encode)

    replayed(t, act, to_line=2)


def test_a_console_that_ends_while_it_is_rebuilt_is_our_failure() -> None:
    t = played(LINES)
    start = replace(start_at(t, 4), texts=("exit()\n", "x = 1\n"))
    (found,) = asyncio.run(branch(world(LINES[4:]), start, TASK, 1)).trajectories
    assert found.failure is not None
    assert found.failure.kind == SandboxFault.__name__


def test_a_line_that_no_console_ran_is_passed_over() -> None:
    t = played(LINES)
    thought = Line((1,), (-0.1,), "# hm\n", LineEnd.NEWLINE)
    changed = replace(t, segments=(Sampled((thought, *t.lines[:1])), *t.segments[1:]))

    async def act(replay: Replay) -> list[str]:
        assert await replay.step() is None
        return [replay.prompt]

    with pytest.raises(ConfigError, match="can be shown"):
        replayed(changed, act)
    spoken = replace(t, segments=(Sampled((thought,)), *t.segments[1:]))
    assert replayed(spoken, act) == [">>> "]


def test_restore_comes_first() -> None:
    class Late(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            with pytest.raises(ConfigError, match="call it first"):
                await episode.restore((), ())

    asyncio.run(world(["1\n"], Late()).collect([TASK]))


def test_a_sampler_that_continues_takes_the_recorded_prompt() -> None:
    start = start_at(played(LINES), 1)
    assert Continue(world(LINES).sampler, start).prompt(TASK, RENDERER, "chat", "3") is start.prompt


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(["replay", *argv, "--sandbox", "unsafe"])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_the_terminal_shows_a_trajectory_with_statuses_and_no_control_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_step(tmp_path, 1, [played(["print('\\x1b[2J\\x00\\u202e')\n", "1/0\n", "exit()\n"])])
    code, out = run_cli(capsys, str(path))
    assert code == 0
    assert "\\x1b[2J\\x00\\u202e" in out
    assert "\x1b[2J" not in out
    assert "ZeroDivisionError" in out
    assert "exception" in out


def test_verify_prints_a_score_and_each_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = replace(played(["import time\n", "time.time_ns()\n", "exit()\n"]), id="bad")
    write_step(tmp_path, 1, [played(LINES), bad])
    code, out = run_cli(capsys, str(tmp_path), "--verify")
    assert code == 1
    assert "determinism 50.00%" in out
    assert "bad" in out
    assert "time" in out
    code, out = run_cli(capsys, str(tmp_path), "--verify", "--id", played(LINES).id)
    assert (code, "determinism 100.00%" in out) == (0, True)


def test_lines_are_typed_into_the_rebuilt_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    monkeypatch.setattr("sys.stdin", io.StringIO("x + 100\nprint('\\x1b[2J')\n"))
    code, out = run_cli(capsys, str(path), "--to-line", "4")
    assert code == 0
    assert "107" in out
    assert "\x1b[2J" not in out


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_step(tmp_path, 1, [played(LINES)])
    assert run_cli(capsys, str(path), "--id", "0-t1-1")[0] == 2
    assert run_cli(capsys, str(tmp_path / "none"))[0] == 2
    assert run_cli(capsys, str(path), "--branch", "-1")[0] == 2
    assert run_cli(capsys, str(path), "--verify", "--branch", "2")[0] == 2
