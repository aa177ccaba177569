"""Scoring of sampled positions: against a plain forward pass, row by row and with rows laid end to end."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.trainer.forward_pass import (
    BatchLayout,
    TokenScores,
    bucket_by_length,
    build_row_passes,
    can_pack_rows,
    compute_logprobs,
    install_scoring_forward,
)
from tests.support.trainer.grpo_runs import batch
from tests.support.trainer.tiny_policies import tiny_model

PLAIN = tiny_model()


def brute(model: PreTrainedModel, ids: Tensor, attention: Tensor, sampled: Tensor) -> Tensor:
    """Log probabilities of the sampled tokens, one row after the other, through all of the logits."""
    scores = torch.zeros(sampled.shape)
    start = ids.size(1) - sampled.size(1)
    for b, row in enumerate(ids):
        real = row[attention[b].bool()]
        logprobs = model(real[None]).logits[0].log_softmax(-1)
        first = int(attention[b].argmax())
        for t in sampled[b].nonzero()[:, 0].tolist():
            at = start + t - first
            scores[b, t] = logprobs[at - 1, real[at]]
    return scores


def scored(model: PreTrainedModel, ids: Tensor, attention: Tensor, sampled: Tensor, packed: bool) -> TokenScores:
    layout = BatchLayout.from_batch(ids, attention, sampled)
    return compute_logprobs(model, layout, build_row_passes(layout, torch.arange(len(ids)), 16, packed), packed)


@pytest.mark.parametrize("packed", [False, True])
@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7)), min_size=1, max_size=5), st.integers(0, 99))
def test_scores_and_gradients_are_those_of_a_plain_pass(
    packed: bool, lengths: list[tuple[int, int]], seed: int
) -> None:
    ids, attention, sampled = batch(lengths, seed)
    if not sampled.any():
        return
    model, fast = copy.deepcopy(PLAIN), copy.deepcopy(PLAIN)
    install_scoring_forward(fast)
    expected = brute(model, ids, attention, sampled)
    found = scored(fast, ids, attention, sampled, packed).logprobs
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found[~sampled] == 0).all()
    weights = torch.linspace(-1, 1, sampled.numel()).view(sampled.shape)
    torch.autograd.backward([(expected * weights).sum(), (found * weights).sum()])
    for name, p in model.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name).grad, p.grad, rtol=1e-3, atol=1e-5)


def test_rows_laid_end_to_end_hold_no_padding() -> None:
    model = copy.deepcopy(PLAIN)
    install_scoring_forward(model)
    shapes: list[torch.Size] = []
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids, attention, sampled = batch([(2, 3), (4, 1), (1, 4)], 0)
    sampled[:, :] = attention[:, -4:].bool()
    scored(model, ids, attention, sampled, packed=True)
    assert sum(rows * columns for rows, columns in shapes) == 5 + 5 + 5
    assert all(rows == 1 for rows, _ in shapes)


def test_only_attention_that_knows_rows_by_their_positions_takes_them_end_to_end() -> None:
    model = copy.deepcopy(PLAIN)
    assert not can_pack_rows(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert can_pack_rows(model)


def test_rows_of_like_length_share_a_pass_of_bounded_size() -> None:
    lengths = torch.tensor([3, 9, 4, 8, 40])
    parts = [part.tolist() for part in bucket_by_length(torch.arange(5), lengths, 18)]
    assert parts == [[4], [1, 3], [2, 0]]
