"""Dropout: what a model draws at random in training is off, so that trainer and sampler are one policy."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from repl_rl.cli import main
from repl_rl.engine import Transformers
from repl_rl.errors import ConfigError
from repl_rl.models.disable_dropout import disable_dropout
from repl_rl.sft.finetune import build_labelled_example, run_finetuning
from repl_rl.sft.finetune_config import FinetuneConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.config_checks import validate_model
from repl_rl.trainer.train import TrainingOptions, run_training
from repl_rl.utils.package_data import find_asset
from tests.support.finetuning import RECOVERED, RENDERER, RIGHT
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

TASKS = [f"task {i}" for i in range(8)]
SIZES = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "n_inner": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "rotary_dim": 4, "num_local_experts": 4, "num_experts": 4,
    "d_model": 32, "n_layers": 2, "n_heads": 4, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARES = {
    "gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gptj": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "gpt_neox": ("attention_dropout", "hidden_dropout"),
    "bloom": ("attention_dropout", "hidden_dropout"),
    "opt": ("dropout", "attention_dropout", "layerdrop"),
    "falcon": ("attention_dropout", "hidden_dropout"),
    "phi": ("attention_dropout", "resid_pdrop", "embd_pdrop"),
    "phi3": ("attention_dropout", "resid_pdrop", "embd_pdrop"),
    "qwen3": ("attention_dropout",),
    "granite": ("attention_dropout",),
    "mixtral": ("attention_dropout", "router_jitter_noise"),
    "starcoder2": ("attention_dropout", "residual_dropout", "embedding_dropout"),
    "gpt_bigcode": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "phimoe": ("attention_dropout", "input_jitter_noise"),
    "biogpt": ("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "layerdrop"),
}


def noisy(kind: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    known = AutoConfig.for_model(kind)
    computed = [name for name in SIZES if isinstance(getattr(type(known), name, None), property)]
    sizes = {name: size for name, size in SIZES.items() if hasattr(known, name) and name not in computed}
    routing = {"router_jitter_noise": 0.0} if kind == "phimoe" else {}
    config = AutoConfig.for_model(kind, **sizes, **routing, **dict.fromkeys(SHARES[kind], 0.4))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(torch.arange(3, 35)[None]).logits
    return found


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", SHARES)
def test_a_model_in_training_computes_what_it_does_when_it_samples(kind: str, attention: str) -> None:
    try:
        model = noisy(kind, attention)
    except ValueError:
        model = noisy(kind, "eager")
    expected = logits(model.eval())
    model.train()
    assert not torch.equal(logits(model), expected), "it draws something"
    disable_dropout(model)
    assert torch.equal(logits(model), expected)
    assert [name for name in SHARES[kind] if getattr(model.config, name)] == []


@pytest.mark.parametrize("fast", [True, False])
def test_a_model_with_dropout_is_trained_beside_a_sampler_without(fast: bool, tmp_path: Path) -> None:
    def trained(share: float) -> dict[str, torch.Tensor]:
        model, sampler = tiny_model(), tiny_model()
        for layer in model.modules():
            if hasattr(layer, "attention_dropout"):
                layer.attention_dropout = share
        config = TrainerConfig(steps=2, prompts_per_step=2, group_size=4, warmup_steps=0, fast_logprobs=fast)
        out = tmp_path / f"{share}" / "checkpoints"
        run_training(
            model, tiny_tokenizer(), TASKS, SampledSource(sampler), config, out, TrainingOptions(lambda *_: None)
        )
        return dict(model.state_dict())

    plain, dropped = trained(0.0), trained(0.5)
    assert all(torch.equal(plain[name], dropped[name]) for name in plain)


def test_a_cold_start_has_none_either(tmp_path: Path) -> None:
    examples = [build_labelled_example(trajectory, learn_errors=True) for trajectory in (RIGHT, RECOVERED)]
    losses = []
    for share in (0.0, 0.5):
        base = tmp_path / f"base{share}"
        model = tiny_model(vocab=len(RENDERER.tokenizer))
        model.config.attention_dropout, model.config.max_position_embeddings = share, 1024
        model.save_pretrained(base)
        losses.append(run_finetuning(base, RENDERER, examples, tmp_path / f"out{share}", FinetuneConfig(steps=2)))
    assert losses[0] == losses[1]


def test_a_model_that_routes_at_random_in_training_is_refused_before_anything_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = noisy("phimoe", "eager")
    disable_dropout(model)
    model.eval()
    without = logits(model)
    for module in (model, *model.modules()):
        if hasattr(module, "router_jitter_noise"):
            module.router_jitter_noise = 0.4
    assert not torch.equal(logits(model), without), "the share could be set to 0"
    sampled = logits(model)
    assert not torch.equal(logits(model.train()), sampled), "it could be left"
    model.config.router_jitter_noise = 0.4
    with pytest.raises(ConfigError, match=r"router_jitter_noise is 0\.4; phimoe draws experts at random"):
        disable_dropout(model)
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(find_asset("policies/quickstart"), folder)
    model.save_pretrained(folder)
    with pytest.raises(ConfigError, match="draws experts at random"):
        validate_model(folder, Transformers(), TrainerConfig(), frozenset)
    for verb in (f"train --out {out}", f"sft --samples 1 --out {out / 'policy'}"):
        assert main([*verb.split(), "--model", str(folder), "--engine", "transformers"]) == 2
        assert "draws experts at random in training" in capsys.readouterr().err
    assert not out.exists()
