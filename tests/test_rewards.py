"""Line rewards: the table, the named extras, and the bound that nothing escapes."""

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import ConfigError, UserCodeError
from repl_rl.rewards import NO_SHAPING, RewardTable, held_to_contract, line_reward, line_rewards, line_states
from repl_rl.trajectory import (
    Execution,
    Failure,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Prompt,
    Sampled,
    Stop,
    Trajectory,
)

RAN = [status for status in LineStatus if status is not LineStatus.ANSWERED]


def ran(status: LineStatus | None, *rewards: float) -> Line:
    execution = None if status is None else Execution(status, 0.0, "3" if status is LineStatus.ANSWERED else None)
    return Line((5,), (-1.0,), "x\n", LineEnd.NEWLINE, execution, tuple(NamedReward("extra", r) for r in rewards))


def rollout(*lines: Line, fault: bool = False) -> Trajectory:
    failure = Failure("SandboxFault", "gone") if fault else None
    segments = (Sampled(lines),) if lines else ()
    stop = Stop.FAULT if fault else Stop.FINISHED
    return Trajectory("t", "task", Prompt("p", (1,)), segments, stop, 0, 0, 0.0, failure=failure)


def test_each_line_earns_what_the_table_says_of_its_own_status() -> None:
    table = RewardTable(syntax_error=-0.1, exception=-0.2, timeout=-0.3, ok=0.05, bound=10)
    statuses = (LineStatus.OK, LineStatus.SYNTAX_ERROR, LineStatus.EXCEPTION, LineStatus.TIMEOUT, LineStatus.ANSWERED)
    assert line_rewards(rollout(*map(ran, statuses)), table) == (0.05, -0.1, -0.2, -0.3, 0.0)


def test_every_status_has_an_entry_except_our_own_faults() -> None:
    entries = set(RewardTable.__slots__) - {"bound", "gated"}
    assert entries == {status.value for status in LineStatus} - {"sandbox_fault"}


def test_by_default_an_error_costs_a_tenth_and_nothing_else_counts() -> None:
    for status in LineStatus:
        assert RewardTable().of(status) == (-0.1 if status.is_error else 0.0)
        assert NO_SHAPING.of(status) == 0.0


def test_a_sandbox_fault_is_never_rewarded() -> None:
    assert line_rewards(rollout(ran(LineStatus.OK, 0.4), ran(LineStatus.SANDBOX_FAULT)), RewardTable(ok=0.1))[1] == 0.0
    assert line_rewards(rollout(ran(LineStatus.EXCEPTION, 0.4), fault=True), RewardTable()) == (0.0,)


def test_rewards_of_the_sampler_add_to_the_table_on_their_own_line() -> None:
    lines = (ran(LineStatus.EXCEPTION, 0.3, -0.05), ran(None, 0.1))
    assert line_rewards(rollout(*lines), RewardTable()) == pytest.approx((0.15, 0.1))


@given(st.lists(st.tuples(st.sampled_from(RAN), st.lists(st.floats(-1e6, 1e6), max_size=2)), max_size=6))
def test_a_rollout_cannot_earn_or_lose_more_than_the_bound(lines: list[tuple[LineStatus, list[float]]]) -> None:
    t = rollout(*(ran(status, *extra) for status, extra in lines))
    bounded = line_rewards(t, RewardTable(bound=0.5))
    free = line_rewards(t, RewardTable(bound=1e12))
    assert len(bounded) == len(t.lines)
    assert math.fsum(map(abs, bounded)) <= 0.5 * (1 + 1e-12)
    total = math.fsum(map(abs, free))
    scale = min(1.0, 0.5 / total) if total else 1.0
    assert bounded == pytest.approx([reward * scale for reward in free], rel=1e-9, abs=1e-300)


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


def written(text: str, status: LineStatus) -> Line:
    return Line((5,), (-1.0,), text, LineEnd.NEWLINE, Execution(status, 0.0))


def test_lines_start_from_equal_states_when_equal_cells_ran_before() -> None:
    a = rollout(written("x = 1\n", LineStatus.OK), written("x\n", LineStatus.OK), written("x\n", LineStatus.OK))
    b = rollout(
        written("x=1  # one\n", LineStatus.OK), written("x +\n", LineStatus.SYNTAX_ERROR), written("y\n", LineStatus.OK)
    )
    assert line_states(a)[0] == line_states(b)[0]
    assert line_states(a)[1] == line_states(b)[1] == line_states(b)[2]
    assert line_states(a)[2] != line_states(a)[1]


def test_a_line_inside_a_cell_starts_from_the_open_cell() -> None:
    lines = [
        written("if 1:\n", LineStatus.INCOMPLETE),
        written(" y = 2\n", LineStatus.INCOMPLETE),
        written("\n", LineStatus.OK),
    ]
    same = line_states(rollout(*lines, written("y\n", LineStatus.OK)))
    flat = line_states(rollout(written("if 1:   y = 2\n", LineStatus.OK), written("y\n", LineStatus.OK)))
    assert same[3] == flat[1]
    assert len(set(same)) == 4


@given(st.lists(st.tuples(st.text(max_size=8), st.sampled_from(RAN)), max_size=4))
def test_any_text_has_a_state(cells: list[tuple[str, LineStatus]]) -> None:
    t = rollout(*(written(text + "\n", status) for text, status in cells))
    assert len(line_states(t)) == len(t.lines)


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
    assert line_rewards(t, RewardTable(), line_reward(f"{__name__}:by_length")) == pytest.approx((0.02, -0.08))


@pytest.mark.parametrize(("name", "message"), [
    ("raises", "raises raised ZeroDivisionError: no lines"),
    ("lies", "lies gave 3 rewards for 2 lines"),
    ("not_a_number", "not_a_number gave nan"),
    ("not_numbers", "not_numbers raised ValueError"),
])  # fmt: skip
def test_a_reward_function_that_breaks_its_contract_is_named(name: str, message: str) -> None:
    t = rollout(ran(LineStatus.OK), ran(LineStatus.OK))
    with pytest.raises(UserCodeError, match=message):
        line_rewards(t, RewardTable(), line_reward(f"{__name__}:{name}"))


def test_a_reward_function_that_hangs_is_named() -> None:
    release = threading.Event()

    def hangs(t: Trajectory) -> list[float]:
        release.wait()
        return []

    try:
        with pytest.raises(UserCodeError, match=r"hangs took longer than 0.05 s"):
            held_to_contract(hangs, rollout(ran(LineStatus.OK)), time_limit_s=0.05)
    finally:
        release.set()


@pytest.mark.parametrize("name", ["nowhere:f", f"{__name__}:nothing", "bare"])
def test_a_reward_function_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        line_reward(name)


def test_gated_rewards_pay_nobody_who_did_not_solve() -> None:
    table = RewardTable(ok=0.1, gated=True)
    lines = (ran(LineStatus.OK), ran(LineStatus.EXCEPTION))
    assert line_rewards(replace(rollout(*lines), outcome=1.0), table) == (0.1, -0.1)
    assert line_rewards(replace(rollout(*lines), outcome=0.0), table) == (0.0, -0.1)
    assert line_rewards(rollout(*lines), table) == (0.0, -0.1)
