"""The distance to the policy that training began with: against all of the logits, and nowhere but at sampled tokens."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.plugins.lora import add_adapters
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.trajectory.trajectory import Trajectory
from tests.support.trainer.grpo_runs import TASKS, make, run
from tests.support.trainer.tiny_policies import (
    VOCAB,
    ReplayedSource,
    SampledSource,
    at_step,
    tiny_model,
    tiny_tokenizer,
)

BETA = 0.5
FORBIDDEN = frozenset(range(3, VOCAB, 5))
SMALL = TrainerConfig(steps=1, prompts_per_step=2, group_size=3, warmup_steps=0, estimator="outcome")
Logits = Callable[[Tensor], Tensor]


def moved(model: PreTrainedModel) -> None:
    """Make the policy another one than it was."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.03)


def logprobs_of(logits: Logits, t: Trajectory, forbidden: frozenset[int]) -> Tensor:
    """Log probabilities of a rollout's sampled tokens, through all of the logits."""
    ids = torch.tensor([[*t.prompt.token_ids, *t.completion_ids]])
    free = logits(ids)[0].index_fill(-1, torch.tensor(sorted(forbidden), dtype=torch.long), -torch.inf)
    start = len(t.prompt.token_ids)
    at = [start + i for i, mine in enumerate(t.loss_mask) if mine]
    return free.log_softmax(-1)[[i - 1 for i in at], ids[0, at]]


def brute_loss(
    policy: Logits,
    reference: Logits,
    rollouts: list[Trajectory],
    advantages: Tensor,
    kind: str,
    forbidden: frozenset[int],
) -> tuple[Tensor, float]:
    """DAPO's loss of a step's first update with the KL term, and the mean of that term."""
    tokens = sum(t.sampled_tokens for t in rollouts if t.trainable)
    loss, distance = torch.zeros(()), 0.0
    for t, row in zip(rollouts, advantages, strict=True):
        if not t.trainable:
            continue
        logprobs = logprobs_of(policy, t, forbidden)
        with torch.no_grad():
            apart = logprobs_of(reference, t, forbidden)
        apart = apart - logprobs
        kl = apart.exp() - apart - 1
        ratio = (logprobs - logprobs.detach()).exp()
        if kind == "unbiased":
            kl = kl * ratio
        mine = row[: len(t.completion_ids)][torch.tensor(t.loss_mask)]
        loss = loss + (BETA * kl - ratio * mine).sum() / tokens
        distance += kl.sum().item() / tokens
    return loss, distance


@pytest.mark.parametrize("kind", ["k3", "unbiased"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_are_those_of_the_formula_over_all_logits(kind: str, fast: bool, rank: int, tmp_path: Path) -> None:
    start = tiny_model()
    model = add_adapters(copy.deepcopy(start), rank, seed=0) if rank else copy.deepcopy(start)
    source = SampledSource(copy.deepcopy(start), faulty=frozenset({1}), forbidden_ids=FORBIDDEN)
    trainer = make(model, source, replace(SMALL, kl=f"{kind}(beta={BETA})", fast_logprobs=fast), tmp_path)
    moved(model)
    ours = add_adapters(copy.deepcopy(start), rank, seed=0) if rank else copy.deepcopy(start)
    ours.load_state_dict(model.state_dict())
    theirs = run(trainer)
    loss, distance = brute_loss(
        lambda ids: ours(ids).logits,
        lambda ids: start(ids).logits,
        source.steps[0],
        trainer.train_batch.advantages,
        kind,
        FORBIDDEN,
    )
    torch.autograd.backward(loss)
    clip_grad_norm_(ours.parameters(), 1.0)
    (gradients,) = theirs.steps
    for name, p in ours.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
    assert theirs.logs[0]["kl"] == pytest.approx(distance, rel=1e-4)
    assert distance > 0.01, "the policies differ"


def test_rollouts_without_an_advantage_are_held_to_the_reference_too(tmp_path: Path) -> None:
    norms: list[float] = []
    for kl in ("", "k3(beta=0.5)"):
        model = tiny_model()
        source = SampledSource(copy.deepcopy(model))
        # One group of one rollout that may be trained on: its advantage is 0.
        source.faulty = frozenset({0, 1})
        trainer = make(model, source, replace(SMALL, prompts_per_step=1, kl=kl), tmp_path / str(len(norms)))
        moved(model)
        norms.append(run(trainer).logs[0]["grad_norm"])
        assert not trainer.train_batch.advantages.any()
    assert norms[0] == 0.0 < norms[1]


def test_a_policy_that_has_nothing_to_learn_is_drawn_back_to_where_it_began(tmp_path: Path) -> None:
    model = tiny_model()
    played = SampledSource(copy.deepcopy(model), faulty=frozenset({0, 1})).collect(["task 0"] * 3, 0)
    again = ReplayedSource([[at_step(t, step) for t in played] for step in range(4)])
    config = replace(
        SMALL, steps=4, prompts_per_step=1, kl="k3(beta=1.0)", optimizer="sgd", learning_rate=0.01,
        lr_scheduler="constant", importance_sampling="token_truncate(tolerance=99.0)",
    )  # fmt: skip
    trainer = make(model, again, config, tmp_path, ["task 0"])
    start = copy.deepcopy(trainer.ref_model.state_dict())
    moved(model)
    distances = [log["kl"] for log in run(trainer).logs if "kl" in log]
    assert len(distances) == 4
    assert 0 < distances[-1] < distances[0]
    assert all(torch.equal(weight, start[name]) for name, weight in trainer.ref_model.state_dict().items())


def test_the_record_of_a_step_tells_how_far_the_policy_is(tmp_path: Path) -> None:
    def told(kl: str) -> list[float | None]:
        model = tiny_model()
        seen: list[dict[str, float]] = []
        source = SampledSource(copy.deepcopy(model))
        config = replace(SMALL, steps=2, learning_rate=3e-3, lr_scheduler="constant", kl=kl)
        run_training(
            model,
            tiny_tokenizer(),
            TASKS,
            source,
            config,
            tmp_path / kl,
            TrainingOptions(lambda r, t: seen.append(r.metrics)),
        )
        return [row.get("kl") for row in seen]

    assert told("") == [None] * 2
    first, second = told("k3(beta=0.04)")
    assert first == pytest.approx(0.0, abs=1e-6), "the policy begins as its reference"
    assert second is not None
    assert second > 1e-4
