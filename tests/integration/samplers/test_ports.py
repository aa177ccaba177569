"""Outcomes and rewards arrive as in the systems that five small programs come from, each in at most 15 lines."""

import asyncio
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.credit.advantage_estimators import ESTIMATORS
from repl_rl.credit.rewards import GroupEntry, build_group_entry
from repl_rl.rollout import RolloutSampler
from repl_rl.samplers.retry_with_feedback_sampler import FeedbackSampler, make_reward_to_go
from repl_rl.tasks import Task, set_judges
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.trl_arguments import build_credit_config
from repl_rl.trajectory.trajectory import LineStatus, Observed, Trajectory
from tests.support.samplers import ported_judges, ported_samplers
from tests.support.samplers.marked_text import chat_renderer, rollouts_of, written
from tests.support.scripted_rollouts import TASK, world

PARTS = {
    "A": ("PENALTIES", "AsksBack"),
    "B": ("queried", "structured", "correct", "SQL_JUDGES"),
    "C": ("RETRIES", "CHESTS"),
    "D": ("interaction", "GSM8K"),
    "E": ("by_source", "GRADED_JUDGE"),
}
"""What each port is made of."""


def section(letter: str) -> str:
    """What the port is made of, in both files."""
    texts = [Path(inspect.getfile(module)).read_text() for module in (ported_samplers, ported_judges)]
    pattern = re.compile(rf"^# {letter}\. .*\n((?:.*\n)*?)(?=^# [B-E]\. |\Z)", re.MULTILINE)
    return "".join(found for text in texts for found in pattern.findall(text))


@pytest.mark.parametrize("letter", sorted(PARTS))
def test_each_port_has_at_most_15_lines(letter: str) -> None:
    lines = [line for line in section(letter).splitlines() if line.strip()]
    assert len(lines) <= 15, lines
    assert all(name in section(letter) for name in PARTS[letter])


def played(sampler: RolloutSampler, turns: list[str], task: Task = TASK) -> Trajectory:
    renderer = chat_renderer()
    ids = written(renderer, "".join(f"{turn}<|im_end|>" for turn in turns))
    (t,) = asyncio.run(rollouts_of(sampler, [ids], renderer).collect([task]))
    assert t.failure is None, t.failure
    return t


def earned(t: Trajectory, config: TrainerConfig = TrainerConfig()) -> GroupEntry:  # noqa: B008 (it is frozen)
    return build_group_entry(t, build_credit_config(config))


def test_a_three_penalties_of_three_tenths_arrive_as_three_tenths_each() -> None:
    text = ["<fn>where(</fn>", "<fn>where('x')</fn>", "<fn>nowhere()</fn>", "What city are you in?"]
    text += ["<fn>where('Paris')</fn>", "<answer>42</answer>"]
    renderer = chat_renderer()
    ids = written(renderer, "".join(text))
    (t,) = asyncio.run(rollouts_of(ported_samplers.AsksBack(), [ids], renderer).collect([TASK]))
    statuses = [line.execution.status if line.execution else None for line in t.lines]
    assert statuses[:3] == [LineStatus.SYNTAX_ERROR, LineStatus.EXCEPTION, LineStatus.EXCEPTION]
    assert statuses[4:] == [LineStatus.OK, LineStatus.ANSWERED]
    assert any(isinstance(s, Observed) and "Paris" in s.text for s in t.segments)
    assert t.outcome == 1.0
    for name in ESTIMATORS:
        assert earned(t, TrainerConfig(estimator=name, rewards=ported_samplers.PENALTIES)).rewards.rewards_L == (
            -0.3,
            -0.3,
            -0.3,
            0.0,
            0.0,
            0.0,
        )


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


def test_c_outcomes_are_discounted_by_turns_and_solved_all_the_same() -> None:
    late = played(ported_samplers.RETRIES, ["\\boxed{40}", "\\boxed{41}", "\\boxed{42}"])
    early = played(ported_samplers.RETRIES, ["\\boxed{42}"])
    assert [late.outcome, early.outcome] == pytest.approx([0.81, 1.0])
    assert late.solved
    assert early.solved
    per_turn = FeedbackSampler(max_assistant_turns=3, reassign=make_reward_to_go(0.9))
    paid = earned(played(per_turn, ["\\boxed{40}", "\\boxed{41}", "\\boxed{42}"]))
    assert paid.rewards.rewards_L == pytest.approx((0.81, 0.9, 1.0)), "turn rewards arrive as the function gave them"


@pytest.mark.parametrize(("coins", "solved"), [(0.4, False), (10.0, True), (-3.0, False)])
def test_c_an_environments_reward_is_the_outcome(coins: float, solved: bool) -> None:
    task = Task("chest", "Open?", "solved", fields={"coins": coins})
    (t,) = asyncio.run(world(["yes\n"], ported_samplers.CHESTS).collect([task]))
    assert (t.outcome, t.solved) == (coins, solved)
    assert earned(t).rewards.rewards_L == (coins,)


def test_d_every_turn_has_its_own_reward_and_the_conversation_goes_on() -> None:
    t = played(ported_samplers.GSM8K, ["\\boxed{40}", "no idea", "\\boxed{42}"])
    assert earned(t).rewards.rewards_L == (-0.25, -0.25, 1.0)
    assert t.outcome == 1.0


def test_e_a_judge_reads_the_rows_other_fields_and_the_rollout() -> None:
    fields = {"data_source": "hard", "extra_info": {"split": "train"}}
    (task,) = set_judges(ported_samplers.GRADED_JUDGE, [replace(TASK, fields=fields)])
    t = played(ported_samplers.GRADED, ["\\boxed{42}"], task)
    assert t.outcome == 3.0
    assert t.solved
