"""Branches begin with the very same ids, in consoles of the very same state."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout_config import RolloutConfig
from repl_rl.runs.replay import (
    STATE_LINE,
    Branches,
    ContinueSampler,
    Replay,
    branch,
    get_branch_point,
    get_replay_branch_point,
)
from repl_rl.sandbox import LineResult, open_sandbox
from repl_rl.sandbox.base import Sandbox, SandboxSession
from repl_rl.tasks import Split, Task
from repl_rl.trajectory.trajectory import FailureKind, Observed, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world
from tests.unit.test_replay import LINES, played, replayed


@pytest.mark.parametrize("line", range(6))
def test_branches_begin_with_the_recorded_ids_and_the_recorded_state(line: int) -> None:
    t = played(LINES)
    start = get_branch_point(t, line)
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
    found = asyncio.run(branch(world(LINES[line:]), get_branch_point(t, line), TASK, 2))
    assert [each.completion_ids for each in found.trajectories] == [t.completion_ids] * 2
    assert found.mean_outcome == 1.0
    assert asyncio.run(branch(world(LINES[line:]), get_branch_point(t, line), None, 1)).mean_outcome is None


@dataclass
class Watched:
    """A sandbox whose consoles tell a digest of their namespace at each fresh prompt."""

    inner: Sandbox
    name: str = "watched"
    python_version: tuple[int, int, int] = sys.version_info[:3]
    states: list[list[str]] = field(default_factory=list)
    """Of each console: what `STATE_LINE` printed before each physical line; "" within a cell."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        async with self.inner.session() as console:
            self.states.append([])
            yield WatchedSession(console, self.states[-1])


@dataclass
class WatchedSession:
    inner: SandboxSession
    states: list[str]
    more: bool = False

    @property
    def ended(self) -> bool:
        return self.inner.ended

    async def push(self, line: str) -> LineResult:
        self.states.append("" if self.more else (await self.inner.push(STATE_LINE)).text)
        result = await self.inner.push(line)
        self.more = result.incomplete
        return result


async def branched(recorded: Rollouts, policy: Rollouts, task: Task, line: int, count: int) -> tuple[str, Branches]:
    """What the state was before `line` when it was recorded, and branches from there: they have the recorded ids, and
    their consoles that very state. Each line is one physical line."""
    first, later = Watched(recorded.sandbox), Watched(policy.sandbox)
    (t,) = await replace(recorded, sandbox=first).collect([task])
    found = await branch(replace(policy, sandbox=later), get_branch_point(t, line), task, count)
    assert [states[: line + 1] for states in later.states] == [first.states[0][: line + 1]] * count
    ids = (*t.prompt.token_ids, *t.completion_ids)[: len(found.start.token_ids)]
    assert all((*b.prompt.token_ids, *b.completion_ids)[: len(ids)] == ids for b in found.trajectories)
    return first.states[0][line], found


def test_consoles_of_branches_have_the_namespace_that_the_recorded_one_had() -> None:
    lines = ["x = 6\n", "def f(y):\n", "    return x * y\n", "\n", "s = {'b', 'a', f}\n", "x += 1\n", "f(6)\n"]
    lines += ["class A: pass\n", "\n", "a = A()\n", "a.b = s\n", "submit_final_answer(f(6))\n"]

    async def work() -> list[str]:
        async with open_sandbox("local", warm=4) as sandbox:
            limits = RolloutLimits(max_lines=20, max_line_tokens=200)
            whole = replace(world(lines, limits=limits), sandbox=sandbox)
            ways = [(k, replace(world(lines[k:], limits=limits), sandbox=sandbox)) for k in (1, 4, 5, 6, 9, 10, 11)]
            found = [await branched(whole, rest, TASK, k, 3) for k, rest in ways]
            assert [each.mean_outcome for _, each in found] == [1.0] * len(ways)
            return [state for state, _ in found]

    states = asyncio.run(work())
    assert len(set(states)) == len(states), "each of these lines changed the namespace"


def test_a_live_policy_goes_on_from_a_line_in_consoles_of_the_recorded_state() -> None:
    live = RolloutConfig(engine="transformers", concurrency=4)
    tasks = live.draw_tasks(Split.TRAIN, 40)
    task = next(task for task in tasks if task.id.startswith("chain"))

    async def work() -> Branches:
        async with live.open_rollouts() as rollouts:
            lines = ["p = 38\n", "q = p + 8\n", "q\n", "submit_final_answer(q)\n"]
            scripted = replace(rollouts, engine=ScriptedEngine.from_text(lines, rollouts.renderer.encode))
            return (await branched(scripted, rollouts, task, 2, 4))[1]

    found = asyncio.run(work())
    assert len(found.trajectories) == 4
    assert all(len(t.lines) > 2 and t.failure is None for t in found.trajectories)
    assert found.mean_outcome is not None


def test_the_policy_goes_on_from_an_edited_line_which_is_masked() -> None:
    t = played(LINES)

    async def act(replay: Replay) -> Trajectory:
        await replay.run_instead("x = 5")
        start = get_replay_branch_point(replay, RENDERER)
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
        assert get_replay_branch_point(replay, RENDERER) == get_branch_point(t, 2)
        await replay.run_to_line(4)
        await replay.run_instead("submit_final_answer(0)")
        with pytest.raises(ConfigError, match="nothing can follow"):
            get_replay_branch_point(replay, RENDERER)

    replayed(t, act, to_line=2)


@pytest.mark.parametrize("ran", [("exit()", "x = 1"), ("x = 1", "exit()")])
def test_a_console_that_ends_while_it_is_rebuilt_is_our_failure(ran: tuple[str, ...]) -> None:
    t = played(LINES)
    start = replace(get_branch_point(t, 4), executed_lines=ran)
    (found,) = asyncio.run(branch(world(LINES[4:]), start, TASK, 1)).trajectories
    assert found.failure is not None
    assert found.failure.kind is FailureKind.SANDBOX_FAULT


def test_restore_comes_first() -> None:
    class Late(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            await episode.sample()
            with pytest.raises(ConfigError, match="call it first"):
                await episode.restore((), ())

    asyncio.run(world(["1\n"], Late()).collect([TASK]))


def test_a_sampler_that_continues_takes_the_recorded_prompt() -> None:
    start = get_branch_point(played(LINES), 1)
    assert ContinueSampler(world(LINES).sampler, start).prompt(TASK, RENDERER, "chat", "3") is start.prompt
