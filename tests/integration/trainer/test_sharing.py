"""When rollouts share their prefixes in the update: only where that changes nothing, and whoever falls back says so."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Lfm2Config, Lfm2ForCausalLM, PreTrainedModel

from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.logprobs import LogprobScorer, ScoringBatch
from repl_rl.trainer.plugins.prefix_sharing import PrefixDeviation, PrefixSharing, PrefixSharingScorer
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from tests.integration.trainer.test_paths import SIZES, windowed
from tests.support.trainer.prefix_trees import TaskTextSource, forest, padded
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

TASKS = [f"task {i}" for i in range(6)]
CONFIG = TrainerConfig(
    steps=2, prompts_per_step=2, group_size=3, warmup_steps=0, learning_rate=0.1, optimizer="sgd"
)  # fmt: skip
"""Plain descent: others divide by the size of each gradient, so that the rounding of a small one is a whole step."""
autocast = partial(torch.autocast, "cpu", torch.bfloat16)


def capped() -> PreTrainedModel:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, attn_implementation="sdpa"))


def convolving() -> PreTrainedModel:
    torch.manual_seed(0)
    kinds = ["conv", "full_attention"]
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=kinds, bos_token_id=1, eos_token_id=2))


def leaking() -> PreTrainedModel:
    """A layer takes something of the token before, and its configuration does not say so."""
    model = tiny_model()
    layer = model.get_submodule("model.layers.0.mlp")
    layer.register_forward_hook(lambda _, args, out: out + 0.01 * nn.functional.pad(out[:, :-1], (0, 0, 1, 0)))
    return model


def dropping() -> PreTrainedModel:
    model = tiny_model()
    model.get_submodule("model.layers.0.self_attn").attention_dropout = 0.1
    return model


def eager() -> PreTrainedModel:
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def forget(model: PreTrainedModel) -> None:
    """Have its attention told of no window any more; rows without a tree have theirs in the mask."""
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.config = copy.copy(module.config)
            module.config.sliding_window = None


def tried(
    model: PreTrainedModel, bfloat16: bool = False, change: Callable[[PreTrainedModel], object] = id
) -> tuple[PrefixSharing, LogprobScorer, list[str]]:
    """`change` is done to the model after it has its attention, and before it is tried."""
    said: list[str] = []
    sharing = PrefixSharing(said.append)
    sharing.install_attention(model)
    change(model)
    context = autocast if bfloat16 else nullcontext
    return sharing, PrefixSharingScorer(model, None, context, 400, sharing=sharing), said


def step(prompt: int, seed: int = 0) -> ScoringBatch:
    ids, attention, sampled = padded(forest(seed, prompt), prompt, seed)
    return ScoringBatch(ids, attention, sampled, sampled.any(dim=1))


def seen(model: PreTrainedModel) -> list[bool]:
    """Filled from now on: for each pass, whether it was a tree."""
    passes: list[bool] = []
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs.get("tree") is not None), with_kwargs=True
    )
    return passes


@pytest.mark.parametrize(("make", "why"), [
    (capped, "its attention has softcap"),
    (convolving, "it has layers of conv"),
    (leaking, "nats"),
    (dropping, "it drops out at random"),
    (eager, "its attention is eager"),
], ids=lambda one: getattr(one, "__name__", ""))  # fmt: skip
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_model_that_does_not_fit_is_found_before_the_first_rollout_and_told_of_once(
    make: Callable[[], PreTrainedModel], why: str, bfloat16: bool
) -> None:
    model = make()
    sharing, fast, (said,) = tried(model, bfloat16)
    assert sharing.disabled
    assert said.startswith(f"shared prefixes off: {model.config.model_type}: ")
    assert why in said
    assert said.endswith("; each row is scored whole")
    passes = seen(model)
    fast.score_step(model, step(40), keep_graph=False)
    assert passes
    assert not any(passes)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_model_that_fits_shares_and_nothing_is_told(bfloat16: bool) -> None:
    model = tiny_model()
    sharing, fast, said = tried(model, bfloat16)
    passes = seen(model)
    fast.score_step(model, step(40), keep_graph=False)
    assert (sharing.disabled, said) == (False, [])
    assert any(passes)
    assert sharing.stats.rows / sharing.stats.tree_tokens > 2


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_window_longer_than_the_trial_is_found_in_the_first_step_and_no_row_is_wrong(bfloat16: bool) -> None:
    model, plain, batch = windowed(60), windowed(60), step(100)
    sharing, fast, said = tried(model, bfloat16, forget)
    assert said == []
    found = fast.score_step(model, batch, keep_graph=False)
    assert sharing.disabled
    alone = LogprobScorer(plain, None, autocast if bfloat16 else nullcontext, 400)
    assert torch.equal(found.logprobs, alone.score_step(plain, batch, keep_graph=False).logprobs)
    fast.score_step(model, batch, keep_graph=False)
    assert len(said) == 1
    assert "differently with them" in said[0]


@pytest.mark.parametrize(("share", "found"), [(0.01, True), (5e-5, False)])
def test_a_tree_whose_gradient_alone_is_wrong_is_found_and_rounding_is_not(share: float, found: bool) -> None:
    """Where nothing is wrong a gradient was seen 1.2e-5 of its length off."""

    def twist(model: PreTrainedModel) -> None:
        whole: list[bool] = []
        model.base_model.register_forward_pre_hook(
            lambda _, args, kwargs: whole.append(kwargs.get("tree") is None), with_kwargs=True
        )
        layer = model.get_submodule("model.layers.0.mlp")
        layer.register_forward_hook(lambda _, args, out: out if whole[-1] else out + share * (out - out.detach()))

    sharing, _, said = tried(tiny_model(), change=twist)
    assert sharing.disabled is found
    assert ["its gradient is" in one for one in said] == [True] * found


def test_longer_rows_than_were_ever_tried_are_tried_again() -> None:
    model = tiny_model()
    _, fast, _ = tried(model)
    passes = seen(model)
    counts = []
    for prompt in (40, 42, 60, 100, 110):
        fast.score_step(model, step(prompt), keep_graph=False)
        counts.append(len(passes) > 2)
        passes.clear()
    assert counts == [True, False, False, True, False]


def test_rows_are_held_against_rows_two_in_a_pass_at_least() -> None:
    """Else rows of which one fills a pass would differ by nothing, and trees would be allowed next to nothing."""
    model = tiny_model()
    _, fast, said = tried(model)
    shapes: list[tuple[int, int]] = []
    model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    fast.score_step(model, step(300), keep_graph=False)
    assert any(rows >= 2 and width > 300 for rows, width in shapes)
    assert said == []


def test_what_is_allowed_is_five_times_what_rows_differ_by_and_never_less_than_the_floor() -> None:
    assert PrefixDeviation("", 4.9e-3, 1e-3, 1e-4).problem is None
    assert PrefixDeviation("", 5.1e-3, 1e-3, 1e-4).problem is not None
    assert PrefixDeviation("", 0.9e-4, 0.0, 1e-4).problem is None
    assert (
        PrefixDeviation("it is", float("nan"), 0.0, 1e-4).problem
        == "it is nan differently with them (tolerance 0.0001)"
    )


def test_trying_leaves_no_gradient_and_draws_no_random_number() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    _, fast, _ = tried(model)
    fast.score_step(model, step(40), keep_graph=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_run_that_goes_on_knows_and_tells_what_was_found_before() -> None:
    found, _, said = tried(leaking())
    told: list[str] = []
    again = PrefixSharing(told.append)
    again.load_state_dict(found.state_dict())
    assert again.disabled
    assert told == said
    again.load_state_dict(found.state_dict())
    assert told == said


COMPOSED = {
    "plain": CONFIG,
    "adapters": replace(CONFIG, lora_rank=4),
    "reference": replace(CONFIG, kl="k3(beta=0.1)"),
    "reference of adapters": replace(CONFIG, kl="k3(beta=0.1)", lora_rank=4),
    "masked ratios, two updates": replace(CONFIG, importance_sampling="token_mask", num_iterations=2),
    "parts and passes": replace(CONFIG, num_mini_batches=2, per_device_batch_size=1, estimator="process"),
    "checkpointing": replace(CONFIG, gradient_checkpointing=True),
}


def trained(out: Path, config: TrainerConfig) -> tuple[dict[str, Tensor], list[StepRecord], list[str]]:
    model = tiny_model()
    source = TaskTextSource(copy.deepcopy(model), forbidden_ids=frozenset({60}))
    records: list[StepRecord] = []
    said: list[str] = []
    run_training(
        model,
        tiny_tokenizer(),
        TASKS,
        source,
        config,
        out,
        TrainingOptions(lambda r, _: records.append(r), warn=said.append),
    )
    return dict(model.state_dict()), records, said


@pytest.mark.parametrize("kind", COMPOSED)
def test_training_with_shared_prefixes_comes_to_the_same_weights_and_figures(kind: str, tmp_path: Path) -> None:
    config = COMPOSED[kind]
    ours, records, said = trained(tmp_path / "auto", config)
    theirs, plain, _ = trained(tmp_path / "off", replace(config, prefix_sharing="off"))
    assert said == []
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5)
    for mine, other in zip(records, plain, strict=True):
        assert mine.metrics["token_ratio"] > 1.5
        assert mine.metrics["shared_tokens"] > 0.7
        assert "token_ratio" not in other.metrics
        for name in ("loss", "grad_norm", "entropy"):
            assert mine.metrics[name] == pytest.approx(other.metrics[name], rel=1e-3, abs=1e-6)


def test_a_run_whose_model_does_not_fit_says_so_and_learns_as_without(tmp_path: Path) -> None:
    told, figures = [], []
    for setting in ("auto", "off"):
        model = leaking()
        source = SampledSource(copy.deepcopy(model))
        said: list[str] = []
        config = replace(CONFIG, steps=1)
        config = config if setting == "auto" else replace(config, prefix_sharing="off")
        run_training(
            model,
            tiny_tokenizer(),
            TASKS,
            source,
            config,
            tmp_path / setting,
            TrainingOptions(lambda *_: None, warn=said.append),
        )
        told.append(said)
        figures.append(list(model.parameters()))
    assert len(told[0]) == 1
    assert "shared prefixes off" in told[0][0]
    assert told[1] == []
    assert all(torch.equal(one, other) for one, other in zip(*figures, strict=True))
