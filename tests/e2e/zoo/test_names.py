"""Every family's weights go from its checkpoint into the trainer, back under their names, and into every engine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.models.zoo import ZOO
from repl_rl.engine.transformers_engine import Decoder
from repl_rl.errors import ConfigError, EngineError
from repl_rl.models.parameter_names import complete_checkpoint, copy_with_weights, load_skeleton, rename_to_checkpoint
from repl_rl.models.safetensors_index import list_checkpoint_files, read_checkpoint_shapes, validate_checkpoint_names
from repl_rl.trainer.weight_sync import save_weights

Made = Callable[[str], Path]
NAMES = [family.name for family in ZOO]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_trainer_writes_is_what_a_dry_run_without_weights_says(name: str, made: Made) -> None:
    found = load_skeleton(made(name))
    assert {p.device.type for p in found.model.parameters()} == {"meta"}
    model = AutoModelForCausalLM.from_pretrained(made(name))
    written = rename_to_checkpoint(model, model.state_dict())
    assert {key: tuple(w.shape) for key, w in written.items()} == dict(found.trained_shapes)
    assert found.trained_shapes.items() <= found.checkpoint_shapes.items()
    stored = {key: w for file in list_checkpoint_files(made(name)) for key, w in load_file(file).items()}
    assert all(torch.equal(w, stored[key]) for key, w in written.items())


@pytest.mark.parametrize("name", NAMES)
def test_weights_under_their_stored_names_make_the_same_model_again(name: str, made: Made) -> None:
    model = AutoModelForCausalLM.from_pretrained(made(name))
    again = copy_with_weights(model, rename_to_checkpoint(model, model.state_dict()))
    assert again.state_dict().keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], weight), key


def sync(folder: Path, out: Path) -> Path:
    """A weight sync of the model in `folder`, all its weights one higher."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    out.mkdir()
    save_weights(model, model.state_dict(), out)
    return out


@pytest.mark.parametrize(
    "name", ["Qwen3, tied, head stored", "Mistral, windows", "Llama", "Qwen3-MoE", "Mixtral", "Qwen3.5, composite"]
)
def test_engines_take_weights_of_checkpoints_that_store_more_or_in_another_form(
    name: str, made: Made, tmp_path: Path
) -> None:
    found = load_skeleton(made(name))
    validate_checkpoint_names(sync(made(name), tmp_path / "sync"), found.trained_shapes, found.checkpoint_shapes)
    validate_checkpoint_names(made(name), found.trained_shapes, found.checkpoint_shapes)


@pytest.mark.parametrize("name", ["Qwen3, tied, head stored", "Mistral, windows", "Llama", "Qwen3-MoE"])
def test_the_transformers_engine_takes_them_too(name: str, made: Made, tmp_path: Path) -> None:
    decoder = Decoder(made(name), "float32", 0)
    before = {key: weight.clone() for key, weight in decoder.model.named_parameters()}
    decoder.load_weights(sync(made(name), tmp_path / "sync"))
    assert all(torch.equal(weight, before[key] + 1) for key, weight in decoder.model.named_parameters())
    decoder.load_weights(made(name))
    assert all(torch.equal(weight, before[key]) for key, weight in decoder.model.named_parameters())


def test_a_weight_that_is_missing_unknown_or_of_another_shape_is_named(made: Made, tmp_path: Path) -> None:
    folder = made("Qwen3-MoE")
    found, whole = load_skeleton(folder), load_file(folder / "model.safetensors")
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    other: dict[str, dict[str, torch.Tensor]] = {
        expert: {key: w for key, w in whole.items() if key != expert},
        "model.more": whole | {"model.more": torch.ones(1)},
        "model.norm.weight": whole | {"model.norm.weight": torch.ones(3)},
    }
    for name, weights in other.items():
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(EngineError, match=f"1 weights differ, {name} is"):
            validate_checkpoint_names(tmp_path, found.trained_shapes, found.checkpoint_shapes)


def test_a_checkpoint_that_is_not_whole_is_refused_without_loading_a_weight(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("Qwen3-MoE"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    save_file(dict(list(weights.items())[1:]), folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 weights of Qwen3MoeForCausalLM are missing or have another shape"):
        load_skeleton(folder)
    save_file(weights | {"model.norm.weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"1 weights of Qwen3MoeForCausalLM .* another shape, model\.norm\.weight first"
    ):
        load_skeleton(folder)


def test_a_shard_that_is_not_there_is_named(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("Llama"), tmp_path / "model"))
    lost = list_checkpoint_files(folder)[1]
    lost.unlink()
    with pytest.raises(EngineError, match=f"lacks {lost.name}, which its index names"):
        read_checkpoint_shapes(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "never_heard_of"}, "transformers cannot read its config.json"),
        ({"model_type": "clip_vision_model"}, "no causal language model"),
    ],
)
def test_a_model_of_an_unknown_kind_is_refused_in_one_line(config: dict[str, str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason) as told:
        load_skeleton(tmp_path)
    assert "\n" not in str(told.value)


def test_a_composite_model_is_saved_whole_with_its_text_part_trained(made: Made, tmp_path: Path) -> None:
    base = made("Qwen3.5, composite")
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(tmp_path)
    complete_checkpoint(tmp_path, base)
    before, after = (AutoModelForImageTextToText.from_pretrained(folder) for folder in (base, tmp_path))
    assert type(before) is type(after)
    moved = [key for key, weight in before.state_dict().items() if not torch.equal(weight, after.state_dict()[key])]
    assert moved == ["model.language_model.norm.weight"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
    assert load_skeleton(tmp_path).checkpoint_shapes == load_skeleton(base).checkpoint_shapes
