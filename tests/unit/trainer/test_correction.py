"""Importance ratios of tokens, lines and sequences, against the words that define them."""

import math

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from repl_rl.trainer.importance_sampling import clip_ratios, compute_raw_ratios, measure_mismatch

settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Line numbers (-1 at observations) and gaps (0 there) of a small batch."""
    width = draw(st.integers(1, 8))
    lines, deltas = [], []
    for _ in range(draw(st.integers(1, 3))):
        numbers: list[int] = []
        line = 0
        while len(numbers) < width:
            numbers += [line] * draw(st.integers(1, 3)) + [-1] * draw(st.integers(0, 2))
            line += 1
        row = numbers[:width]
        lines.append(row)
        deltas.append([draw(st.floats(-2, 2, width=32)) if n >= 0 else 0.0 for n in row])
    return torch.tensor(lines), torch.tensor(deltas)


@given(rollouts(), st.sampled_from(["token", "line", "sequence"]))
def test_a_ratio_is_the_geometric_mean_over_its_unit(batch: tuple[torch.Tensor, torch.Tensor], level: str) -> None:
    lines, delta = batch
    ratios = compute_raw_ratios(delta, lines, level)
    for b, row in enumerate(lines.tolist()):
        for t, line in enumerate(row):
            unit = {"token": [t], "line": [k for k, n in enumerate(row) if n == line],
                    "sequence": [k for k, n in enumerate(row) if n >= 0]}[level]  # fmt: skip
            expected = 1.0 if line < 0 else math.exp(sum(delta[b, k].item() for k in unit) / len(unit))
            assert ratios[b, t].item() == pytest.approx(expected, rel=1e-5)


@given(rollouts(), st.sampled_from(["line", "sequence"]), st.integers(2, 50))
def test_the_ratio_of_a_unit_does_not_grow_with_its_length(
    batch: tuple[torch.Tensor, torch.Tensor], level: str, times: int
) -> None:
    lines, delta = batch
    long = compute_raw_ratios(delta.repeat_interleave(times, 1), lines.repeat_interleave(times, 1), level)
    assert torch.allclose(long[:, ::times], compute_raw_ratios(delta, lines, level), rtol=1e-4)


def test_ratios_above_the_cap_are_cut_to_it_or_masked() -> None:
    ratios = torch.tensor([0.1, 1.0, 2.0, 3.0])
    assert clip_ratios(ratios, "truncate", 2.0).tolist() == pytest.approx([0.1, 1.0, 2.0, 2.0])
    assert clip_ratios(ratios, "mask", 2.0).tolist() == pytest.approx([0.1, 1.0, 2.0, 0.0])


def test_the_gap_counts_sampled_tokens_only_and_tells_those_after_an_observation() -> None:
    lines = torch.tensor([[0, 0, -1, 1, 1], [0, -1, -1, -1, -1]])
    delta = torch.tensor([[0.1, -0.2, 0.0, 0.4, 0.0], [-0.3, 0.0, 0.0, 0.0, 0.0]])
    raw = compute_raw_ratios(delta, lines, "token")
    gap = measure_mismatch(delta, lines, raw, clip_ratios(raw, "truncate", 1.3), lines >= 0, Accelerator(cpu=True))
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
    raw = compute_raw_ratios(delta, lines, "token")
    gap = measure_mismatch(delta, lines, raw, clip_ratios(raw, "truncate", 2.0), lines == 1, Accelerator(cpu=True))
    assert (gap.mean, gap.max, gap.after_observation, gap.elsewhere) == pytest.approx((0.2, 0.4, 0.4, 0.0))
    assert gap.tokens == 2
    assert gap.ratio == pytest.approx(sum(math.exp(d) for d in (3.0, -2.0, 0.4, 0.0)) / 4)
    assert gap.unclipped_share == pytest.approx(3 / 4)


def test_nothing_sampled_is_no_gap() -> None:
    nothing = torch.full((2, 1), -1)
    ones = torch.ones(2, 1)
    gap = measure_mismatch(torch.zeros(2, 1), nothing, ones, ones, nothing >= 0, Accelerator(cpu=True))
    assert (gap.mean, gap.max, gap.unclipped_share, gap.tokens) == (0.0, 0.0, 0.0, 0.0)
