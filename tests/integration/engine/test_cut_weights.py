"""Weights that an interrupted download left behind: one line, before anything opens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from repl_rl.cli import main
from repl_rl.engine.config import EngineOptions, read_model_folder
from repl_rl.errors import ConfigError, EngineError
from repl_rl.models.parameter_names import read_config, resolve_causal_class
from repl_rl.models.safetensors_index import INDEX, WHOLE, read_checkpoint_shapes, validate_checkpoint_complete
from repl_rl.models.transform_logits import choose_attention
from repl_rl.trainer.config import TrainerConfig
from repl_rl.trainer.load_policy import load_model
from repl_rl.utils.package_data import find_asset
from tests.support.engine.tiny_models import save_policy

WEIGHTS = load_file(find_asset("policies/quickstart") / WHOLE)


def sharded(folder: Path) -> Path:
    """A policy in two shards with an index."""
    save_policy(folder, seed=0)
    weights = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = sorted(weights)
    places: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number}.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def keep_bytes(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:count])


def huge_header(file: Path) -> None:
    file.write_bytes((1 << 60).to_bytes(8, "little") + file.read_bytes()[8:])


def write(file: Path, data: bytes) -> None:
    file.write_bytes(len(data).to_bytes(8, "little") + data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "data": (
        lambda file: keep_bytes(file, file.stat().st_size - 1),
        "has .* bytes, and its header says .*get it again",
    ),
    "most of it": (lambda file: keep_bytes(file, 20_000), "get it again"),
    "header": (lambda file: keep_bytes(file, 100), "its header takes .*get it again"),
    "length": (lambda file: keep_bytes(file, 5), "has 5 bytes"),
    "everything": (lambda file: keep_bytes(file, 0), "has 0 bytes"),
    "header longer than the file": (huge_header, "its header takes 1152921504606846984"),
    "header that is no JSON": (lambda file: write(file, b"\xff\xfe{"), "is not a complete safetensors file"),
    "header that is a list": (lambda file: write(file, b"[1, 2]"), "is not a complete safetensors file"),
    "entries without a shape": (lambda file: write(file, b'{"w": {"dtype": "F32"}}'), "is not a complete"),
    "entries of another kind": (lambda file: write(file, b'{"w": 3}'), "is not a complete safetensors file"),
    "more than the header says": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "its header says"),
}


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("shards", [False, True])
def test_weights_that_are_cut_short_are_refused_in_one_line(what: str, shards: bool, tmp_path: Path) -> None:
    damage, complaint = DAMAGE[what]
    folder = sharded(tmp_path / "model") if shards else save_policy(tmp_path / "model", seed=0)
    read_model_folder(EngineOptions(folder))
    damage(folder / ("model-00001.safetensors" if shards else WHOLE))
    with pytest.raises(ConfigError, match=complaint) as found:
        read_model_folder(EngineOptions(folder))
    assert "\n" not in str(found.value)
    with pytest.raises(EngineError, match=complaint):
        read_checkpoint_shapes(folder)
    with pytest.raises(ConfigError, match="model folder"):
        load_model(folder, TrainerConfig())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"w": 3}}', "{}"])
def test_an_index_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(text)
    with pytest.raises(ConfigError, match="model folder"):
        validate_checkpoint_complete(folder)


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-00000.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks model-00000.safetensors, which its index names"):
        validate_checkpoint_complete(folder)


def test_files_that_are_not_read_may_be_damaged(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, seed=0)
    (folder / "consolidated.safetensors").write_bytes(b"")
    validate_checkpoint_complete(folder)


@pytest.mark.parametrize("verb", [["rollout"], ["train"], ["sft", "--samples", "1"], ["eval"]])
def test_every_verb_says_so_and_writes_nothing(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_policy(tmp_path / "model", seed=0)
    for file in find_asset("policies/quickstart").glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    keep_bytes(folder / WHOLE, 200_000)
    before = sorted(tmp_path.rglob("*"))
    assert main([*verb, "--model", str(folder), "--engine", "transformers"]) == 2
    said = capsys.readouterr().err
    assert "cut short" in said
    assert "Traceback" not in said
    assert sorted(tmp_path.rglob("*")) == before


def test_sft_on_demonstrations_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, folder = tmp_path / "made", save_policy(tmp_path / "model", seed=0)
    for file in find_asset("policies/quickstart").glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    shown = ["transcripts", "--from-tasks", "builtin:count", "--sandbox", "inprocess", "--count", "2"]
    assert main([*shown, "--out", str(made)]) == 0
    keep_bytes(folder / WHOLE, 200_000)
    assert main(["sft", "--data", str(made), "--model", str(folder), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "cut short" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("named", ["evil-owner/evil-kernel", "flash_attention_2", 3])
def test_attention_that_config_json_names_is_not_asked_for(named: str | int, tmp_path: Path) -> None:
    folder = save_policy(tmp_path, seed=0)
    config = json.loads((folder / "config.json").read_text())
    told = {"attn_implementation": named, "_attn_implementation": named}
    (folder / "config.json").write_text(json.dumps(config | told))
    model = load_model(folder, TrainerConfig())
    assert model.config._attn_implementation == choose_attention(*resolve_causal_class(read_config(folder))) == "sdpa"
    assert torch.isfinite(model(torch.arange(3, 20)[None]).logits).all()
