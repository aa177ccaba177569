"""Generation settings that transformers loads but refuses to save: such a model is trained, and keeps them."""

import json
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from repl_rl.models.describe_load_error import copy_generation_config
from repl_rl.models.resolve_model import resolve_model
from repl_rl.sft.finetune import build_labelled_example, run_finetuning
from repl_rl.sft.finetune_config import FinetuneConfig
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.train import TrainingOptions, run_training
from tests.support.finetuning import RENDERER, RIGHT
from tests.support.trainer.tiny_policies import SampledSource, tiny_model, tiny_tokenizer

SETTINGS = [
    {"temperature": 0.6, "top_p": 0.9},
    {"do_sample": False, "temperature": 0.9, "max_length": 4096},
    {"temperature": -1.0, "max_length": -5},
    {"temperature": "warm", "max_length": 20},
]
"""The first two are as published with models; the others are damaged."""


def model_with(settings: dict[str, object], folder: Path) -> Path:
    model = tiny_model(vocab=len(RENDERER.tokenizer))
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def generation(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "generation_config.json").read_text())
    return found


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_training_saves_the_model_with_its_settings(settings: dict[str, object], rank: int, tmp_path: Path) -> None:
    base = model_with(settings, tmp_path / "base")
    config = TrainerConfig(steps=2, prompts_per_step=2, group_size=4, warmup_steps=0, save_steps=1, lora_rank=rank)
    tasks = [f"task {i}" for i in range(8)]
    sampled = SampledSource(AutoModelForCausalLM.from_pretrained(base))
    final = run_training(
        base, tiny_tokenizer(), tasks, sampled, config, tmp_path / "checkpoints", TrainingOptions(lambda *_: None)
    )
    assert generation(final).items() >= settings.items()
    assert AutoModelForCausalLM.from_pretrained(final).num_parameters() > 0
    weights = "adapter_model.safetensors" if rank else "model.safetensors"
    assert (tmp_path / "checkpoints" / "checkpoint-1" / weights).is_file()


@pytest.mark.parametrize("settings", SETTINGS)
def test_fine_tuning_saves_the_model_with_its_settings(settings: dict[str, object], tmp_path: Path) -> None:
    base, out = model_with(settings, tmp_path / "base"), tmp_path / "out"
    run_finetuning(base, RENDERER, [build_labelled_example(RIGHT)] * 2, out, FinetuneConfig(steps=1))
    assert generation(out).items() >= settings.items()


@pytest.mark.parametrize("settings", SETTINGS)
def test_merged_adapters_keep_the_settings_of_their_base(settings: dict[str, object], tmp_path: Path) -> None:
    base, mine = model_with(settings, tmp_path / "base"), tmp_path / "mine"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM"))
    model.save_pretrained(mine)
    assert generation(resolve_model(str(mine), tmp_path / "models", lambda _: None).folder).items() >= settings.items()


def test_saved_settings_win_over_those_of_the_base(tmp_path: Path) -> None:
    for name, settings in (("base", {"eos_token_id": 1, "top_p": 0.5}), ("saved", {"eos_token_id": [1, 2]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(json.dumps(settings))
    copy_generation_config(tmp_path / "base", tmp_path / "saved")
    assert generation(tmp_path / "saved") == {"eos_token_id": [1, 2], "top_p": 0.5}
