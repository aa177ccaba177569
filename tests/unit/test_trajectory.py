"""The invariants I1 to I10 of the record: what must not be writable, is not."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import InvariantError
from repl_rl.trajectory.trajectory import (
    Execution,
    Failure,
    FailureKind,
    Group,
    Line,
    LineEnd,
    LineStatus,
    NamedReward,
    Observed,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
    spread,
)


def line(n: int = 2, end: LineEnd = LineEnd.NEWLINE) -> Line:
    return Line(tuple(range(1, n + 1)), (-0.5,) * n, "x\n", end)


def observed(token_ids: tuple[int, ...]) -> Observed:
    return Observed("o" if token_ids else "", token_ids)


def trajectory(*segments: Segment, stop: Stop = Stop.FINISHED) -> Trajectory:
    return Trajectory("t", "task", Prompt("p", (9,)), segments, stop, 0, 0, 0.0)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    segments: list[Segment] = []
    for _ in range(draw(st.integers(0, 5))):
        lines = draw(st.lists(st.integers(1, 4).map(line), min_size=1, max_size=3))
        segments.append(Sampled(tuple(lines)))
        segments.append(observed(tuple(draw(st.lists(st.integers(10, 20), max_size=4)))))
    return trajectory(*segments[: draw(st.integers(0, len(segments)))])


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf, 0.1])
def test_i1_a_log_probability_is_finite_and_not_positive(logprob: float) -> None:
    with pytest.raises(InvariantError, match="finite and <= 0"):
        Line((1,), (logprob,), "x\n", LineEnd.NEWLINE)


@pytest.mark.parametrize("logprobs", [(), (-1.0,), (-1.0, -1.0, -1.0)])
def test_i1_every_sampled_token_has_exactly_one_log_probability(logprobs: tuple[float, ...]) -> None:
    with pytest.raises(InvariantError, match="exactly one log probability per sampled token"):
        Line((1, 2), logprobs, "x\n", LineEnd.NEWLINE)


def test_i2_an_observation_has_no_field_for_log_probabilities_or_advantages() -> None:
    assert {field.name for field in fields(Observed)} == {"text", "token_ids", "cut"}


@given(trajectories())
def test_i3_lines_partition_the_sampled_tokens(t: Trajectory) -> None:
    sampled = [token for token, mine in zip(t.completion_ids, t.loss_mask, strict=True) if mine]
    assert [token for one in t.lines for token in one.token_ids] == sampled
    assert all(one.token_ids for one in t.lines)


def test_i3_a_line_has_at_least_one_token() -> None:
    with pytest.raises(InvariantError, match="at least one sampled token"):
        Line((), (), "\n", LineEnd.NEWLINE)


def test_i3_a_sampled_segment_has_at_least_one_line() -> None:
    with pytest.raises(InvariantError, match="at least one line"):
        Sampled(())


@pytest.mark.parametrize(
    "segments",
    [
        (Sampled((line(),)), Sampled((line(),))),
        (Sampled((line(),)), Observed("", ()), Observed("", ())),
    ],
)
def test_i4_segments_alternate(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(InvariantError, match="alternate"):
        trajectory(*segments)


def test_i4_no_observation_before_the_first_line() -> None:
    with pytest.raises(InvariantError, match="belongs to the prompt"):
        trajectory(Observed("banner", (1,)))


def test_i4_only_a_closed_line_is_followed_by_an_observation() -> None:
    with pytest.raises(InvariantError, match="closed line"):
        trajectory(Sampled((line(end=LineEnd.LENGTH),)), Observed("", ()))


def test_i4_a_line_that_was_cut_is_the_last_of_its_segment() -> None:
    with pytest.raises(InvariantError, match="can only be the last one"):
        Sampled((line(end=LineEnd.LENGTH), line()))


def test_i6_an_eos_stop_requires_that_the_last_line_ends_in_it() -> None:
    with pytest.raises(InvariantError, match="end token belongs to the last line"):
        trajectory(Sampled((line(),)), stop=Stop.EOS)
    assert trajectory(Sampled((line(end=LineEnd.EOS),)), stop=Stop.EOS).loss_mask == (True, True)


@given(trajectories())
def test_i7_the_loss_mask_says_where_the_segment_is_sampled(t: Trajectory) -> None:
    expected: list[bool] = []
    for segment in t.segments:
        expected += [isinstance(segment, Sampled)] * len(segment.token_ids)
    assert t.loss_mask == tuple(expected)
    assert t.sampled_tokens == sum(t.loss_mask)
    assert t.sampled_tokens + t.observed_tokens == len(t.completion_ids)


def test_i7_the_loss_mask_cannot_be_set() -> None:
    with pytest.raises((FrozenInstanceError, AttributeError)):
        trajectory(Sampled((line(),))).loss_mask = (False, False)
    assert "loss_mask" not in {field.name for field in fields(Trajectory)}


@given(trajectories(), st.data())
def test_i8_spread_gives_each_token_its_line_value_and_observations_none(t: Trajectory, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(-5, 5), min_size=len(t.lines), max_size=len(t.lines)))
    widened = spread(values, t, observed=7.0)
    assert len(widened) == len(t.completion_ids)
    mine = iter(widened[i] for i, sampled in enumerate(t.loss_mask) if sampled)
    for value, one in zip(values, t.lines, strict=True):
        assert [next(mine) for _ in one.token_ids] == [value] * len(one.token_ids)
    assert all(widened[i] == 7.0 for i, sampled in enumerate(t.loss_mask) if not sampled)


@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 2.0, 3.0)])
def test_i8_spread_names_both_lengths_when_they_differ(values: tuple[float, ...]) -> None:
    t = trajectory(Sampled((line(), line())))
    with pytest.raises(InvariantError, match=f"{len(values)} values for 2 lines"):
        spread(values, t)


def test_i9_a_group_has_at_least_two_rollouts() -> None:
    with pytest.raises(InvariantError, match="at least 2 rollouts"):
        Group((trajectory(),))


def test_i9_a_group_shares_one_task_and_one_prompt() -> None:
    one = trajectory()
    with pytest.raises(InvariantError, match="shares one task"):
        Group((one, replace(one, task_id="other")))
    with pytest.raises(InvariantError, match="shares one prompt"):
        Group((one, replace(one, prompt=Prompt("p", (8,)))))
    assert Group((one, replace(one, id="u"))).members[1].id == "u"


def test_a_failure_goes_with_a_fault_and_is_never_rewarded() -> None:
    one = trajectory()
    with pytest.raises(InvariantError, match="stop='fault'"):
        replace(one, failure=Failure(FailureKind.SANDBOX_FAULT, "lost"))
    with pytest.raises(InvariantError, match="stop='fault'"):
        replace(one, stop=Stop.FAULT)
    failed = replace(one, stop=Stop.FAULT, failure=Failure(FailureKind.SANDBOX_FAULT, "lost"))
    assert not failed.trainable
    with pytest.raises(InvariantError, match="never rewarded"):
        replace(failed, outcome=1.0)


def test_an_answer_and_the_status_answered_go_together() -> None:
    with pytest.raises(InvariantError, match="must agree"):
        Execution(LineStatus.OK, 0.0, "3")
    with pytest.raises(InvariantError, match="must agree"):
        Execution(LineStatus.ANSWERED, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_is_finite(value: float) -> None:
    with pytest.raises(InvariantError, match="finite"):
        NamedReward("mine", value)
    with pytest.raises(InvariantError, match="finite"):
        replace(trajectory(), outcome=value)


def test_our_fault_is_not_the_policys_error() -> None:
    assert not LineStatus.SANDBOX_FAULT.is_error
    assert {status for status in LineStatus if status.is_error} == {
        LineStatus.SYNTAX_ERROR,
        LineStatus.EXCEPTION,
        LineStatus.TIMEOUT,
        LineStatus.MEMORY_LIMIT,
        LineStatus.OUTPUT_LIMIT,
        LineStatus.KILLED,
    }
