"""Low-rank adapters: only they are trained, and everybody else sees whole weights."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from repl_rl.errors import ConfigError
from repl_rl.models.resolve_model import resolve_model
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.optional_packages import require_peft
from repl_rl.trainer.plugins.lora import add_adapters, merge_adapter_state
from repl_rl.trainer.rollout_source import StepRecord
from repl_rl.trainer.train import TrainingOptions, run_training
from tests.support.trainer.grpo_runs import TASKS
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

CONFIG = TrainerConfig(
    steps=3, prompts_per_step=2, group_size=3, warmup_steps=0, learning_rate=0.02, lora_rank=4, save_steps=3
)


@pytest.mark.parametrize(("fast", "checkpointing"), [(True, True), (False, False)])
def test_the_sampler_gets_merged_weights_and_the_final_folder_holds_them(
    fast: bool, checkpointing: bool, tmp_path: Path
) -> None:
    start = tiny_model()
    source = SampledSource(copy.deepcopy(start))
    config = replace(CONFIG, fast_logprobs=fast, gradient_checkpointing=checkpointing)
    seen: list[StepRecord] = []
    model = copy.deepcopy(start)
    final = run_training(
        model, tiny_tokenizer(), TASKS, source, config, tmp_path, TrainingOptions(lambda r, t: seen.append(r))
    )
    gaps = [record.metrics["logprob_gap_max"] for record in seen]
    assert len(gaps) == 3
    assert max(gaps) < 1e-3, "the sampler follows the policy"
    whole = AutoModelForCausalLM.from_pretrained(final)
    moved = [name for name, p in whole.named_parameters() if not torch.equal(p, start.get_parameter(name))]
    assert {name.split(".")[-2] for name in moved} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for folder in (tmp_path / "adapter", tmp_path / "checkpoint-3"):
        alone = PeftModel.from_pretrained(copy.deepcopy(start), str(folder))
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(alone(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_is_saved_names_its_base_and_is_a_policy_again(tmp_path: Path) -> None:
    start = tiny_model()
    start.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    source = SampledSource(copy.deepcopy(start))
    final = run_training(tmp_path / "base", tiny_tokenizer(), TASKS, source, CONFIG, tmp_path / "run")
    trained = load_file(final / "model.safetensors")
    for name in ("adapter", "checkpoint-3"):
        found = resolve_model(str(tmp_path / "run" / name), tmp_path / "models", print)
        again = load_file(found.folder / "model.safetensors")
        assert again.keys() == trained.keys()
        for key, weight in trained.items():
            torch.testing.assert_close(again[key], weight, rtol=1e-5, atol=1e-6)


def test_adapters_of_a_model_of_the_hub_name_it_with_its_commit(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    folder = tmp_path / "models--org--tiny" / "snapshots" / commit
    tiny_model().save_pretrained(folder)
    config = add_adapters(AutoModelForCausalLM.from_pretrained(folder), 2, seed=0).peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("org/tiny", commit)


def test_merged_weights_are_those_of_the_adapted_model_which_stays_as_it_is() -> None:
    plain = tiny_model()
    names = set(plain.state_dict())
    model = add_adapters(copy.deepcopy(plain), 2, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    state = merge_adapter_state(model.state_dict(), model)
    assert set(state) == names
    plain.load_state_dict(state)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_model_without_adapters_is_its_own_merged_state() -> None:
    model = tiny_model()
    state = model.state_dict()
    assert merge_adapter_state(state, model) is state


def test_without_peft_adapters_are_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"lora_rank is 4; .*pip install 'repl_rl\[lora\]'"):
        require_peft(4, find_package=lambda name: None)


def test_adapters_are_drawn_from_the_seed_and_change_nothing_at_first(tmp_path: Path) -> None:
    ids = torch.arange(3, 20)[None]
    plain = tiny_model()
    one, same, other = (add_adapters(copy.deepcopy(plain), 2, seed) for seed in (0, 0, 1))
    assert torch.equal(one(ids).logits, plain(ids).logits)
    drawn = [{n: p for n, p in m.named_parameters() if "lora_A" in n} for m in (one, same, other)]
    assert all(torch.equal(p, drawn[1][name]) for name, p in drawn[0].items())
    assert not any(torch.equal(p, drawn[2][name]) for name, p in drawn[0].items())


def test_checkpointing_gives_the_same_weights(tmp_path: Path) -> None:
    start = tiny_model()
    trained = []
    for checkpointing in (False, True):
        model = copy.deepcopy(start)
        config = replace(CONFIG, lora_rank=0, steps=1, save_steps=0, gradient_checkpointing=checkpointing)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        model.model.layers[0].register_forward_hook(count)
        out = tmp_path / str(checkpointing)
        run_training(model, tiny_tokenizer(), TASKS, SampledSource(copy.deepcopy(start)), config, out)
        trained.append((model, calls))
    (plain, once), (recomputed, more) = trained
    for p, q in zip(plain.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert more > once, "activations were computed again"
