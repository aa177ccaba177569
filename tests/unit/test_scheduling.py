"""Who begins first, who is given up, and that neither changes what a rollout is."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.engine import ScriptedEngine
from repl_rl.errors import ConfigError
from repl_rl.rollout import ReplSampler, Rollouts, RolloutSampler
from repl_rl.rollout.episode import Episode
from repl_rl.rollout.length_estimator import LengthEstimator
from repl_rl.rollout.rollout_limits import RolloutLimits
from repl_rl.rollout.rollout_stats import compute_step_metrics
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.sandbox import InProcessSandbox
from repl_rl.tasks import Task
from repl_rl.trajectory.trajectory import LineStatus, Stop, Trajectory
from tests.support.scripted_rollouts import RENDERER, TASK, world
from tests.support.tokenizers import overshooting_tokenizer

SCRIPTS = [
    ["x = 3\n", "x\n", "submit_final_answer(x)\n"],
    ["1/0\n", "y = 1/0\n", "submit_final_answer(3)\n"],
    ["submit_final_answer(4)\n"],
    ["import math\n", "if 1:\n", "    x = 5\n", "\n", "# done\n", "del math\n", "submit_final_answer(3)\n"],
]
IDS = [[i for line in lines for i in RENDERER.encode(line)] for lines in SCRIPTS]


def record(trajectories: Sequence[Trajectory]) -> dict[str, tuple[object, ...]]:
    return {t.id: (t.seed, t.completion_ids, t.loss_mask, t.outcome, t.stop) for t in trajectories}


def play(tasks: Sequence[Task], rollouts: Rollouts) -> dict[str, tuple[object, ...]]:
    return record(asyncio.run(rollouts.collect(tasks)))


class Delayed(ReplSampler):
    """The console sampler, each rollout of which lets others go first a random number of times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    async def rollout(self, episode: Episode) -> None:
        for _ in range(self._random.randrange(9)):
            await asyncio.sleep(0)
        await super().rollout(episode)


@settings(max_examples=12)
@given(st.permutations(range(24)), st.integers(1, 30), st.integers(0, 99))
def test_order_and_concurrency_leave_every_trajectory_as_it_is(order: list[int], places: int, delays: int) -> None:
    tasks = [Task(str(i), f"task {i}", "3", family=str(i % 3)) for i in range(24)]
    plain = replace(world([], concurrency=8), engine=ScriptedEngine(IDS, seed=5))
    other = replace(plain, sampler=Delayed(delays), settings=replace(plain.settings, concurrency=places))
    shuffled = [tasks[i] for i in order]
    lengths = LengthEstimator()
    asyncio.run(lengths.collect_longest_first(other, shuffled[:5]))
    assert record(asyncio.run(lengths.collect_longest_first(other, shuffled))) == play(tasks, plain)


def test_the_family_that_took_longest_begins_first_and_groups_stay_together() -> None:
    short, long, new = (Task(name, f"task {name}", "3", family=name) for name in ("short", "long", "new"))
    (t,) = asyncio.run(world(["x\n", "x\n", "submit_final_answer(3)\n"]).collect([long]))
    (u,) = asyncio.run(world(["submit_final_answer(3)\n"]).collect([short]))
    lengths = LengthEstimator()
    lengths.update(long, t)
    lengths.update(short, u)
    assert lengths.sort_longest_first([short, long, new, long, short]) == [2, 1, 3, 0, 4]
    assert LengthEstimator().sort_longest_first([short, long, short, long]) == [0, 2, 1, 3]


def test_rollouts_get_their_places_in_that_order_and_come_back_in_the_given_one() -> None:
    begun: list[str] = []

    class Noting(RolloutSampler):
        async def rollout(self, episode: Episode) -> None:
            begun.append(episode.task.id)
            await episode.push(await episode.sample())

    a, b = (Task(name, f"task {name}", "3", family=name) for name in "ab")
    rollouts, lengths = world(["1\n"], Noting(), concurrency=1), LengthEstimator()
    lengths.update(a, asyncio.run(rollouts.collect([a]))[0])
    begun.clear()
    played = asyncio.run(lengths.collect_longest_first(rollouts, [a, b, a, b]))
    assert begun == ["b", "b", "a", "a"]
    assert [t.task_id for t in played] == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("lines", "played"),
    [
        (["1/0\n", "1/0\n", "1/0\n", "1\n"], 3),
        (["1/0\n", "2/0\n", "x\n", "3/0\n", "1/0\n", "1/0\n", "1/0\n"], 6),
        (["# a\n", "\n", "pass\n", "1\n"], 3),
        (["if 1:\n", "    # a\n", "    pass\n", "\n", "# b\n", "# c\n", "1\n", "exit()\n"], 8),
        (["x\n", "y\n", "x\n", "y\n", "x\n", "exit()\n"], 6),
    ],
)
def test_three_lines_in_a_row_of_one_kind_doom_a_rollout(lines: list[str], played: int) -> None:
    rollouts = world(lines, ReplSampler(max_error_streak=3), RolloutLimits(max_lines=20))
    (t,) = asyncio.run(rollouts.collect([TASK]))
    assert len(t.lines) == played
    doomed = lines[played - 1] != "exit()\n"
    assert t.stop is (Stop.EARLY_STOPPED if doomed else Stop.EXITED)
    metrics = compute_step_metrics(rollouts.sampler, rollouts.limits, [t], None, {})
    assert metrics == {"lines_saved": 20 - played if doomed else 0}


def test_processes_of_one_run_share_no_id_and_no_seed_of_a_rollout() -> None:
    plain = world(["exit()\n"])
    played = [
        t
        for n in range(3)
        for t in asyncio.run(replace(plain, settings=replace(plain.settings, replica=n)).collect([TASK, TASK]))
    ]
    assert len({t.id for t in played}) == len({t.seed for t in played}) == 6
    assert [t.id for t in played[:2]] == [f"0-{TASK.id}-0", f"0-{TASK.id}-1"]


def test_a_task_that_is_played_again_after_a_step_has_other_seeds(tmp_path: Path) -> None:
    rollouts = world(["exit()\n"])
    first = asyncio.run(rollouts.collect([TASK, TASK]))
    asyncio.run(rollouts.engine.load_weights(tmp_path, 1))
    second = asyncio.run(rollouts.collect([TASK, TASK]))
    assert len({t.seed for t in (*first, *second)}) == 4


def test_nothing_is_given_up_by_default() -> None:
    (t,) = asyncio.run(world(["1/0\n"] * 8, limits=RolloutLimits(max_lines=8)).collect([TASK]))
    assert t.stop is Stop.MAX_LINES
    assert {execution.status for execution in t.executions} == {LineStatus.EXCEPTION}


@pytest.mark.parametrize("number", [-1, 1, 9])
def test_a_streak_that_means_nothing_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match="max_error_streak"):
        ReplSampler(max_error_streak=number).check(RolloutLimits(max_lines=8))


def test_thousands_of_rollouts_end_and_no_more_are_under_way_than_asked_for() -> None:
    rollouts = world(["submit_final_answer(42)\n"], concurrency=4096)
    played = asyncio.run(rollouts.collect([TASK] * 4096))
    assert {t.stop for t in played} == {Stop.ANSWERED}
    assert len({t.id for t in played}) == 4096
    assert isinstance(rollouts.engine, ScriptedEngine)
    assert rollouts.engine.open_sessions == 0


def test_weights_replaced_in_the_middle_of_rollouts_leave_consoles_and_records_whole(tmp_path: Path) -> None:
    lines = ["x = 40\n", "x += 2\n", "submit_final_answer(x)\n"]

    class Meeting(ReplSampler):
        """Waits after its second line until weights were replaced."""

        def __init__(self) -> None:
            self.arrived, self.continue_after_answer = asyncio.Semaphore(0), asyncio.Event()

        async def rollout(self, episode: Episode) -> None:
            for _ in range(2):
                await episode.push(await episode.sample())
            self.arrived.release()
            await self.continue_after_answer.wait()
            await super().rollout(episode)

    async def work() -> list[Trajectory]:
        sampler = Meeting()
        rollouts = world(lines, sampler, concurrency=8)
        played = asyncio.create_task(rollouts.collect([TASK] * 8))
        for _ in range(8):
            await sampler.arrived.acquire()
        await rollouts.engine.load_weights(tmp_path, 5)
        sampler.continue_after_answer.set()
        return await played

    played = asyncio.run(work())
    assert [(t.answer, t.outcome, t.policy_step) for t in played] == [("42", 1.0, 0)] * 8


def test_an_engine_that_forbids_other_ids_than_the_renderer_is_refused() -> None:
    renderer = Renderer(overshooting_tokenizer())
    engine = ScriptedEngine.from_text(["1\n"], renderer.encode)
    with pytest.raises(ConfigError, match=r"forbidden ids of engine scripted is 0; .*forbidden_ids=renderer"):
        Rollouts(engine, InProcessSandbox(), renderer, ReplSampler(), RolloutLimits())
