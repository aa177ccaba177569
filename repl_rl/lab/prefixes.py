"""`repl-rl bench update`, its second part: what it saves to score the prompt that a group shares once.

The same update with shared prefixes, without, and as TRL makes it, each in a process of its own; and once more without,
with another number of rows a pass, which says how far gradients are apart by rounding alone.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from repl_rl.lab.update import Case, Gradients, against_trl, apart

PREFIXES = tuple(
    Case(12_288, 0.5, tokens=64, rollouts=rollouts, hidden=512, layers=4, prompt=prompt)
    for prompt in (64, 256, 1024)
    for rollouts in (8, 16)
)


def bench_prefixes(cases: Sequence[Case] = PREFIXES, repeats: int = 2) -> list[dict[str, float | str]]:
    """Measure each case; a row a case, as those of `bench_update` with what is off over what is on: more is better."""
    return [_row(case, repeats) for case in cases]


def _row(case: Case, repeats: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        ours, gradients = apart(case, "ours", repeats, Path(folder))
        off, plain = apart(case, "off", repeats, Path(folder))
        _, other = apart(case, "other", 1, Path(folder))
        theirs, of_trl = apart(case, "trl", repeats, Path(folder))
    row = case.prompt + case.tokens
    return {
        **against_trl(case, ours, gradients, theirs, of_trl),
        "token_ratio": case.rollouts * row / (case.prompt + case.rollouts * case.tokens),
        "off_update_s": off.update_s,
        "off_peak_mib": off.peak_mib,
        "off_time_ratio": off.update_s / ours.update_s,
        "off_memory_ratio": off.peak_mib / ours.peak_mib,
        "gradient_error": _distance(gradients, plain),
        "gradient_noise": _distance(other, plain),
    }


def _distance(one: Gradients, other: Gradients) -> float:
    """Relative to the length of the other."""
    mine, theirs = (torch.cat([of[name].double().flatten() for name in sorted(other)]) for of in (one, other))
    return float((mine - theirs).norm() / theirs.norm())
