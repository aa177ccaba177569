"""A reward function that breaks its contract is named, and no step is taken with what it said."""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repl_rl.credit.rewards import CreditConfig, Potential, WeightedReward
from repl_rl.errors import UserCodeError
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.grpo_runs import SMALL, make, run
from tests.support.trainer.tiny_policies import SampledSource, tiny_model

CONFIG = replace(SMALL, estimator="two_stream", fast_logprobs=True)
release = threading.Event()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    release.clear()
    yield
    release.set()


def raises(t: Trajectory) -> Sequence[float]:
    raise ZeroDivisionError("no lines")


def not_a_number(t: Trajectory) -> Sequence[float]:
    return [math.nan] * len(t.lines)


def too_many(t: Trajectory) -> Sequence[float]:
    return [0.1] * (len(t.lines) + 1)


def hangs(t: Trajectory) -> Sequence[float]:
    release.wait()
    return [0.0] * len(t.lines)


@pytest.mark.parametrize(("function", "message", "as_potential"), [
    (raises, "raises raised ZeroDivisionError: no lines", False),
    (not_a_number, "not_a_number gave nan", False),
    (too_many, "too_many gave . rewards for . lines", False),
    (hangs, r"hangs took longer than 0.1 s", False),
    (raises, "raises raised ZeroDivisionError: no lines", True),
])  # fmt: skip
def test_no_step_is_taken_with_it(
    function: Callable[[Trajectory], Sequence[float]], message: str, as_potential: bool, tmp_path: Path
) -> None:
    model = tiny_model()
    before = copy.deepcopy(model)
    held = WeightedReward(function, time_limit_s=0.1)
    plain = build_credit_config(CONFIG)
    credit: CreditConfig = (
        replace(plain, potential=Potential(held)) if as_potential else replace(plain, extra_rewards=(held,))
    )
    trainer = make(model, SampledSource(copy.deepcopy(model)), CONFIG, tmp_path, credit=credit)
    with pytest.raises(UserCodeError, match=f"test_reward_functions:{message}"):
        run(trainer)
    assert trainer.state.global_step == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
