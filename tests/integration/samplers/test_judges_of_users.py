"""Samplers with judges of the user, which run in processes."""

import asyncio
from dataclasses import replace

import pytest

from repl_rl.errors import UserCodeError
from repl_rl.samplers.retry_with_feedback_sampler import (
    FeedbackSampler,
)
from repl_rl.tasks import Task, set_judges
from tests.support.samplers import ported_samplers
from tests.support.samplers.marked_text import chat_renderer, rollouts_of, written
from tests.support.scripted_rollouts import TASK, world
from tests.unit.samplers.test_hooks import LINES, Kept
from tests.unit.samplers.test_ports import earned, played


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


QUERY = '<tool_call>\n{"name": "run_sql", "arguments": {"query": "SELECT COUNT(*)"}}\n</tool_call>'


def test_b_minus_two_arrives_as_minus_two_under_its_own_name() -> None:
    (task,) = set_judges(ported_samplers.SQL_JUDGES, [Task("sql", "How many?", "7", fields={"gold": "7"})])
    lazy = played(ported_samplers.SQL, ["It is \\boxed{7}."], task)
    worked = played(ported_samplers.SQL, [QUERY, "It is \\boxed{7}."], task)
    named = {part.name.rpartition(":")[2]: part.value for part in lazy.outcomes}
    assert named == {"exact": 1.0, "queried": -2.0, "structured": -0.25, "correct": 1.0}
    assert (lazy.outcome, worked.outcome) == (-0.25, 1.0 + 0.5 + 0.25 + 1.0)
    assert lazy.solved
    assert earned(lazy).rewards.outcome == -0.25


def test_e_a_judge_reads_the_rows_other_fields_and_the_rollout() -> None:
    fields = {"data_source": "hard", "extra_info": {"split": "train"}}
    (task,) = set_judges(ported_samplers.GRADED_JUDGE, [replace(TASK, fields=fields)])
    t = played(ported_samplers.GRADED, ["\\boxed{42}"], task)
    assert t.outcome == 3.0
    assert t.solved
