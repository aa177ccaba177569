"""Several optimizer steps from one batch of rollouts: what is fixed, what is new, and what is counted."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.grpo import Scoring
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trainer.trl_arguments import grpo_args
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.grpo_runs import SMALL, TASKS, make, run, trl_alone
from tests.support.trainer.tiny_policies import ReplayedSource, SampledSource, tiny_model, tiny_tokenizer

MANY = replace(SMALL, steps=2, num_iterations=2, num_mini_batches=2, learning_rate=3e-3)
"""Four optimizer steps of each batch."""


@pytest.mark.parametrize("loss", ["dapo(clip_high=0.05)", "grpo", "cispo", "sapo"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_losses_gradients_and_weights_equal_trl_bit_for_bit(loss: str, micro_batch: int, tmp_path: Path) -> None:
    config = replace(MANY, loss=loss, per_device_batch_size=micro_batch)
    start = tiny_model()
    source = SampledSource(copy.deepcopy(start), faulty=frozenset({5}))
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    mine = run(make(ours, source, config, tmp_path / "ours"))
    trl = run(trl_alone(theirs, source.steps, config, tmp_path / "trl", corrected=True))
    assert len(mine.steps) == len(trl.steps) == 8
    for a, b in zip(mine.steps, trl.steps, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("kl", ["", "unbiased(beta=0.2)"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_the_fast_path_has_the_same_gradients_in_every_update(micro_batch: int, kl: str, tmp_path: Path) -> None:
    # Plain descent: Adam would blow rounding up where a gradient is nearly 0.
    config = replace(
        MANY, per_device_batch_size=micro_batch, estimator="two_stream", kl=kl,
        loss="dapo(clip_low=0.02, clip_high=0.02)", optimizer="sgd", learning_rate=0.1,
    )  # fmt: skip
    start = tiny_model()
    source = SampledSource(copy.deepcopy(start), faulty=frozenset({0, 1, 2, 3, 6}))
    slow = run(make(copy.deepcopy(start), source, config, tmp_path / "slow"))
    again = ReplayedSource(source.steps, config.optimizer_steps_per_step)
    fast = run(make(copy.deepcopy(start), again, replace(config, fast_logprobs=True), tmp_path / "fast"))
    assert len(fast.steps) == len(slow.steps) == 8
    assert slow.logs[0]["clip_ratio/region_mean"] > 0.01
    for a, b in zip(fast.steps, slow.steps, strict=True):
        for name in b:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fast", [True, False])
def test_clip_values_act_from_the_second_update_on(fast: bool, tmp_path: Path) -> None:
    def weights(updates: int, clip: float) -> Tensor:
        model = tiny_model()
        config = replace(
            SMALL,
            steps=1,
            num_iterations=updates,
            fast_logprobs=fast,
            learning_rate=3e-3,
            loss=f"dapo(clip_low={clip}, clip_high={clip})",
        )
        out = tmp_path / f"{updates} {clip}"
        run(make(model, SampledSource(copy.deepcopy(model)), config, out))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1, 0.001), weights(1, 99.0)), "the ratio is 1 in the first update"
    assert not torch.allclose(weights(2, 0.001), weights(2, 99.0), atol=1e-5)


def test_a_step_is_a_batch_and_the_policy_step_counts_optimizer_steps(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    seen: list[StepRecord] = []
    config = replace(MANY, steps=3, save_steps=2, fast_logprobs=True)

    def on_step(record: StepRecord, trajectories: Sequence[Trajectory]) -> None:
        seen.append(record)
        assert list(map(id, trajectories)) == list(map(id, source.steps[record.step - 1]))

    run_training(model, tiny_tokenizer(), TASKS, source, config, tmp_path, TrainingOptions(on_step))
    assert [record.step for record in seen] == [1, 2, 3]
    assert [record.metrics["optimizer_steps"] for record in seen] == [4, 8, 12]
    assert source.loads == [0, 4, 8]
    assert [{t.policy_step for t in batch} for batch in source.steps] == [{0}, {4}, {8}]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-8"]
    assert max(record.metrics["logprob_gap_max"] for record in seen) < 1e-4, "the sampler is asked before the updates"


def test_what_is_told_in_steps_is_told_to_trl_in_optimizer_steps(tmp_path: Path) -> None:
    args = grpo_args(replace(MANY, steps=10, warmup_steps=3, save_steps=5, per_device_batch_size=3), tmp_path)
    assert (args.max_steps, args.warmup_steps, args.save_steps, args.logging_steps) == (40, 12, 20, 4)
    assert (args.num_iterations, args.steps_per_generation, args.gradient_accumulation_steps) == (2, 4, 2)


ONE = TrainerConfig(steps=1, prompts_per_step=3, group_size=4, warmup_steps=0)


@pytest.mark.parametrize(("config", "kept"), [
    (ONE, True), (replace(ONE, kl="k3"), True), (replace(ONE, per_device_batch_size=4), False),
    (replace(ONE, num_iterations=2), False),
    (replace(ONE, num_mini_batches=2), False), (replace(ONE, gradient_checkpointing=True), False),
])  # fmt: skip
def test_the_scoring_of_a_step_keeps_its_graph_only_where_it_serves_the_only_update(
    config: TrainerConfig, kept: bool, tmp_path: Path
) -> None:
    model = tiny_model()
    trainer = make(model, SampledSource(copy.deepcopy(model)), config, tmp_path)
    with_graph: list[bool] = []

    def note(module: torch.nn.Module, args: object, output: BaseModelOutput) -> None:
        if trainer._scoring is not Scoring.LOSS:
            with_graph.append(output.last_hidden_state.requires_grad)

    model.base_model.register_forward_hook(note)
    run(trainer)
    assert any(with_graph) == kept
