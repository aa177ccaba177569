"""The player's kernel side with real consoles."""

import asyncio
from pathlib import Path

from repl_rl.credit.credited_trajectory import CreditedTrajectory
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.trajectory_player import LiveReplay
from tests.support.reports import pick
from tests.support.scripted_rollouts import TASK, world
from tests.unit.test_player import LINES, ask


def test_without_a_policy_nothing_is_branched() -> None:
    (t,) = asyncio.run(world(LINES).collect([TASK]))
    live = LiveReplay([CreditedTrajectory(t)], RolloutConfig(sandbox="unsafe"), None, [])
    assert pick(ask(live, "type", text="x"), "steps", 0, "shown") == "6\n>>> "
    assert "SyncRollouts" in str(ask(live, "branch", count=1)["error"])
    live.close()


def children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_a_sandbox_in_which_nothing_could_be_rebuilt_is_let_go_too() -> None:
    (t,) = asyncio.run(world(LINES).collect([TASK]))
    before = children()
    live = LiveReplay([CreditedTrajectory(t)], RolloutConfig(sandbox="unsafe"), None, [])
    assert "give 0 to 3" in str(ask(live, "type", line=9)["error"])
    assert children() - before
    live.close()
    assert not children() - before
