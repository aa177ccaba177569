"""Mismatch between sampler and trainer, against the words that define it."""

import math

import pytest
import torch
from accelerate import Accelerator

from repl_rl.trainer.importance_sampling import measure_mismatch


def test_the_gap_counts_sampled_tokens_only_and_tells_those_after_an_observation() -> None:
    lines = torch.tensor([[0, 0, -1, 1, 1], [0, -1, -1, -1, -1]])
    delta = torch.tensor([[0.1, -0.2, 0.0, 0.4, 0.0], [-0.3, 0.0, 0.0, 0.0, 0.0]])
    raw = delta.exp()
    gap = measure_mismatch(delta, lines, raw, raw.clamp(max=1.3), lines >= 0, Accelerator(cpu=True))
    assert gap.tokens == 5
    assert gap.mean == pytest.approx(0.2)
    assert gap.max == pytest.approx(0.4)
    assert gap.after_observation == pytest.approx(0.4)
    assert gap.elsewhere == pytest.approx((0.1 + 0.2 + 0.0 + 0.3) / 4)
    assert gap.ratio == pytest.approx(sum(math.exp(d) for d in (0.1, -0.2, 0.4, 0.0, -0.3)) / 5)
    assert gap.unclipped_share == pytest.approx(4 / 5)


def test_older_lines_are_in_the_ratios_and_not_in_the_gap() -> None:
    lines = torch.tensor([[0, 0, -1, 1, 1]])
    delta = torch.tensor([[3.0, -2.0, 0.0, 0.4, 0.0]])
    raw = delta.exp()
    gap = measure_mismatch(delta, lines, raw, raw.clamp(max=2.0), lines == 1, Accelerator(cpu=True))
    assert (gap.mean, gap.max, gap.after_observation, gap.elsewhere) == pytest.approx((0.2, 0.4, 0.4, 0.0))
    assert gap.tokens == 2
    assert gap.ratio == pytest.approx(sum(math.exp(d) for d in (3.0, -2.0, 0.4, 0.0)) / 4)
    assert gap.unclipped_share == pytest.approx(3 / 4)


def test_nothing_sampled_is_no_gap() -> None:
    nothing = torch.full((2, 1), -1)
    ones = torch.ones(2, 1)
    gap = measure_mismatch(torch.zeros(2, 1), nothing, ones, ones, nothing >= 0, Accelerator(cpu=True))
    assert (gap.mean, gap.max, gap.unclipped_share, gap.tokens) == (0.0, 0.0, 0.0, 0.0)
