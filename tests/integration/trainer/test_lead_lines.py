"""The scheduler in simulated time, line by line: groups of a run, weights between lines, a run that is gone on with.

Rollouts of random lengths share the places of a sampler whose weights change as a real engine's do: what is being
written ends first, whatever is written next has the new ones. Groups, lead and the check of ages are the trainer's own.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

import pytest
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import WeightSyncError
from repl_rl.trainer.config import FifoWindowOptions
from repl_rl.trainer.importance_sampling import compute_token_staleness
from repl_rl.trainer.plugins.async_rollouts import AsyncGroups, FifoWindow, StalenessSchedule, UpcomingTasks
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.ahead_runs import written_by
from tests.support.trainer.tiny_policies import NEWLINE, prompt_of, trajectory_of

TASKS, SIZE, LINES = 2, 2, 4
"""Groups of a step, rollouts of a group, lines of a rollout at most."""


@dataclass
class Rollout:
    """One that is under way, or has ended."""

    step: int
    number: int
    task_id: str
    lines_s: list[float]
    """How long each line takes that is still to come."""
    wrote: list[int] = field(default_factory=list)
    """The weights of each line."""

    def told(self) -> Trajectory:
        prompt = prompt_of(self.task_id)
        t = trajectory_of(prompt, [((5, NEWLINE), (6,))] * len(self.wrote), [0.0] * 999, self.number, self.step)
        return replace(t, id=f"{self.step}-{t.id}", segments=written_by(t, iter(self.wrote)))


class Simulated:
    """A source of rollouts whose clock moves when somebody waits for it, and only then."""

    forbidden_ids = frozenset[int]()
    rollout_busy_s = 0.0

    def __init__(self, seed: int, places: int | None, spread: float = 1.5) -> None:
        self.seed, self.places, self.spread = seed, places, spread
        self.now_s, self.weights = 0.0, -1
        self.waiting = deque[Rollout]()
        self.writing: list[tuple[float, int, int, Rollout]] = []
        """A heap: when each line ends, and whose it is."""
        self.told: dict[int, dict[int, Trajectory]] = {}
        """Rollouts that have ended, of each step."""

    def load_weights(self, folder: Path, policy_step: int) -> None:
        if self.writing:
            self.now_s = max(end_s for end_s, *_ in self.writing)
        paused, self.writing, self.weights = sorted(self.writing), [], policy_step
        for *_, rollout in paused:
            self._go_on(rollout)

    def start_rollouts(self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory]) -> None:
        self.told[policy_step] = dict(finished)
        for number, task_id in enumerate(task_ids):
            if number not in finished:
                rng = random.Random(f"{self.seed}/{policy_step}/{number}")
                lines_s = [rng.lognormvariate(0.0, self.spread) for _ in range(rng.randint(1, LINES))]
                self.waiting.append(Rollout(policy_step, number, task_id, lines_s))
        self._fill()

    def get_finished_rollouts(self, policy_step: int) -> Mapping[int, Trajectory]:
        return self.told[policy_step]

    get_ended_groups = get_finished_rollouts

    def wait_for_first_group(self, groups: Sequence[tuple[int, Sequence[int]]]) -> int:
        while True:
            for number, (policy_step, places) in enumerate(groups):
                if set(places) <= self.told[policy_step].keys():
                    return number
            self._turn()

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        while len(self.told[policy_step]) < len(task_ids):
            self._turn()
        ended = self.told.pop(policy_step)
        return [ended[number] for number in range(len(task_ids))]

    def sample_probe_lines(self, task_id: str) -> Sequence[Trajectory]:
        raise AssertionError

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.writing and self.writing[0][0] <= until_s:
            self._turn()
        self.now_s = until_s

    def _turn(self) -> None:
        self.now_s, _, _, rollout = heappop(self.writing)
        self._go_on(rollout)

    def _go_on(self, rollout: Rollout) -> None:
        if rollout.lines_s:
            rollout.wrote.append(self.weights)
            heappush(self.writing, (self.now_s + rollout.lines_s.pop(0), rollout.step, rollout.number, rollout))
        else:
            self.told[rollout.step][rollout.number] = rollout.told()
            self._fill()

    def _fill(self) -> None:
        while self.waiting and (self.places is None or len(self.writing) < self.places):
            rollout = self.waiting.popleft()
            self._go_on(rollout)


def slots(step: int) -> list[str]:
    return [f"{step}/{task}" for task in range(TASKS) for _ in range(SIZE)]


def upcoming(first: int) -> Iterator[Sequence[str]]:
    step = first
    while True:
        yield slots(step)
        step += 1


@dataclass
class Run:
    """What came of a run."""

    oldest: list[int] = field(default_factory=list)
    """Of each step, in steps, when it was learned from."""
    learned: list[list[Trajectory]] = field(default_factory=list)
    wall_s: float = 0.0


def run(
    ahead: int,
    steps: int,
    source: Simulated,
    update_s: float,
    stops: frozenset[int] = frozenset(),
    late: int = 0,
    share: float = 0.0,
) -> Run:
    """Train for so many steps. `stops`: before those another process goes on. `late`: so much further ahead than it may
    the scheduler runs. `share`: of a window; 0: there is none."""
    made, plan = Run(), FifoWindowOptions(share) if share else None
    oldest = FifoWindow.compute_max_staleness(FifoWindow.compute_width(share, ahead, TASKS), ahead, TASKS)
    groups: AsyncGroups | None = None
    for step in range(steps):
        if step in stops or groups is None:
            told = None if groups is None else groups.state_dict()
            source = type(source)(source.seed, source.places, source.spread) if told else source
            lead, tasks = StalenessSchedule(ahead + late, steps), UpcomingTasks(1, partial(upcoming, step))
            groups = AsyncGroups(source, SIZE, Accelerator(cpu=True), lead, tasks, window=plan)
            if told is not None:
                groups.load_state_dict(told)
        before_s = source.now_s
        source.load_weights(Path(), step)
        rollouts = groups.collect(slots(step), step)
        ages = compute_token_staleness(rollouts, max(len(t.completion_ids) for t in rollouts), step, oldest)
        made.oldest.append(int(ages.max()))
        made.learned.append(list(rollouts))
        source.wait(update_s)
        made.wall_s += source.now_s - before_s
    return made


LEADS = st.integers(0, 5)
STEPS = st.integers(1, 14)
UPDATES_S = st.floats(0.01, 30.0)
SEEDS = st.integers(0, 1 << 16)
SHARES = st.floats(0.01, 1.0)


@given(ahead=LEADS, steps=STEPS, places=st.none() | st.integers(1, 12), update_s=UPDATES_S, seed=SEEDS)
def test_no_line_is_older_than_the_lead_and_where_there_are_places_some_line_is_as_old(
    ahead: int, steps: int, places: int | None, update_s: float, seed: int
) -> None:
    source = Simulated(seed, places)
    made = run(ahead, steps, source, update_s)
    assert all(oldest <= min(step, ahead) for step, oldest in enumerate(made.oldest))
    if places is None:
        assert made.oldest == [min(step, ahead) for step in range(steps)]
    assert [[t.task_id for t in step] for step in made.learned] == [slots(step) for step in range(steps)]


@given(ahead=LEADS, steps=STEPS, places=st.integers(1, 12), update_s=UPDATES_S, seed=SEEDS, data=st.data())
def test_a_run_that_is_gone_on_with_anywhere_keeps_the_bound_and_learns_from_each_rollout_once(
    ahead: int, steps: int, places: int, update_s: float, seed: int, data: st.DataObject
) -> None:
    stops = frozenset(data.draw(st.sets(st.integers(1, max(steps - 1, 1)), max_size=3)))
    made = run(ahead, steps, Simulated(seed, places), update_s, stops)
    assert all(oldest <= min(step, ahead) for step, oldest in enumerate(made.oldest))
    ids = [t.id for step in made.learned for t in step]
    assert len(ids) == len(set(ids)) == steps * TASKS * SIZE
    undisturbed = run(ahead, steps, Simulated(seed, places), update_s)
    assert [id for step in undisturbed.learned for id in (t.id for t in step)] == ids


@given(ahead=LEADS, steps=STEPS, places=st.integers(1, 12), update_s=UPDATES_S, seed=SEEDS, share=SHARES,
       data=st.data())  # fmt: skip
def test_with_a_window_each_rollout_is_learned_from_once_whole_groups_at_a_time_and_no_line_is_too_old(
    ahead: int, steps: int, places: int, update_s: float, seed: int, share: float, data: st.DataObject
) -> None:
    stops = frozenset(data.draw(st.sets(st.integers(1, max(steps - 1, 1)), max_size=3)))
    made = run(ahead, steps, Simulated(seed, places, 2.5), update_s, stops, share=share)  # which checks each line's age
    ids = [t.id for step in made.learned for t in step]
    assert len(ids) == len(set(ids)) == steps * TASKS * SIZE
    names = [t.task_id for step in made.learned for t in step]
    assert sorted(names) == sorted(name for step in range(steps) for name in slots(step))
    assert all(len(set(names[at : at + SIZE])) == 1 for at in range(0, len(names), SIZE))
    assert [{t.policy_step for t in step} for step in made.learned] == [{step} for step in range(steps)]


class Straggling(Simulated):
    """The first groups of step 1, or all, have many times as many lines as any other."""

    groups = 1

    def start_rollouts(self, task_ids: Sequence[str], policy_step: int, finished: Mapping[int, Trajectory]) -> None:
        self.spread = 0.0
        super().start_rollouts(task_ids, policy_step, finished)
        for rollout in [*self.waiting, *(written for *_, written in self.writing)]:
            if rollout.step == 1 and rollout.number < self.groups * SIZE:
                rollout.lines_s = [1.0] * 30


class StragglingStep(Straggling):
    groups = TASKS


STRAGGLED = [
    (Straggling, [["1/1", "2/0"], ["1/0", "2/1"], ["3/0", "3/1"]]),
    (StragglingStep, [["2/0", "2/1"], ["1/0", "3/0"], ["1/1", "3/1"]]),
]


@pytest.mark.parametrize(("straggling", "passed"), STRAGGLED)
@pytest.mark.parametrize("stops", [frozenset[int](), frozenset({2})])
def test_a_window_lets_younger_groups_pass_those_that_take_long_and_a_run_that_goes_on_knows_of_it(
    straggling: type[Straggling], passed: list[list[str]], stops: frozenset[int]
) -> None:
    made = run(3, 8, straggling(0, None), 1.0, stops, share=0.5)
    tasks = [[t.task_id for t in step[::SIZE]] for step in made.learned]
    assert tasks[:4] == [["0/0", "0/1"], *passed], "as many as the window holds beside them"
    assert tasks[4:] == [[f"{step}/0", f"{step}/1"] for step in range(4, 8)]


@pytest.mark.parametrize("ahead", [1, 3])
def test_where_updates_take_longer_than_rollouts_a_stop_leaves_no_trace(ahead: int) -> None:
    undisturbed, stopped = (
        run(ahead, 12, Simulated(5, None, 0.5), 1000.0, stops) for stops in (frozenset[int](), frozenset({1, 4, 5, 11}))
    )
    assert stopped.learned == undisturbed.learned, "lines and the weights that wrote them too"
    assert stopped.oldest == undisturbed.oldest == [min(step, ahead) for step in range(12)]


def test_a_scheduler_that_runs_further_ahead_than_it_may_is_found_out() -> None:
    with pytest.raises(WeightSyncError, match="none may be more than 2 older"):
        run(2, 8, Simulated(0, None), 1.0, late=1)
