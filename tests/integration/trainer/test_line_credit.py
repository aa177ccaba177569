"""What the store is told of a step: rewards and advantages of lines, the trainer's log probabilities of tokens."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

from repl_rl.credit.credited_trajectory import CreditedTrajectory, LineCredit
from repl_rl.credit.rewards import RewardTable, build_line_credit, compute_line_rewards
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Failure, FailureKind, Observed, Sampled, Stop, Trajectory
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer
from tests.unit.test_trajectory import line, trajectory

TASKS = [f"task {i}" for i in range(6)]
SMALL = TrainerConfig(steps=1, prompts_per_step=2, group_size=3, warmup_steps=0)


def test_log_probabilities_are_those_of_the_lines_own_tokens() -> None:
    t = trajectory(Sampled((line(2), line(1))), Observed("o", (5, 6)), Sampled((line(1),)))
    found = build_line_credit(t, [0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [-1.0, -2.0, -3.0, 9.0, 9.0, -4.0])
    assert found == (
        LineCredit(0.1, 1.0, (-1.0, -2.0)),
        LineCredit(0.2, 2.0, (-3.0,)),
        LineCredit(0.3, 3.0, (-4.0,)),
    )


def test_a_failure_of_ours_has_no_credit() -> None:
    failed = Trajectory(
        "t", "task", trajectory().prompt, (), Stop.FAULT, 0, 0, 0.0, None, Failure(FailureKind.SANDBOX_FAULT, "")
    )
    assert build_line_credit(failed, [], [], []) == ()


def test_a_step_reports_the_credit_of_each_of_its_trajectories(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), faulty=frozenset({1}))
    seen: list[tuple[StepRecord, Sequence[Trajectory]]] = []
    run_training(
        model, tiny_tokenizer(), TASKS, source, SMALL, tmp_path, TrainingOptions(lambda r, t: seen.append((r, t)))
    )
    ((record, batch),) = seen
    entries = [CreditedTrajectory(t, credit) for t, credit in zip(batch, record.credit, strict=True)]
    assert [bool(entry.credit_L) for entry in entries] == [t.trainable for t in batch]
    assert sum(not t.trainable for t in batch) == 1
    for entry in (entry for entry in entries if entry.credit_L):
        assert [c.reward for c in entry.credit_L] == list(compute_line_rewards(entry.trajectory, RewardTable()))
        for mine, credit in zip(entry.trajectory.lines, entry.credit_L, strict=True):
            assert credit.logprobs == pytest.approx(mine.logprobs, abs=record.metrics["logprob_gap_max"] + 1e-6)
