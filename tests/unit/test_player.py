"""The player's kernel side: what a page may ask for, and what it gets."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.rollout import SyncRollouts
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.trajectory_player import LiveReplay, TrajectoryPlayer
from tests.support.reports import pick, size, unpacked
from tests.support.run_folders import HOSTILE, rollout, run_folder
from tests.support.scripted_rollouts import TASK, world

LINES = ["x = 6\n", "x * 6\n", "submit_final_answer(x * 6)\n"]


@pytest.fixture
def policy() -> Iterator[SyncRollouts]:
    with SyncRollouts(lambda: nullcontext(world(LINES[1:])), {TASK.id: TASK}) as source:
        yield source


@pytest.fixture
def live(policy: SyncRollouts) -> Iterator[LiveReplay]:
    recorded = asyncio.run(world(LINES).collect([TASK]))
    live = LiveReplay([CreditedTrajectory(t) for t in recorded], RolloutConfig(sandbox="unsafe"), policy, [TASK])
    yield live
    live.close()


def ask(live: LiveReplay, kind: str, line: int = 1, fresh: bool = False, **more: object) -> dict[str, object]:
    return dict(
        live.handle_message({"kind": kind, "text": "", "at": 0, "line": line, "count": 0, "fresh": fresh, **more})
    )


def test_lines_run_in_a_console_rebuilt_to_where_the_player_stands(live: LiveReplay) -> None:
    assert pick(ask(live, "type", text="x + 1"), "steps", 0, "shown") == "7\n>>> "
    ask(live, "edit", text="x = 50")
    answer = ask(live, "type", text="x")
    assert size(answer["steps"]) == 3
    assert pick(answer, "steps", 2, "shown") == "50\n>>> "
    again = ask(live, "step", fresh=True)
    assert (pick(again, "steps", 0, "text"), pick(again, "steps", 0, "shown")) == ("x * 6\n", "36\n>>> ")
    assert pick(again, "steps", 0, "difference") is None


def test_the_policy_goes_on_from_there_and_the_line_has_a_value(live: LiveReplay) -> None:
    answer = ask(live, "branch", count=3)
    assert (size(answer["branches"]), answer["value"]) == (3, 0.0)
    assert pick(answer, "branches", 0, "answer") == "36"
    ask(live, "type", text="x = 7", fresh=True)
    answer = ask(live, "branch", count=2)
    assert (answer["value"], pick(answer, "branches", 1, "answer")) == (1.0, "42")


@pytest.mark.parametrize(
    ("message", "part"),
    [
        ({"kind": "drop"}, "choose one of"),
        ({"at": 9}, "give 0 to 0"),
        ({"line": 9}, "give 0 to 3"),
        ({"at": "0"}, "whole numbers"),
        ({"text": "1\n2"}, "give one line"),
        ({"kind": "branch", "count": 10**9}, "give 1 to 64"),
    ],
)
def test_a_page_may_send_anything(live: LiveReplay, message: dict[str, object], part: str) -> None:
    asked = {"kind": "type", "text": "1", "at": 0, "line": 1, "count": 1, "fresh": True} | message
    assert part in str(live.handle_message(asked)["error"])


def test_the_player_takes_a_run_a_store_or_trajectories(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    player = TrajectoryPlayer(run, sandbox="")
    data = unpacked(player.data)
    assert (size(pick(data, "rows")), pick(data, "tokens", "0")) == (24, "x")
    assert not player.live
    one = TrajectoryPlayer(rollout(0, "one", 1), tokens=["y"])
    assert (pick(unpacked(one.data), "tokens"), one.live) == ({}, True)
    one.close()


def test_where_no_widgets_are_shown_there_is_a_page_in_a_frame_that_reaches_nothing(tmp_path: Path) -> None:
    player = TrajectoryPlayer(rollout(0, "one", 1, HOSTILE), sandbox="")
    bundle = player._repr_mimebundle_()
    assert bundle is not None
    frame = str(bundle[0]["text/html"])
    assert frame.startswith('<iframe sandbox="allow-scripts"')
    assert frame.count("<") == 2
    assert "default-src 'none'" in player.html()
    assert "window.hacked" not in player.html()
    assert "application/vnd.jupyter.widget-view+json" in bundle[0]
