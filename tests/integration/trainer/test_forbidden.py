"""What is forbidden has probability 0 in training: one renormalised policy, in whose gradient it has no part."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from repl_rl.errors import ConfigError, WeightSyncError
from repl_rl.models.transform_logits import forbid_ids
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.forward_pass import BatchLayout, build_row_passes, compute_logprobs, install_scoring_forward
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from tests.support.trainer.grpo_runs import Gradients, batch, make
from tests.support.trainer.tiny_policies import VOCAB, SampledSource, tiny_model, tiny_tokenizer

TASKS = [f"task {i}" for i in range(8)]
FORBIDDEN = frozenset(range(3, VOCAB, 4))
SMALL = TrainerConfig(steps=2, prompts_per_step=2, group_size=4, warmup_steps=0, learning_rate=1e-2)
ids_st = st.frozensets(st.integers(3, VOCAB - 1), max_size=VOCAB - 5)


def forbidding(model: PreTrainedModel, ids: frozenset[int]) -> PreTrainedModel:
    made = copy.deepcopy(model)
    forbid_ids(made, ids)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=20, deadline=None)
@given(ids=ids_st, seed=st.integers(0, 99))
def test_logits_give_the_renormalised_distribution_and_forbidden_ones_no_gradient(
    dtype: torch.dtype, ids: frozenset[int], seed: int
) -> None:
    plain = tiny_model(seed % 3).to(dtype)
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(seed))
    never = sorted(ids)
    expected = plain(tokens).logits.float()
    expected[..., never] = -torch.inf
    logits = forbidding(plain, ids)(tokens).logits
    logits.retain_grad()
    logprobs = logits.float().log_softmax(-1)
    probabilities = logprobs.exp()
    torch.testing.assert_close(
        probabilities, expected.softmax(-1), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=0
    )
    assert not probabilities[..., never].any()
    entropy = -(probabilities * logprobs).sum(-1)
    assert torch.isfinite(entropy).all()
    allowed = [i for i in range(VOCAB) if i not in ids]
    torch.autograd.backward((logprobs[..., allowed] ** 2).sum() + entropy.sum())
    assert not logits.grad[..., never].any()
    assert logits.grad[..., allowed].any()


@settings(max_examples=10, deadline=None)
@given(ids=ids_st, seed=st.integers(0, 99))
def test_scores_entropies_and_gradients_of_the_fast_path_are_those_of_the_renormalised_policy(
    ids: frozenset[int], seed: int
) -> None:
    tokens, attention, sampled = batch([(2, 6), (3, 5)], seed)
    start = tokens.size(1) - sampled.size(1)
    sampled &= ~torch.isin(tokens[:, start:], torch.tensor(sorted(ids)))
    if not sampled.any():
        return
    fast, plain = forbidding(tiny_model(), ids), tiny_model()
    install_scoring_forward(fast)
    layout = BatchLayout.from_batch(tokens, attention, sampled)
    scores = compute_logprobs(fast, layout, build_row_passes(layout, torch.arange(2), 64))
    logits = torch.stack([row_logits(plain, row, mask) for row, mask in zip(tokens, attention, strict=True)])
    logits = logits.index_fill(-1, torch.tensor(sorted(ids), dtype=torch.long), -torch.inf)
    all_logprobs = logits.log_softmax(-1)[:, start - 1 : -1]
    expected = all_logprobs.gather(-1, tokens[:, start:, None])[..., 0]
    entropies = torch.special.entr(all_logprobs.exp()).sum(-1)
    torch.testing.assert_close(scores.logprobs[sampled], expected[sampled], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.entropies[sampled], entropies[sampled].detach(), rtol=1e-4, atol=1e-5)
    torch.autograd.backward([scores.logprobs.sum(), expected[sampled].sum()])
    for name, p in plain.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name).grad, p.grad, rtol=1e-3, atol=1e-5)
    assert not fast.lm_head.weight.grad[sorted(ids)].any()


def row_logits(model: PreTrainedModel, row: Tensor, attention: Tensor) -> Tensor:
    """Logits of one padded row, (S, V); 0 at its padding."""
    real = attention.bool()
    logits = torch.zeros(len(row), VOCAB)
    logits[real] = model(row[real][None]).logits[0]
    return logits


@pytest.mark.parametrize("fast", [True, False])
def test_a_training_run_has_no_gap_and_moves_no_forbidden_row(fast: bool, tmp_path: Path) -> None:
    start = tiny_model()
    before = start.lm_head.weight.detach().clone()
    source = SampledSource(copy.deepcopy(start), forbidden_ids=FORBIDDEN)
    seen: list[StepRecord] = []
    final = run_training(
        start,
        tiny_tokenizer(),
        TASKS,
        source,
        replace(SMALL, fast_logprobs=fast),
        tmp_path,
        TrainingOptions(lambda record, _: seen.append(record)),
    )
    assert max(record.metrics["logprob_gap_max"] for record in seen) <= 1e-4
    assert all(record.metrics["entropy"] > 0 for record in seen)
    after = load_file(final / "model.safetensors")["lm_head.weight"]
    never = sorted(FORBIDDEN)
    assert torch.equal(after[never], before[never])
    assert not torch.equal(after, before)


def test_trls_own_pass_gives_the_gradients_of_the_fast_one(tmp_path: Path) -> None:
    """TRL scores observed positions too, where a forbidden id may stand: they have no part in anything."""
    found = []
    for fast in (True, False):
        model = tiny_model()
        source = SampledSource(copy.deepcopy(model), forbidden_ids=FORBIDDEN)
        trainer = make(model, source, replace(SMALL, steps=1, fast_logprobs=fast), tmp_path / str(fast))
        kept = Gradients(model)
        trainer.add_callback(kept)
        trainer.train()
        found.append(kept.steps[0])
        observed = {i for t in source.steps[0] for s in t.segments if not hasattr(s, "lines") for i in s.token_ids}
        assert observed & FORBIDDEN
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-3, atol=1e-6)


def test_a_trainer_that_forbids_what_its_sampler_does_not_is_stopped_at_the_first_step(tmp_path: Path) -> None:
    model = tiny_model()
    source = SampledSource(copy.deepcopy(model))
    source.forbidden_ids = FORBIDDEN  # says so, and samples from all ids
    with pytest.raises(WeightSyncError, match="a sampled log probability is"):
        run_training(model, tiny_tokenizer(), TASKS, source, SMALL, tmp_path, TrainingOptions(lambda *_: None))


@pytest.mark.parametrize("rank", [0, 2])
def test_no_checkpoint_holds_the_mask(rank: int, tmp_path: Path) -> None:
    model = tiny_model()
    names = set(model.state_dict())
    source = SampledSource(copy.deepcopy(model), forbidden_ids=FORBIDDEN)
    config = replace(SMALL, steps=1, save_steps=0 if rank else 1, lora_rank=rank)
    final = run_training(model, tiny_tokenizer(), TASKS, source, config, tmp_path, TrainingOptions(lambda *_: None))
    files = [final / "model.safetensors", *tmp_path.glob("checkpoint-*/model.safetensors")]
    assert len(files) == (1 if rank else 2)
    for file in files:
        state = load_file(file)
        assert set(state) == names
        assert max(weight.abs().max().item() for weight in state.values()) < 10
    free = type(model).from_pretrained(final)(torch.tensor([[3, 4]])).logits[0, -1].softmax(-1)
    assert free[sorted(FORBIDDEN)].all()


def test_an_output_layer_with_a_bias_is_refused_in_one_line() -> None:
    model = tiny_model()
    model.lm_head = torch.nn.Linear(32, VOCAB)
    with pytest.raises(
        ConfigError, match=r"newline_tokens forbid with an output layer is 'Linear'; .*--newline-tokens carry"
    ):
        forbid_ids(model, FORBIDDEN)


def test_other_ids_forbidden_later_take_the_place_of_the_first() -> None:
    model = forbidding(forbidding(tiny_model(), frozenset({5})), frozenset({6, VOCAB + 9}))
    probabilities = model(torch.tensor([[3, 4]])).logits[0, -1].softmax(-1)
    assert probabilities[6] == 0 < probabilities[5]
