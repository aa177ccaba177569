"""What was sampled for a call of a host function: a row of the update, credited as the line that called, or none."""

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repl_rl.errors import WeightSyncError
from repl_rl.trainer.grpo import compute_line_credits
from repl_rl.trajectory.trajectory import Alternative, HostCall, Sampled, Trajectory, spread
from tests.support.trainer.grpo_runs import SMALL, TASKS, make, run
from tests.support.trainer.tiny_policies import ReplayedSource, SampledSource, tiny_model

CONFIG = replace(SMALL, steps=1, estimator="two_stream", per_device_batch_size=4)


def calling(parent: Trajectory, child: Trajectory, trained: bool) -> Trajectory:
    """`parent`, whose first line made one more call, for which `child` was sampled."""
    first = parent.segments[0]
    assert isinstance(first, Sampled)
    line = first.lines[0]
    assert line.execution is not None
    call = HostCall("rollout", json.dumps({"args": ["?"], "kwargs": {}}), "null", None, 0.0, child.id, trained)
    run = replace(line.execution, calls=(*line.execution.calls, call))
    head = Sampled((replace(line, execution=run), *first.lines[1:]))
    children = (*parent.children, replace(child, parent=parent.id))
    return replace(parent, segments=(head, *parent.segments[1:]), children=children)


class CallingSource(SampledSource):
    """Its second rollout made a call that is trained, one that is masked, and one whose child made a call in turn."""

    def collect(self, task_ids: Sequence[str], policy_step: int) -> list[Trajectory]:
        rollouts = super().collect(task_ids, policy_step)
        rng = random.Random(7)
        one, two, three, four = (
            replace(self.rollout(f"child {i}", i, policy_step, rng), outcome=None) for i in range(4)
        )
        caller = calling(calling(rollouts[1], one, True), two, False)
        rollouts[1] = calling(caller, calling(three, four, True), True)
        return rollouts


@pytest.mark.parametrize("fast", [True, False])
def test_a_trained_child_is_a_row_with_the_advantage_of_the_line_that_called_and_a_masked_one_is_none(
    fast: bool, tmp_path: Path
) -> None:
    model = tiny_model()
    source = CallingSource(copy.deepcopy(model))
    trainer = make(model, source, replace(CONFIG, fast_logprobs=fast, per_device_batch_size=6), tmp_path)
    run(trainer)
    played, rows = source.steps[0], trainer.train_batch.rows
    asked = played[1].lines[0].execution
    assert asked is not None
    one, two, three = played[1].children
    (four,) = three.children
    assert [row.id for row in rows[:15]] == [*(t.id for t in played), one.id, three.id, four.id]
    assert two.id not in {row.id for row in rows}
    assert (len(rows), trainer.args.steps_per_generation) == (16, 2)  # 15, filled up to whole parts
    assert not any(row.trainable for row in rows[15:])
    _, advantages_L = trainer.train_batch.credit[1]
    assert advantages_L[0] != 0
    for number, child in ((12, one), (13, three), (14, four)):
        expected = spread((advantages_L[0],) * len(child.lines), child)
        got = trainer.train_batch.advantages[number]
        assert got[: len(expected)].tolist() == pytest.approx(list(expected))
        assert not got[len(expected) :].any()
        assert [bool(x) for x in got[: len(expected)]] == list(child.loss_mask)
        sampled = [p for line in child.lines for p in line.logprobs]
        scored = trainer.scored_batch.logprobs[number, : len(child.completion_ids)][torch.tensor(child.loss_mask)]
        assert scored.tolist() == pytest.approx(sampled, abs=1e-3)
    credit_L = compute_line_credits(trainer.train_batch, trainer.scored_batch)
    assert [len(credit) for credit in credit_L] == [len(t.lines) for t in played]


def test_the_fast_path_and_trls_own_pass_give_children_the_same_gradients(tmp_path: Path) -> None:
    start = tiny_model()
    source = CallingSource(copy.deepcopy(start))
    slow = run(make(copy.deepcopy(start), source, CONFIG, tmp_path / "slow"))
    config = replace(CONFIG, fast_logprobs=True)
    fast = run(make(copy.deepcopy(start), ReplayedSource(source.steps), config, tmp_path / "fast"))
    without = [[replace(t, children=()) for t in source.steps[0]]]
    alone = run(make(copy.deepcopy(start), ReplayedSource(without), config, tmp_path / "alone"))
    for name, gradient in slow.steps[0].items():
        torch.testing.assert_close(fast.steps[0][name], gradient, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(alone.steps[0][name], gradient) for name, gradient in fast.steps[0].items())


def test_an_alternative_with_an_advantage_is_a_row_from_the_same_ids_and_one_without_is_none(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    task_ids = [task for task in TASKS[:3] for _ in range(4)]
    rollouts = source.collect(task_ids, 0)
    first, others = rollouts[0].segments[0], [t.lines[0] for t in rollouts[1:3]]
    assert isinstance(first, Sampled)
    alternatives = tuple(
        Alternative(line.token_ids, line.logprobs, line.text, line.end, advantage, line.policy_step)
        for line, advantage in zip(others, (0.75, None), strict=True)
    )
    head = Sampled((replace(first.lines[0], alternatives=alternatives), *first.lines[1:]))
    rollouts[0] = replace(rollouts[0], segments=(head, *rollouts[0].segments[1:]))
    trainer = make(model, ReplayedSource([rollouts]), CONFIG, tmp_path)
    trainer._prepare_inputs([{"prompt": task} for task in task_ids])
    rows = trainer.train_batch.rows
    assert [row.id for row in rows if row.trainable] == [*(t.id for t in rollouts), f"{rollouts[0].id}~0.0"]
    taught = trainer.train_batch.advantages[12]
    length = len(others[0].token_ids)
    assert taught[:length].tolist() == [0.75] * length
    assert not taught[length:].any()


def test_a_child_is_held_to_its_sampler_as_its_rollout_is(tmp_path: Path) -> None:
    model = tiny_model()
    source = CallingSource(copy.deepcopy(model))
    task_ids = [task for task in TASKS[:3] for _ in range(4)]
    rollouts = source.collect(task_ids, 0)
    wrong = SampledSource(tiny_model(seed=5)).rollout("child", 9, 0, random.Random(1))
    rollouts[0] = calling(rollouts[0], replace(wrong, outcome=None), True)
    trainer = make(model, ReplayedSource([rollouts]), CONFIG, tmp_path)
    with pytest.raises(WeightSyncError, match="nats from the"):
        trainer._prepare_inputs([{"prompt": task} for task in task_ids])
