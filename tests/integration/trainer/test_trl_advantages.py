"""The estimator `outcome` is TRL's, bit for bit."""

import math
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from repl_rl.credit.advantage_estimators import GroupRewards, load_estimator


def trl_advantages(rewards_N: torch.Tensor, size: int) -> torch.Tensor:
    """Advantages of a batch as TRL 1.16 computes them from its rewards, with its own `nanstd`."""
    grouped = rewards_N.view(-1, size)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(size, dim=0)
    std = nanstd(grouped, dim=1).repeat_interleave(size, dim=0)
    return torch.nan_to_num((rewards_N - mean) / (std + 1e-4), nan=0.0)


@settings(max_examples=60)
@given(st.integers(2, 16), st.integers(1, 5), st.integers())
def test_outcome_equals_trl_bit_for_bit_in_batches_of_any_shape(size: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.choice([0.0, 1.0, rng.uniform(-3, 3), math.nan]) for _ in range(size * count)]
    theirs = trl_advantages(torch.tensor(values, dtype=torch.float32), size).tolist()
    ours = []
    for start in range(0, len(values), size):
        outcomes = tuple(None if math.isnan(v) else v for v in values[start : start + size])
        ours += [row[0] for row in load_estimator("outcome")(GroupRewards.from_rows(outcomes, ((0.5,),) * size))]
    assert ours == theirs
