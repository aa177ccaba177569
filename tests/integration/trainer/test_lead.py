"""How far rollouts run ahead: a model of sampler and trainer in simulated time, driven by lead and window alone."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import InvariantError
from repl_rl.trainer.plugins.async_rollouts import FifoWindow, StalenessSchedule

GROUPS, SIZE = 4, 3
"""Groups of a step, rollouts of a group."""
Length = Callable[[int, int], float]
"""How long a rollout takes, by its step and its number in it; seconds."""


@dataclass
class Run:
    """What came of a run in simulated time."""

    began: dict[int, int]
    """The weights that each step began with."""
    learned: list[tuple[int, ...]]
    """The groups of each step, in the order in which they were taken."""
    staleness: list[int]
    """Of each step's oldest group, in steps, when it was learned from."""
    wall_s: float
    idle_s: float
    """The trainer waited for rollouts."""


def simulated(
    ahead: int,
    steps: int,
    length: Length,
    update_s: float,
    places: int | None = None,
    groups: int = GROUPS,
    size: int = SIZE,
    share: float = 0.0,
) -> Run:
    """A run whose sampler takes rollouts in the order in which they begin, `places` at once; None: all. Within a window
    of that `share` groups are taken in the order in which they end."""
    lead, window = StalenessSchedule(ahead, steps), FifoWindow(FifoWindow.compute_width(share, ahead, groups))
    run = Run({}, [], [], 0.0, 0.0)
    now, ended_s = 0.0, list[float]()
    free = [0.0] * places if places is not None else None
    for step in range(steps):
        for later in lead.start_steps(step):
            run.began[later] = step
            for group in range(groups):
                ended_s.append(0.0)
                for number in range(group * size, (group + 1) * size):
                    start = now if free is None else max(now, heappop(free))
                    end = start + length(later, number)
                    if free is not None:
                        heappush(free, end)
                        heapify(free)
                    ended_s[-1] = max(ended_s[-1], end)
        taken, ready = list[int](), now
        for _ in range(groups):
            ready, group = min((max(ready, ended_s[group]), group) for group in window.get_available(len(ended_s)))
            window.mark_taken(group)
            taken.append(group)
        run.idle_s += ready - now
        now = ready + update_s
        run.learned.append(tuple(taken))
        run.staleness.append(max(step - run.began[group // groups] for group in taken))
    run.wall_s = now
    return run


def tailed(seed: int, spread: float = 1.0) -> Length:
    """Lengths of heavy tails with a mean of one second."""

    def length(step: int, number: int) -> float:
        return random.Random(f"{seed}/{step}/{number}").lognormvariate(-spread * spread / 2, spread)

    return length


RUNS = {"seed": st.integers(0, 1 << 16), "steps": st.integers(1, 40), "update_s": st.floats(0.01, 9.0)}


@given(ahead=st.integers(0, 8), places=st.none() | st.integers(1, 24), **RUNS)
def test_no_rollout_is_older_than_the_lead_and_the_bound_is_reached(
    ahead: int, places: int | None, seed: int, steps: int, update_s: float
) -> None:
    run = simulated(ahead, steps, tailed(seed), update_s, places)
    assert run.staleness == [min(step, ahead) for step in range(steps)]
    assert list(run.began) == list(range(steps)), "steps begin in order, each once"
    assert run.learned == [tuple(range(step * GROUPS, (step + 1) * GROUPS)) for step in range(steps)]


def test_a_thousand_steps_with_heavy_tails_keep_the_bound() -> None:
    assert max(simulated(4, 1000, tailed(0, 2.0), 1.0, 24).staleness) == 4


@given(**RUNS)
def test_nothing_ahead_is_rollouts_and_updates_by_turns(seed: int, steps: int, update_s: float) -> None:
    length = tailed(seed)
    run = simulated(0, steps, length, update_s)
    turns = sum(max(length(step, n) for n in range(GROUPS * SIZE)) + update_s for step in range(steps))
    assert math.isclose(run.wall_s, turns)


@given(ahead=st.integers(0, 6), **RUNS)
def test_a_longer_lead_never_takes_longer(ahead: int, seed: int, steps: int, update_s: float) -> None:
    one, more = (simulated(k, steps, tailed(seed), update_s) for k in (ahead, ahead + 1))
    assert more.wall_s <= one.wall_s + 1e-9
    assert more.idle_s <= one.idle_s + 1e-9
    assert one.wall_s >= steps * update_s


def test_one_step_ahead_hides_what_takes_equally_long() -> None:
    """Rollouts of one second each, updates of one second: two seconds a step become one."""
    synchronous, ahead = (simulated(k, 100, lambda step, number: 1.0, 1.0) for k in (0, 1))
    assert synchronous.wall_s == pytest.approx(200.0)
    assert ahead.wall_s == pytest.approx(101.0)


@pytest.mark.parametrize(("update_s", "ahead", "speed"), [
    (1.0, 1, 1.78), (1.0, 2, 2.40), (1.0, 4, 3.57), (3.0, 1, 1.79), (3.0, 2, 2.39), (3.0, 4, 3.17),
])  # fmt: skip
def test_heavy_tails_are_hidden_as_the_model_of_the_design_says(update_s: float, ahead: int, speed: float) -> None:
    """12 groups of 8 rollouts whose lengths have a heavy tail, updates of one mean rollout or three: so much faster."""
    turns_s, ahead_s = (simulated(k, 400, tailed(1), update_s, groups=12, size=8).wall_s for k in (0, ahead))
    assert turns_s / ahead_s == pytest.approx(speed, rel=0.05)


@pytest.mark.parametrize(("update_s", "ahead", "speed", "oldest"), [
    (1.0, 1, 1.95, 2), (3.0, 1, 1.95, 2), (1.0, 4, 4.15, 6), (3.0, 4, 3.46, 6),
])  # fmt: skip
def test_a_window_hides_more_of_them_and_reaches_its_bound_as_the_model_of_the_design_says(
    update_s: float, ahead: int, speed: float, oldest: int
) -> None:
    turns, windowed, strict = (
        simulated(k, 400, tailed(1), update_s, groups=12, size=8, share=share)
        for k, share in ((0, 0.0), (ahead, 0.3), (ahead, 0.0))
    )
    assert turns.wall_s / windowed.wall_s == pytest.approx(speed, rel=0.05)
    assert windowed.wall_s < strict.wall_s
    assert max(windowed.staleness) == oldest


@given(ahead=st.integers(0, 6), share=st.floats(0.01, 1.0), places=st.none() | st.integers(1, 24), **RUNS)
def test_with_a_window_every_group_is_learned_from_once_and_none_is_older_than_it_says(
    ahead: int, share: float, places: int | None, seed: int, steps: int, update_s: float
) -> None:
    run = simulated(ahead, steps, tailed(seed, 2.0), update_s, places, share=share)
    assert sorted(group for groups in run.learned for group in groups) == list(range(steps * GROUPS))
    width = FifoWindow.compute_width(share, ahead, GROUPS)
    assert max(run.staleness) <= FifoWindow.compute_max_staleness(width, ahead, GROUPS)


@pytest.mark.parametrize(("width", "groups", "more"), [(1, 4, 0), (2, 4, 1), (5, 4, 1), (6, 4, 2), (9, 4, 2)])
def test_a_group_that_all_others_of_its_window_pass_is_as_old_as_it_says_and_no_older(
    width: int, groups: int, more: int
) -> None:
    window, late = FifoWindow(width), groups - 1  # the last of its step: begun as late, taken as late as can be
    order = list[int]()
    while len(order) < 4 * groups:
        open_ = window.get_available(5 * groups)
        order.append(next((group for group in open_ if group != late), late))
        window.mark_taken(order[-1])
    assert order.index(late) // groups == more == FifoWindow.compute_max_staleness(width, 0, groups)


@given(width=st.integers(1, 12), at=st.integers(0, 40), picks=st.lists(st.integers(0, 99), min_size=40, max_size=40))
def test_a_window_that_is_told_what_was_taken_goes_on_as_the_one_before(width: int, at: int, picks: list[int]) -> None:
    window, taken = FifoWindow(width), list[int]()
    for pick in picks[:at]:
        open_ = window.get_available(100)
        taken.append(open_[pick % len(open_)])
        window.mark_taken(taken[-1])
    first = next(n for n in range(100) if n not in taken)
    after = FifoWindow(width, first, [group for group in taken if group > first])
    assert after.get_available(100) == window.get_available(100)
    assert (
        after.get_remaining(0, 60)
        == window.get_remaining(0, 60)
        == [group for group in range(60) if group not in taken]
    )


@pytest.mark.parametrize("group", [0, 2, 3, 7])
def test_a_group_outside_of_the_window_or_taken_before_is_refused(group: int) -> None:
    window = FifoWindow(3, 1, [2])
    assert window.get_available(9) == [1, 3]
    if group == 3:
        window.mark_taken(group)
    with pytest.raises(
        InvariantError, match=f"group {group} was taken already, or is outside the window that begins at 1"
    ):
        window.mark_taken(group)


@given(ahead=st.integers(0, 8), at=st.integers(0, 30), left=st.integers(1, 30))
def test_a_run_that_is_gone_on_with_begins_what_the_undisturbed_one_has_under_way(
    ahead: int, at: int, left: int
) -> None:
    undisturbed, resumed = StalenessSchedule(ahead, at + left), StalenessSchedule(ahead, at + left)
    begun = {step for weights in range(at + 1) for step in undisturbed.start_steps(weights)}
    assert set(resumed.start_steps(at)) == {step for step in begun if step >= at}
    for weights in range(at + 1, at + left):
        assert list(resumed.start_steps(weights)) == list(undisturbed.start_steps(weights))


@pytest.mark.parametrize("weights", [0, 2, 5])
def test_weights_that_do_not_come_one_by_one_are_refused(weights: int) -> None:
    lead = StalenessSchedule(2, 10)
    lead.start_steps(0)
    with pytest.raises(InvariantError, match=f"weights {weights} follow weights 0"):
        lead.start_steps(weights)
