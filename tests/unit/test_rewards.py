"""Line rewards: the table, the named extras, and the bound that nothing escapes."""

import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.credit.advantage_estimators import GroupRewards, load_estimator
from repl_rl.credit.rewards import (
    NO_SHAPING,
    Potential,
    RewardTable,
    WeightedReward,
    build_potential,
    compute_error_potential,
    compute_line_rewards,
    compute_shaping,
    load_line_reward,
)
from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.trajectory.trajectory import (
    Execution,
    Failure,
    FailureKind,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Prompt,
    Sampled,
    Stop,
    Trajectory,
)

RAN = [status for status in LineStatus if status not in (LineStatus.ANSWERED, LineStatus.SANDBOX_FAULT)]
"""What any line of a rollout that is trained on may come to."""


def ran(status: LineStatus | None, *rewards: float) -> Line:
    execution = None if status is None else Execution(status, 0.0, "3" if status is LineStatus.ANSWERED else None)
    return Line((5,), (-1.0,), "x\n", LineEnd.NEWLINE, execution, tuple(NamedReward("extra", r) for r in rewards))


def rollout(*lines: Line, fault: bool = False) -> Trajectory:
    failure = Failure(FailureKind.SANDBOX_FAULT, "gone") if fault else None
    segments = (Sampled(lines),) if lines else ()
    stop = Stop.FAULT if fault else Stop.FINISHED
    return Trajectory("t", "task", Prompt("p", (1,)), segments, stop, 0, 0, 0.0, failure=failure)


def test_each_line_earns_what_the_table_says_of_its_own_status() -> None:
    table = RewardTable(syntax_error=-0.1, exception=-0.2, timeout=-0.3, ok=0.05, bound=10)
    statuses = (LineStatus.OK, LineStatus.SYNTAX_ERROR, LineStatus.EXCEPTION, LineStatus.TIMEOUT, LineStatus.ANSWERED)
    assert compute_line_rewards(rollout(*map(ran, statuses)), table) == (0.05, -0.1, -0.2, -0.3, 0.0)


def test_every_status_has_an_entry_except_our_own_faults_the_beginning_of_a_cell_and_the_end_of_a_console() -> None:
    entries = set(RewardTable.__slots__) - {"bound"}
    assert entries == {status.value for status in LineStatus} - {"sandbox_fault", "incomplete", "exited"}


def test_by_default_an_error_costs_a_tenth_and_nothing_else_counts() -> None:
    for status in LineStatus:
        assert RewardTable().get(status) == (-0.1 if status.is_error else 0.0)
        assert NO_SHAPING.get(status) == 0.0


def test_a_sandbox_fault_is_never_rewarded() -> None:
    assert RewardTable(ok=0.1).get(LineStatus.SANDBOX_FAULT) == 0.0
    faulted = rollout(ran(LineStatus.OK, 0.4), ran(LineStatus.SANDBOX_FAULT), fault=True)
    assert compute_line_rewards(faulted, RewardTable(ok=0.1)) == (0.0, 0.0)
    assert compute_line_rewards(rollout(ran(LineStatus.EXCEPTION, 0.4), fault=True), RewardTable()) == (0.0,)


def test_rewards_of_the_sampler_add_to_the_table_on_their_own_line() -> None:
    lines = (ran(LineStatus.EXCEPTION, 0.3, -0.05), ran(None, 0.1))
    assert compute_line_rewards(rollout(*lines), RewardTable()) == pytest.approx((0.15, 0.1))


@given(st.lists(st.tuples(st.sampled_from(RAN), st.lists(st.floats(-1e6, 1e6), max_size=2)), max_size=6))
def test_whatever_was_given_arrives_as_it_was_given_and_an_error_costs_what_the_table_says(
    lines: list[tuple[LineStatus, list[float]]],
) -> None:
    t = rollout(*(ran(status, *extra) for status, extra in lines))
    table = RewardTable(bound=0.1)
    assert compute_shaping(t, table) == tuple(table.get(status) for status, _ in lines)
    expected = [math.fsum((table.get(status), math.fsum(extra))) for status, extra in lines]
    assert compute_line_rewards(t, table) == tuple(expected)


@given(st.lists(st.sampled_from(RAN), max_size=12), st.sampled_from([0.1, 0.25, 0.5]))
def test_what_is_left_of_the_table_from_a_line_on_is_never_more_than_the_bound(
    statuses: list[LineStatus], bound: float
) -> None:
    row = compute_shaping(rollout(*map(ran, statuses)), RewardTable(bound=bound))
    (sums_L,) = GroupRewards.from_rows((None,), (row,), (), (row,), bound).compute_shaping_to_go()
    assert all(abs(value) <= bound for value in sums_L)
    assert sums_L == pytest.approx([max(-bound, math.fsum(row[at:])) for at in range(len(row))])


def test_an_entry_above_the_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards.timeout is -0.6; rewards.bound is 0.5, and no entry may be larger"):
        RewardTable(timeout=-0.6)
    assert RewardTable(timeout=-0.6, bound=1.0).timeout == -0.6


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("ok", lambda: RewardTable(ok=math.nan)),
        ("exception", lambda: RewardTable(exception=math.inf)),
        ("bound", lambda: RewardTable(bound=0.0)),
    ],
)
def test_an_unusable_table_is_refused_by_name(field: str, make: Callable[[], RewardTable]) -> None:
    with pytest.raises(ConfigError, match=f"rewards.{field}"):
        make()


def by_length(t: Trajectory) -> list[float]:
    return [0.01 * len(line.text) for line in t.lines]


def raises(t: Trajectory) -> list[float]:
    raise ZeroDivisionError("no lines")


def lies(t: Trajectory) -> list[float]:
    return [0.1] * (len(t.lines) + 1)


def not_a_number(t: Trajectory) -> list[float]:
    return [math.nan] * len(t.lines)


def not_numbers(t: Trajectory) -> list[str]:
    return ["good"] * len(t.lines)


def test_a_function_of_the_user_adds_to_each_line() -> None:
    t = rollout(ran(LineStatus.OK), ran(LineStatus.EXCEPTION))
    assert compute_line_rewards(t, RewardTable(), [load_line_reward(f"{__name__}:by_length")]) == pytest.approx(
        (0.02, -0.08)
    )


@pytest.mark.parametrize(("name", "message"), [
    ("raises", "raises raised ZeroDivisionError: no lines"),
    ("lies", "lies gave 3 rewards for 2 lines"),
    ("not_a_number", "not_a_number gave nan"),
    ("not_numbers", "not_numbers raised ValueError"),
])  # fmt: skip
def test_a_reward_function_that_breaks_its_contract_is_named(name: str, message: str) -> None:
    t = rollout(ran(LineStatus.OK), ran(LineStatus.OK))
    with pytest.raises(UserCodeError, match=message):
        compute_line_rewards(t, RewardTable(), [load_line_reward(f"{__name__}:{name}")])


def per_row(t: Trajectory, task: object) -> list[float]:
    return [float(str(task))] * len(t.lines)


def test_a_function_with_a_second_parameter_is_given_the_task() -> None:
    t = rollout(ran(LineStatus.OK), ran(LineStatus.OK))
    known = load_line_reward(f"{__name__}:per_row", {"task": 0.25})
    assert compute_line_rewards(t, RewardTable(), [known]) == (0.25, 0.25)
    with pytest.raises(UserCodeError, match="per_row raised KeyError: 'task'"):
        compute_line_rewards(t, RewardTable(), [load_line_reward(f"{__name__}:per_row")])


def test_a_reward_function_that_hangs_is_named() -> None:
    release = threading.Event()

    def hangs(t: Trajectory) -> list[float]:
        release.wait()
        return []

    try:
        with pytest.raises(UserCodeError, match=r"hangs took longer than 0.05 s"):
            WeightedReward(hangs, time_limit_s=0.05)(rollout(ran(LineStatus.OK)))
    finally:
        release.set()


@pytest.mark.parametrize("name", ["nowhere:f", f"{__name__}:nothing", "bare"])
def test_a_reward_function_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_line_reward(name)


def test_functions_add_up_each_times_its_weight() -> None:
    t = rollout(ran(LineStatus.OK), ran(LineStatus.EXCEPTION))
    extras = [load_line_reward(f"{__name__}:by_length", weight=weight) for weight in (2.0, -0.5)]
    assert compute_line_rewards(t, RewardTable(), extras) == pytest.approx((0.03, -0.07))


def test_several_potentials_pay_the_differences_of_their_sum() -> None:
    t = rollout(ran(LineStatus.EXCEPTION), ran(LineStatus.OK))
    parts = [load_line_reward("error_potential", weight=weight) for weight in (0.1, 0.3)]
    whole = load_line_reward("error_potential", weight=0.4)
    assert build_potential(parts, 0.9)(t) == pytest.approx(build_potential([whole], 0.9)(t))
    assert any(build_potential([whole], 0.9)(t))


def fixed(values_L: list[float], discount: float = 1.0) -> Potential:
    return Potential(WeightedReward(lambda t: values_L), discount)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=8), st.floats(0.1, 1))
def test_the_rewards_of_a_potential_sum_to_its_start_alone(phi_L: list[float], discount: float) -> None:
    t = rollout(*(ran(LineStatus.OK) for _ in phi_L))
    rewards = compute_line_rewards(t, RewardTable(), potential=fixed(phi_L, discount))
    total = math.fsum(discount**at * reward for at, reward in enumerate(rewards))
    assert total == pytest.approx(-phi_L[0], abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=6), st.data())
def test_farming_a_potential_between_the_ends_changes_nothing(phi_L: list[float], data: st.DataObject) -> None:
    """A detour over any states pays nothing in sum, and what it pays on the way is taken back."""
    at = data.draw(st.integers(1, len(phi_L) - 1))
    detour = [*phi_L[:at], *data.draw(st.lists(st.floats(-0.5, 0.5), max_size=6)), *phi_L[at:]]
    short, long = (
        compute_line_rewards(rollout(*(ran(LineStatus.OK) for _ in values)), RewardTable(), potential=fixed(values))
        for values in (phi_L, detour)
    )
    assert math.fsum(long) == pytest.approx(math.fsum(short), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_under_returns_a_potential_moves_no_first_line(data: st.DataObject) -> None:
    """All rollouts of a group start from one state, so the advantage of what they did first is untouched."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    phi = [[0.25, *data.draw(st.lists(st.floats(-0.5, 0.5), min_size=n - 1, max_size=n - 1))] for n in sizes]
    rollouts = [rollout(*(ran(LineStatus.OK) for _ in range(n))) for n in sizes]
    outcomes = tuple(data.draw(st.sampled_from([0.0, 1.0])) for _ in sizes)
    shaped, plain = (
        load_estimator("return_to_go")(GroupRewards.from_rows(outcomes, tuple(rewards)))
        for rewards in (
            [compute_line_rewards(t, RewardTable(), potential=fixed(p)) for t, p in zip(rollouts, phi, strict=True)],
            [compute_line_rewards(t, RewardTable()) for t in rollouts],
        )
    )
    assert [row[0] for row in shaped] == pytest.approx([row[0] for row in plain], abs=1e-9)


def test_a_potential_is_not_bounded() -> None:
    t = rollout(*(ran(LineStatus.EXCEPTION) for _ in range(6)))
    table = RewardTable(exception=-0.2, bound=0.5)
    plain, shaped = (
        compute_line_rewards(t, table),
        compute_line_rewards(t, table, potential=fixed([0.0, 2.5, 0, 0, 0, 0])),
    )
    assert [b - a for a, b in zip(plain, shaped, strict=True)] == pytest.approx([2.5, -2.5, 0, 0, 0, 0])


def test_the_shipped_potential_is_low_while_the_last_cell_went_wrong() -> None:
    statuses = ("exception", "incomplete", "incomplete", "ok", "syntax_error", "ok")
    t = rollout(*(ran(LineStatus(status)) for status in statuses))
    assert compute_error_potential(t) == [0.0, -1.0, -1.0, -1.0, 0.0, -1.0]
    rewards = compute_line_rewards(t, NO_SHAPING, potential=Potential(load_line_reward("error_potential", weight=0.1)))
    assert rewards == pytest.approx((-0.1, 0.0, 0.0, 0.1, -0.1, 0.1))


def test_a_potential_of_the_user_is_held_to_its_contract() -> None:
    with pytest.raises(UserCodeError, match="lies gave 2 rewards for 1 lines"):
        compute_line_rewards(rollout(ran(LineStatus.OK)), RewardTable(), potential=Potential(WeightedReward(lies)))
