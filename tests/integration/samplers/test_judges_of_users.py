"""Samplers with judges of the user, which run in processes."""

import asyncio
from dataclasses import replace

import pytest

from repl_rl.errors import UserCodeError
from repl_rl.samplers.retry_with_feedback_sampler import (
    FeedbackSampler,
)
from tests.support.samplers.marked_text import chat_renderer, rollouts_of, written
from tests.support.scripted_rollouts import TASK, world
from tests.unit.samplers.test_hooks import LINES, Kept


def test_a_discount_leaves_what_other_judges_give_as_it_is() -> None:
    task = replace(TASK, judge="0.5*exact + tests.support.user_judges:length")
    renderer = chat_renderer()
    ids = written(renderer, "\\boxed{40}<|im_end|>\\boxed{42}<|im_end|>")
    (t,) = asyncio.run(rollouts_of(FeedbackSampler(discount=0.5), [ids], renderer).collect([task]))
    assert [(part.name, part.value) for part in t.outcomes] == [
        ("exact", 0.5), ("tests.support.user_judges:length", 2.0), ("discount", -0.25),
    ]  # fmt: skip
    assert t.solved


def test_a_judge_that_fails_is_what_the_rollout_ends_with() -> None:
    sampler = Kept()
    with pytest.raises(UserCodeError):
        asyncio.run(world(LINES, sampler).collect([replace(TASK, judge="tests.unit.samplers.test_hooks:no_judge")]))
    sampler.once_each()
    assert [type(result) for _, result in sampler.ended] == [UserCodeError]
