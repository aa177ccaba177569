"""Hooks of rollouts are called at their points, in their order, and cost nothing where none is given."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace

import pytest

from repl_rl import RolloutHook, Rollouts, RolloutSettings, SyncRollouts
from repl_rl.deprecations import OldNameWarning
from repl_rl.errors import SandboxLost, UnrecoverableError
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.retry import FaultRetries, get_fault_counts
from repl_rl.rollout.rollout_hooks import BatchNotes, RolloutContext, RunRollout, find_hook
from repl_rl.sandbox.base import Limits, LineResult
from repl_rl.sandbox.inprocess import InProcessSandbox, InProcessSession
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import Line, Observed, Trajectory
from repl_rl.trajectory.trajectory_builder import UNFOLLOWED
from tests.support.documents import blocks
from tests.support.scripted_rollouts import TASK, world

LINES = ["x = 6\n", "submit_final_answer(x * 7)\n"]


class Recording(RolloutHook):
    """Records its calls, in a list that several hooks share."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def note(self, call: str) -> None:
        self.calls.append(f"{self.name} {call}")

    def declare(self, task: Task, depth: int) -> Task:
        self.note(f"declare {depth}")
        return replace(task, question=f"{task.question} {self.name}")

    def wrap_rollout(self, context: RolloutContext, run: RunRollout) -> RunRollout:
        async def run_noted(notes: BatchNotes) -> Trajectory:
            self.note("begin")
            trajectory = await run(notes)
            self.note("end")
            return trajectory

        return run_noted

    def on_rollout_start(self, context: RolloutContext, episode: Episode) -> None:
        self.note(f"start {episode.id == context.spec.id}")

    def on_rollout_end(self, task: Task, trajectory: Trajectory) -> None:
        self.note(f"ended {task.id} {trajectory.outcome}")

    async def on_group_end(self, tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        self.note(f"group {len(tasks)}")
        return [replace(t, wall_s=t.wall_s + 1.0) for t in trajectories]

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {f"metric_{self.name}": float(len(trajectories))}


class Observing(RolloutHook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def observe(self, item: Line | Observed) -> None:
        ran = isinstance(item, Line) and item.execution is not None
        self.seen.append(f"{item.text!r}{' ran' if ran else ''}")


def test_hooks_are_called_in_their_order_and_the_first_one_is_the_innermost() -> None:
    calls: list[str] = []
    rollouts = replace(world(LINES), hooks=(Recording("a", calls), Recording("b", calls)))
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert calls == [
        "a declare 0", "b declare 0", "b begin", "a begin", "a start True", "b start True", "a end", "b end",
        "a ended t1 1.0", "b ended t1 1.0", "a group 1", "b group 1",
    ]  # fmt: skip
    assert t.prompt.text.startswith("What is 6 * 7? a b\n")
    assert t.wall_s > 2.0


def test_a_hook_observes_each_line_twice_and_what_the_console_shows_once() -> None:
    hook, other = Observing(), Observing()
    asyncio.run(replace(world(LINES), hooks=(hook, RolloutHook(), other)).collect([TASK]))
    first, last = (repr(line) for line in LINES)
    assert hook.seen == [first, f"{first} ran", "'>>> '", last, f"{last} ran"]
    assert other.seen == hook.seen


def test_no_line_calls_a_hook_that_does_not_observe() -> None:
    assert replace(world(LINES), hooks=(RolloutHook(), Recording("a", [])))._observer is UNFOLLOWED
    assert replace(world(LINES), hooks=())._observer is UNFOLLOWED


def test_the_changes_of_a_group_are_kept_with_what_was_there_before() -> None:
    calls: list[str] = []
    changing = replace(world(LINES), hooks=(Recording("a", calls),))
    changed, plain = (asyncio.run(each.collect_group(TASK, 2)) for each in (changing, world(LINES)))
    assert [t.wall_s + 1.0 for t in changed.ungraded_trajectories] == [t.wall_s for t in changed.trajectories]
    assert plain.ungraded_trajectories == ()


def test_metrics_of_hooks_are_metrics_of_the_step() -> None:
    opened = replace(world(LINES), hooks=(Recording("a", []), Recording("b", [])))
    with SyncRollouts(lambda: nullcontext(opened), {TASK.id: TASK}) as source:
        played = source.collect([TASK.id] * 2, 0)
        assert source.metrics(played) == {"metric_a": 2.0, "metric_b": 2.0}


def test_an_error_of_a_hook_stops_the_run() -> None:
    class Wrong(RolloutHook):
        def on_rollout_start(self, context: RolloutContext, episode: Episode) -> None:
            raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        asyncio.run(replace(world(LINES), hooks=(Wrong(),)).collect([TASK] * 3))


class LostSession(InProcessSession):
    async def push(self, line: str) -> LineResult:
        raise SandboxLost("gone")


class LosingSandbox(InProcessSandbox):
    """Loses each console with its first line."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[InProcessSession]:
        yield LostSession(Limits())


def test_without_retries_a_rollout_has_one_attempt() -> None:
    rollouts = replace(world(LINES), sandbox=LosingSandbox(), hooks=())
    with pytest.raises(UnrecoverableError, match=r"lost in each of 2 rollouts \("):
        asyncio.run(rollouts.collect([TASK] * 2))
    assert not any(get_fault_counts(rollouts).values())


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"lengths": '{"": 7.0}'}, 0),
        ({"lengths": "{}", "broken": {"engine_deaths": 2, "consoles_lost": 3}}, 3),
    ],
)
def test_a_state_of_an_older_checkpoint_loads(old: dict[str, object], expected: int) -> None:
    with SyncRollouts(lambda: nullcontext(world(LINES)), {TASK.id: TASK}) as source:
        source.load_state_dict(json.dumps(old))
        assert source.stats.faults["consoles_lost"] == expected
        assert json.loads(source.state_dict())["lengths"] == old["lengths"]
        assert json.loads(source.state_dict())["broken"] == source.stats.faults


def test_a_hook_is_found_by_its_class() -> None:
    retries = FaultRetries()
    assert find_hook((RolloutHook(), retries, FaultRetries()), FaultRetries) is retries
    assert find_hook((RolloutHook(),), FaultRetries) is None


def test_settings_are_taken_under_their_old_keywords_and_read_under_their_old_names() -> None:
    plain = world(LINES)
    make: Callable[..., object] = Rollouts
    parts = (plain.engine, plain.sandbox, plain.renderer, plain.sampler, plain.limits)
    with pytest.warns(OldNameWarning) as caught:
        made = make(*parts, template="bare", seed=3)
    assert [str(each.message).partition(";")[2] for each in caught] == [
        " use 'settings.seed'",
        " use 'settings.template'",
    ]
    assert isinstance(made, Rollouts)
    assert made.settings == RolloutSettings("bare", seed=3)
    with pytest.warns(OldNameWarning, match="'concurrency'"):
        fewer: Rollouts = replace(made, concurrency=2)  # type: ignore[call-arg]
    assert fewer.settings == RolloutSettings("bare", seed=3, concurrency=2)
    with pytest.warns(OldNameWarning, match=r"Rollouts\.seed is deprecated .*; use Rollouts\.settings\.seed"):
        assert getattr(fewer, "seed") == 3  # noqa: B009


def test_the_hook_of_the_design_page_collects_lines() -> None:
    namespace: dict[str, Callable[..., RolloutHook]] = {}
    (block,) = blocks("python", "docs/design.md")
    exec(block, namespace)
    hooks = [namespace["SlowLines"](limit_s) for limit_s in (-1.0, 60.0)]
    asyncio.run(replace(world(LINES), hooks=tuple(hooks)).collect([TASK]))
    assert [vars(hook)["found"] for hook in hooks] == [LINES, []]
