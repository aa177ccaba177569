"""Typed stop reasons, each with a policy: trained on, masked, or penalised, through the one mask."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from repl_rl.credit.advantage_estimators import GroupRewards, load_estimator
from repl_rl.credit.stop_policy import StopName, StopPolicy
from repl_rl.errors import ConfigError
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import NamedReward, Stop, Trajectory
from tests.support.trainer.grpo_runs import SMALL, TASKS, token_gradients
from tests.support.trainer.tiny_policies import (
    SampledSource,
    Skeleton,
    prompt_of,
    tiny_model,
    tiny_tokenizer,
    trajectory_of,
)

SKELETONS: list[Skeleton] = [
    [((60, 5, 2), (7, 8)), ((10, 2), ())],
    [((11, 4, 2), None)],
    [((13, 2), (9,)), ((12, 6, 2), ())],
]
GROUP = [trajectory_of(prompt_of("task 0"), s, [-1.0] * 9, number) for number, s in enumerate(SKELETONS)]


def test_every_stop_has_a_policy_but_the_answer_and_our_own_failure() -> None:
    assert set(get_args(StopName)) == {stop.value for stop in Stop} - {"answered", "fault"}


def test_by_default_every_rollout_is_trained_on_as_it_is() -> None:
    for stop in set(Stop) - {Stop.FAULT, Stop.EOS, Stop.ANSWERED, Stop.LINE_TOO_LONG}:
        t = replace(GROUP[0], stop=stop)
        assert StopPolicy().apply(t) is t


def test_a_masked_rollout_has_nothing_left_that_could_be_learned_from() -> None:
    solved = replace(GROUP[2], stop=Stop.WALL_CLOCK, outcome=1.0)
    learned = StopPolicy(mask=("wall_clock",)).apply(solved)
    assert (learned.segments, learned.outcome, learned.trainable) == ((), None, False)
    assert (learned.id, learned.task_id, learned.prompt) == (solved.id, solved.task_id, solved.prompt)


def test_a_masked_rollout_gets_no_gradient_and_is_in_no_baseline(tmp_path: Path) -> None:
    group = [*GROUP[:2], replace(GROUP[2], stop=Stop.WALL_CLOCK)]
    assert GROUP[0].stop is Stop.MAX_LINES, "a stop that has no policy here"
    config = replace(SMALL, stops=StopPolicy(mask=("wall_clock",)))
    gradient, advantages = token_gradients(group, config, tmp_path)
    assert (gradient[2] == 0).all()
    assert (advantages[2] == 0).all()
    outcomes = tuple(t.outcome for t in group[:2])
    expected = load_estimator("outcome")(
        GroupRewards.from_rows(outcomes, tuple((0.0,) * len(t.lines) for t in group[:2]))
    )
    for t, row, (value, *_) in zip(group[:2], gradient.tolist(), expected, strict=False):
        sampled = [g for g, mine in zip(row, t.loss_mask, strict=False) if mine]
        tokens = sum(t.sampled_tokens for t in group[:2])
        assert sampled == pytest.approx([-value / tokens] * len(sampled), rel=1e-5)


def test_a_penalty_is_taken_off_the_outcome_of_the_rollouts_that_it_names(tmp_path: Path) -> None:
    policy = StopPolicy(penalise=("max_lines",), penalty=0.25)
    lower = [replace(t, outcome=(t.outcome or 0.0) - 0.25) if t.stop is Stop.MAX_LINES else t for t in GROUP]
    assert [policy.apply(t).outcome for t in GROUP] == [t.outcome for t in lower] != [t.outcome for t in GROUP]
    named = next(t.outcomes for t in map(policy.apply, GROUP) if t.outcomes)
    assert named[-1] == NamedReward("max_lines", -0.25), "the penalty has the name of its stop"
    penalised, _ = token_gradients(GROUP, replace(SMALL, stops=policy), tmp_path / "policy")
    by_hand, _ = token_gradients(lower, SMALL, tmp_path / "by hand")
    assert penalised.tolist() == by_hand.tolist()
    ungraded = replace(GROUP[0], outcome=None)
    assert policy.apply(ungraded) is ungraded


def test_a_step_tells_of_the_rollouts_as_they_were_played_and_of_what_was_masked(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model), faulty=frozenset({1}))
    config = TrainerConfig(
        steps=1, prompts_per_step=3, group_size=4, warmup_steps=0,
        stops=StopPolicy(mask=("max_lines",), penalise=("eos",)),
    )  # fmt: skip
    seen: list[tuple[StepRecord, Sequence[Trajectory]]] = []
    run_training(
        model, tiny_tokenizer(), TASKS, source, config, tmp_path, TrainingOptions(lambda r, t: seen.append((r, t)))
    )
    ((record, played),) = seen
    assert list(map(id, played)) == list(map(id, source.steps[0]))
    sound = [t for t in played if t.failure is None]
    masked = [t for t in sound if t.stop is Stop.MAX_LINES]
    assert 0 < len(masked) < len(sound)
    assert record.metrics["stop_masked_rate"] == record.metrics["cut_rate"] == len(masked) / len(sound)
    assert record.metrics["stop_penalised_rate"] == pytest.approx(1 - len(masked) / len(sound))
    assert record.metrics["sampled_tokens"] == sum(t.sampled_tokens for t in sound)
    assert [bool(credit) for credit in record.credit] == [t.trainable and t.stop is Stop.EOS for t in played]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: StopPolicy(mask=("doomed",), penalise=("doomed",)), "stops.mask and stops.penalise is 'doomed'"),
    (lambda: StopPolicy(penalty=0.0), "stops.penalty is 0.0"),
    (lambda: StopPolicy(mask=("answered",)), "stops.mask or stops.penalise is 'answered'; choose among eos"),  # type: ignore[arg-type]
])  # fmt: skip
def test_a_policy_that_contradicts_itself_is_refused(make: Callable[[], StopPolicy], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
