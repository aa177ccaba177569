"""Groups, and what is measured about the credit that they are given."""

from dataclasses import replace
from pathlib import Path

import pytest

from repl_rl.credit.advantage_estimators import LineRewards, RolloutRewards
from repl_rl.credit.credit_metrics import compute_length_metrics
from repl_rl.credit.rewards import GroupEntry
from repl_rl.errors import InvariantError
from repl_rl.trajectory.trajectory import Group, Prompt
from tests.support.trainer.grpo_runs import SMALL, make, run
from tests.support.trainer.tiny_policies import ReplayedSource, prompt_of, tiny_model, trajectory_of


def earned(outcome: float | None, *tokens_L: int) -> GroupEntry:
    lines = tuple(LineRewards(0.0, tokens=count) for count in tokens_L)
    return GroupEntry("task", "prompt", RolloutRewards(outcome, lines))


def test_rollouts_of_one_task_from_different_prompts_are_no_group(tmp_path: Path) -> None:
    batch = [trajectory_of(prompt_of("task 0"), [((9 + i, 2), ())], [-1.0, -1.0], i) for i in range(2)]
    batch[1] = replace(batch[1], prompt=Prompt("task 0", (*batch[1].prompt.token_ids, 5)))
    config = replace(
        SMALL, steps=1, prompts_per_step=1, group_size=2, importance_sampling="token_truncate(tolerance=99.0)"
    )
    trainer = make(tiny_model(), ReplayedSource([batch]), config, tmp_path, ["task 0"])
    with pytest.raises(InvariantError, match=r"rollout 1 of task 'task 0'.*a group shares one prompt"):
        run(trainer)
    assert trainer.state.global_step == 0


def test_prompts_have_equal_keys_when_their_ids_are_equal() -> None:
    assert Prompt("a", (1, 2)).key == Prompt("b", (1, 2)).key
    assert len({Prompt("a", ids).key for ids in [(1, 2), (12,), (2, 1), (1, 2, 2)]}) == 4


def test_length_bias_is_measured_within_groups() -> None:
    # The hard task has longer rollouts and lower outcomes; within each task, longer ones do better.
    easy, hard = (earned(0.5, 2), earned(1.0, 4)), (earned(0.0, 20), earned(0.5, 11, 11))
    metrics = compute_length_metrics([Group(easy), Group(hard)], [((-1.0,), (1.0,)), ((-1.0,), (1.0, 1.0))])
    assert metrics["length_outcome_correlation"] == pytest.approx(1.0)
    assert metrics["length_advantage_correlation"] == pytest.approx(1.0)
    assert metrics["length_drift"] == pytest.approx(1.0), "tokens: each rollout is 1 from its group's mean"
    turned = compute_length_metrics([Group(easy)], [((1.0,), (-1.0,))])
    assert turned["length_drift"] == pytest.approx(-1.0)
    assert turned["length_advantage_correlation"] == pytest.approx(-1.0)


def test_the_advantage_of_a_rollout_is_the_mean_over_its_tokens() -> None:
    group = Group((earned(1.0, 1, 3), earned(1.0, 2)))
    metrics = compute_length_metrics([group], [((1.0, -1.0), (0.5,))])
    # 4 and 2 tokens, means -0.5 and 0.5: distances 1 and -1, and -0.5 and 0.5.
    assert metrics["length_drift"] == pytest.approx(-1.0)
    assert metrics["length_outcome_correlation"] == 0.0, "outcomes do not vary"


def test_rollouts_that_teach_nothing_have_no_length() -> None:
    group = Group((earned(None), earned(None)))
    assert set(compute_length_metrics([group], [((), ())]).values()) == {0.0}
