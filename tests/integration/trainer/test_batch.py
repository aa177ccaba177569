"""Lines meet tokens once, and what is not the policy's is 0 everywhere."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repl_rl.errors import InvariantError
from repl_rl.trainer.logprobs import TokenColumns, broadcast_to_tokens, build_line_numbers, build_token_columns
from repl_rl.trajectory.trajectory import (
    Failure,
    FailureKind,
    Line,
    LineEnd,
    Prompt,
    Sampled,
    Segment,
    Stop,
    Trajectory,
)
from tests.unit.test_trajectory import observed

PAD = 0


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    segments: list[Segment] = []
    for _ in range(draw(st.integers(0, 3))):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        lines = [Line((7,) * n, tuple(-0.1 * (k + 1) for k in range(n)), "x\n", LineEnd.NEWLINE) for n in lengths]
        segments += [Sampled(tuple(lines)), observed((9,) * draw(st.integers(0, 5)))]
    fault = draw(st.booleans())
    return Trajectory(
        id="t",
        task_id="task",
        prompt=Prompt("p", (3, 4)),
        segments=tuple(segments[: draw(st.integers(0, len(segments)))]),
        stop=Stop.FAULT if fault else Stop.FINISHED,
        policy_step=0,
        seed=0,
        wall_s=0.0,
        failure=Failure(FailureKind.SANDBOX_FAULT, "gone") if fault else None,
    )


batches = st.lists(trajectories(), min_size=1, max_size=4)


@given(batches)
def test_the_columns_of_a_rollout_have_one_length_and_mask_what_was_observed(batch: list[Trajectory]) -> None:
    rows = build_token_columns(batch, PAD)
    for t, ids, logprobs, mask in zip(batch, rows.completion_ids, rows.logprobs, rows.mask, strict=True):
        assert len(ids) == len(logprobs) == len(mask) >= 1
        if t.trainable:
            assert tuple(ids) == t.completion_ids
            assert tuple(mask) == t.loss_mask
            assert [p for p, m in zip(logprobs, mask, strict=True) if m] == [p for x in t.lines for p in x.logprobs]
        assert all(p == 0.0 for p, m in zip(logprobs, mask, strict=True) if not m)


@given(batches)
def test_a_rollout_that_may_not_be_trained_on_is_one_masked_token(batch: list[Trajectory]) -> None:
    rows = build_token_columns(batch, PAD)
    for t, ids, mask in zip(batch, rows.completion_ids, rows.mask, strict=True):
        assert t.trainable or (ids, mask) == ([PAD], [0])
    assert not any(build_line_numbers([t], 99).ge(0).any() for t in batch if not t.trainable)


@given(batches, st.integers(0, 3))
def test_each_token_gets_the_value_of_its_own_line_and_the_others_zero(batch: list[Trajectory], spare: int) -> None:
    width = max(len(t.completion_ids) for t in batch) + spare
    values = [[float(10 * b + n + 1) for n in range(len(t.lines))] for b, t in enumerate(batch)]
    wide = broadcast_to_tokens(values, batch, width)
    numbers = build_line_numbers(batch, width)
    assert wide.shape == numbers.shape == (len(batch), width)
    assert wide.dtype == torch.float32
    for b, t in enumerate(batch):
        lines = list(t.lines) if t.trainable else []
        for value, line in zip(values[b], lines, strict=False):
            assert (wide[b] == value).sum() == len(line.token_ids)
        assert ((wide[b] != 0) == (numbers[b] >= 0)).all()
        mask = torch.zeros(width, dtype=torch.bool)
        if t.trainable:
            mask[: len(t.completion_ids)] = torch.tensor(t.loss_mask, dtype=torch.bool)
        assert ((numbers[b] >= 0) == mask).all()


def test_a_wrong_number_of_values_is_refused_with_both_numbers() -> None:
    segments = (Sampled((Line((1,), (-1.0,), "x\n", LineEnd.NEWLINE),)),)
    t = Trajectory("t7", "a", Prompt("p", (3,)), segments, Stop.FINISHED, 0, 0, 0.0)
    with pytest.raises(InvariantError, match="trajectory t7 got 2 values for 1 lines"):
        broadcast_to_tokens([[1.0, 2.0]], [t], 5)
    with pytest.raises(InvariantError, match="1 tokens, the batch is 0 wide"):
        broadcast_to_tokens([[1.0]], [t], 0)


@pytest.mark.parametrize(("columns", "problem"), [
    (([[1]], [[2]], [[-0.5]], []), "columns of a batch have [0, 1] rows; give one row per rollout in each"),
    (([[1]], [[2, 3]], [[-0.5]], [[1, 1]]),
     "row 0 of a batch has 2 ids, 1 log probabilities and a mask of 2; give one of each per token"),
])  # fmt: skip
def test_columns_of_unequal_rows_or_lengths_cannot_be_made(
    columns: tuple[list[list[int]], list[list[int]], list[list[float]], list[list[int]]], problem: str
) -> None:
    with pytest.raises(InvariantError, match=re.escape(problem)):
        TokenColumns(*columns)
