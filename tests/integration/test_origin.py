"""Policies out of GGUF files, and of adapters with their base: made once, whole or not at all."""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from repl_rl.cli import main
from repl_rl.errors import ConfigError
from repl_rl.models.resolve_model import BUNDLED, resolve_model
from repl_rl.utils.atomic_files import open_private_folder, replace_folder_atomically
from repl_rl.utils.file_lock import lock_folder
from tests.support.gguf_files import CHAT, POLICY, write_gguf
from tests.support.trainer.tiny_policies import tiny_model, tiny_tokenizer


class Told(list[str]):
    """What was told to the person who waits."""

    def __call__(self, line: str) -> None:
        self.append(line)


def refused(model: Path | str, place: Path) -> str:
    with pytest.raises(ConfigError) as error:
        resolve_model(str(model), place, Told())
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert not place.exists()
    return str(error.value)


def test_a_gguf_file_becomes_a_folder_with_its_weights_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "policy.gguf", end_of_turn=361)
    told = Told()
    found = resolve_model(str(file), tmp_path / "models", told)
    assert found.reference == str(file)
    assert found.folder.parent == tmp_path / "models"
    assert told == [f"dequantising {file} into {found.folder} ..."]
    weights, ours = load_file(found.folder / "model.safetensors"), load_file(POLICY / "model.safetensors")
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], ours[name]) for name in ours)
    config = json.loads((found.folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["tie_word_embeddings"]) == ("float32", False)
    assert same(AutoModelForCausalLM.from_pretrained(POLICY), found.folder)
    tokenizer = AutoTokenizer.from_pretrained(found.folder)
    assert tokenizer.chat_template == CHAT
    assert tokenizer.eos_token_id == 360
    assert GenerationConfig.from_pretrained(found.folder).eos_token_id == [360, 361]
    assert os.listdir(found.folder.parent) == [found.folder.name]


def test_a_link_to_a_gguf_file_may_have_another_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "blob-5f3a")
    link = tmp_path / "tiny.gguf"
    link.symlink_to("blob-5f3a")
    folder = resolve_model(str(link), tmp_path / "models", Told()).folder
    assert folder.name.startswith("tiny-")
    assert (folder / "model.safetensors").is_file()


def test_a_gguf_file_is_dequantised_once_until_it_changes(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "policy.gguf")
    first = resolve_model(str(file), tmp_path / "models", Told())
    again = Told()
    assert resolve_model(str(file), tmp_path / "models", again) == first
    assert again == []
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert resolve_model(str(file), tmp_path / "models", Told()).folder != first.folder


def text_file(file: Path) -> None:
    file.write_text("no weights")


def cut(file: Path) -> None:
    whole = write_gguf(file).read_bytes()
    file.write_bytes(whole[: len(whole) // 2])


def cut_in_its_head(file: Path) -> None:
    whole = write_gguf(file).read_bytes()
    file.write_bytes(whole[:300])


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (text_file, ["model file is", "it is not a GGUF file"]),
        (cut, ["GGUF file is", "transformers cannot read it"]),
        (cut_in_its_head, ["GGUF file is", "transformers cannot read it"]),
        (lambda file: write_gguf(file, "sphinx"), ["GGUF file is", "transformers cannot read it", "sphinx"]),
        (lambda file: write_gguf(file, without="k_proj"), ["weights are missing", "k_proj", "4 in all"]),
    ],
)
def test_a_gguf_file_that_cannot_be_read_leaves_nothing(
    tmp_path: Path, write: Callable[[Path], object], parts: list[str]
) -> None:
    file = tmp_path / "policy.gguf"
    write(file)
    error = refused(file, tmp_path / "runs" / ".models")
    assert not [part for part in parts if part not in error], error
    assert os.listdir(tmp_path) == ["policy.gguf"]


def test_training_on_an_unknown_architecture_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "policy.gguf", "sphinx")
    assert main(["train", "--model", str(file), "--out", str(tmp_path / "runs")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "error" in line] == lines[-1:]
    assert "sphinx" in lines[-1]
    assert os.listdir(tmp_path) == ["policy.gguf"]


def adapters(
    folder: Path, base: Path, model: PreTrainedModel | None = None, targets: str | list[str] = "all-linear"
) -> PreTrainedModel:
    """Write adapters for the model in `base`; returns the model with them."""
    torch.manual_seed(1)
    plain = model or AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(folder))
    return adapted


def plain_policy(folder: Path) -> Path:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def same(one: PreTrainedModel, other: Path) -> bool:
    ids = torch.arange(3, 20)[None]
    whole = AutoModelForCausalLM.from_pretrained(other)
    torch.testing.assert_close(one(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-4)
    return True


def test_adapters_are_merged_into_their_base_once(tmp_path: Path) -> None:
    base = plain_policy(tmp_path / "base")
    adapted = adapters(tmp_path / "mine", base)
    told = Told()
    found = resolve_model(str(tmp_path / "mine"), tmp_path / "models", told)
    assert found.reference == str(tmp_path / "mine")
    assert told == [f"merging the adapters in {tmp_path / 'mine'} with {base} into {found.folder} ..."]
    assert same(adapted, found.folder)
    assert AutoTokenizer.from_pretrained(found.folder).eos_token == "<eos>"
    assert not (found.folder / "adapter_config.json").exists()
    again = Told()
    assert resolve_model(str(tmp_path / "mine"), tmp_path / "models", again) == found
    assert again == []
    tiny_model(seed=3).save_pretrained(base)
    assert resolve_model(str(tmp_path / "mine"), tmp_path / "models", Told()).folder != found.folder


def test_a_base_beside_the_adapters_is_not_one_of_that_name_beside_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = plain_policy(tmp_path / "base")
    adapted = adapters(tmp_path / "mine", Path("../base"), AutoModelForCausalLM.from_pretrained(base))
    (tmp_path / "elsewhere" / "base").mkdir(parents=True)
    (tmp_path / "elsewhere" / "here").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" / "here")
    assert same(adapted, resolve_model(str(tmp_path / "mine"), tmp_path / "models", Told()).folder)


def test_the_base_may_be_beside_the_adapters_a_gguf_file_or_adapters_again(tmp_path: Path) -> None:
    base = plain_policy(tmp_path / "base")
    inner = adapters(tmp_path / "inner", Path("../base"), AutoModelForCausalLM.from_pretrained(base))
    outer = adapters(tmp_path / "outer", tmp_path / "inner", inner.merge_and_unload())
    assert same(outer, resolve_model(str(tmp_path / "outer"), tmp_path / "models", Told()).folder)
    file = write_gguf(tmp_path / "policy.gguf")
    on_gguf = adapters(tmp_path / "on-gguf", file, AutoModelForCausalLM.from_pretrained(POLICY))
    assert same(on_gguf, resolve_model(str(tmp_path / "on-gguf"), tmp_path / "models", Told()).folder)


def rewrite(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_adapters_without_their_base_are_told_in_one_line_and_leave_nothing(tmp_path: Path) -> None:
    base, mine, place = plain_policy(tmp_path / "base"), tmp_path / "mine", tmp_path / "runs" / ".models"
    adapters(mine, base)
    shutil.rmtree(base)
    error = refused(mine, place)
    assert f"base of the adapters in {mine} is '{base}'; it cannot be loaded" in error
    rewrite(mine, base_model_name_or_path=str(mine))
    assert "themselves as their base" in refused(mine, place)
    rewrite(mine, base_model_name_or_path=None)
    assert "base_model_name_or_path" in refused(mine, place)
    (mine / "adapter_config.json").write_text("{")
    assert "cannot be read" in refused(mine, place)


@pytest.mark.parametrize(
    "changes", [{"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, {"alpha_pattern": 0}]
)
def test_adapters_whose_config_names_code_are_refused_before_anything_is_imported(
    changes: dict[str, object], tmp_path: Path
) -> None:
    mine, place = tmp_path / "mine", tmp_path / "runs" / ".models"
    adapters(mine, plain_policy(tmp_path / "base"))
    rewrite(mine, **changes)
    if "alpha_pattern" in changes:
        (mine / "adapter_config.json").write_text("[" * 100_000)
    error = refused(mine, place)
    assert ("megatron_config" in error and "names modules" in error) or "cannot be read" in error
    assert "antigravity" not in sys.modules


def _gguf(pairs: int, tensors: int, *fields: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(fields)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


_ARCHITECTURE = _text(b"general.architecture") + struct.pack("<I", 8) + _text(b"llama")
_ARRAY = _text(b"x") + struct.pack("<IIQ", 9, 0, 1 << 40)


@pytest.mark.parametrize("content", [
    _gguf(2, 0, _ARCHITECTURE, _ARRAY),
    _gguf(1 << 60, 0, _ARCHITECTURE),
    _gguf(1, 1 << 60, _ARCHITECTURE),
    _gguf(1, 0, struct.pack("<Q", 1 << 62), b"abc"),
], ids=["an array", "pairs", "tensors", "a text"])  # fmt: skip
def test_a_gguf_file_that_says_more_than_it_holds_is_refused_and_leaves_nothing(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "big.gguf"
    file.write_bytes(content)
    assert "transformers cannot read it" in refused(file, tmp_path / "runs" / ".models")


@pytest.mark.parametrize(
    ("changes", "without"),
    [
        ({"intermediate_size": 2_000_000}, "mlp"),
        ({"hidden_size": 1_000_000}, ""),
        ({"num_attention_heads": 1_000_000}, ""),
        ({"num_hidden_layers": 1 << 30}, ""),
    ],
)
def test_a_gguf_file_whose_config_claims_more_than_its_weights_takes_no_memory_for_it(
    changes: dict[str, int], without: str, tmp_path: Path
) -> None:
    file, before = write_gguf(tmp_path / "big.gguf", without=without, changes=changes), peak_mib()
    assert "config claims" in refused(file, tmp_path / "runs" / ".models")
    assert peak_mib() < before + 500


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@pytest.mark.parametrize("changes", [{"intermediate_size": 2_000_000}, {"num_hidden_layers": 1 << 30}])
def test_a_base_of_adapters_that_claims_more_than_its_weights_takes_no_memory_for_it(
    changes: dict[str, int], tmp_path: Path
) -> None:
    base, mine = plain_policy(tmp_path / "base"), tmp_path / "mine"
    adapters(mine, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **changes, "layer_types": None}))
    before = peak_mib()
    assert "config claims" in refused(mine, tmp_path / "runs" / ".models")
    assert peak_mib() < before + 500


def test_a_base_of_adapters_without_a_weight_is_refused(tmp_path: Path) -> None:
    base, mine = plain_policy(tmp_path / "base"), tmp_path / "mine"
    adapters(mine, base)
    weights = load_file(base / "model.safetensors")
    missing = next(name for name in weights if "mlp" in name)
    del weights[missing]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert f"the base has no {missing}" in refused(mine, tmp_path / "runs" / ".models")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"base_model_name_or_path": 5, "revision": "x"}, "write a text"),
        ({"base_model_name_or_path": ["a"]}, "write a text"),
        ({"base_model_name_or_path": "a" * 5000}, "at most 255 characters"),
        ({"revision": 7}, "write a text"),
        ({"target_modules": 7}, "write a list of names"),
        ({"target_modules": ["q_proj", 7]}, "write a list of names"),
        ({"exclude_modules": 7}, "write a list of names"),
        ({"modules_to_save": "(a|a)*b"}, "write plain names"),
        ({"rank_pattern": {"(a|a)*b": 2}}, "write plain names"),
        ({"alpha_pattern": 7}, "write plain names"),
        ({"layers_pattern": ["(a|a)*b"]}, "write plain names"),
        ({"r": 1 << 30}, "no dimension of their weights"),
        ({"rank_pattern": {"q_proj": 1 << 30}}, "no dimension of their weights"),
        ({"layer_replication": [[0, 1 << 40]]}, "layer_replication"),
        ({"target_modules": "(?:[a-z._0-9]|[a-z._0-9])*!"}, "takes more than 2 s"),
        ({"target_modules": "("}, "it is not a regular expression"),
        ({"target_modules": "no_such"}, "matches no module"),
    ],
)
def test_a_config_of_adapters_is_checked_before_it_is_used(
    changes: dict[str, object], part: str, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    adapters(mine, plain_policy(tmp_path / "base"))
    rewrite(mine, **changes)
    assert part in refused(mine, tmp_path / "runs" / ".models")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*\.(q|k|v|o)_proj", "exclude_modules": None},
        {"target_modules": r".*_proj", "exclude_modules": r".*\.mlp\..*"},
        {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "rank_pattern": {r"^model\.layers\.0\.self_attn\.q_proj$": 2},
        },
    ],
)
def test_adapters_may_name_their_modules_by_a_regular_expression(changes: dict[str, object], tmp_path: Path) -> None:
    base, mine = plain_policy(tmp_path / "base"), tmp_path / "mine"
    adapted = adapters(mine, base, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    rewrite(mine, **changes)
    assert same(adapted, resolve_model(str(mine), tmp_path / "models", Told()).folder)


def test_adapters_that_do_not_fit_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    base, mine, place = plain_policy(tmp_path / "base"), tmp_path / "mine", tmp_path / "runs" / ".models"
    adapters(mine, base)
    tiny_model(hidden=64).save_pretrained(base)
    assert "the base that they were trained on" in refused(mine, place)
    tiny_model().save_pretrained(base)
    weights = load_file(mine / "adapter_model.safetensors")
    missing = weights.popitem()[0]
    save_file(weights, mine / "adapter_model.safetensors")
    assert missing in refused(mine, place)
    (mine / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused(mine, place)


def test_a_folder_and_the_bundled_policy_are_what_they_are(tmp_path: Path) -> None:
    plain = plain_policy(tmp_path / "plain")
    assert resolve_model(str(plain), tmp_path / "models", Told()).folder == plain
    assert resolve_model(BUNDLED, tmp_path / "models", Told()).folder == POLICY
    assert not (tmp_path / "models").exists()


def test_a_file_that_says_another_size_of_head_than_its_weights_have_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "policy.gguf", head_dim=64)
    assert "of another shape than it says" in refused(file, tmp_path / "models")


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b" / "final"
    with pytest.raises(FileNotFoundError), replace_folder_atomically(final) as made:
        (made / "half" / "file").touch()
    assert os.listdir(tmp_path) == []
    with replace_folder_atomically(final) as made:
        (made / "file").touch()
        assert not final.exists()
    assert os.listdir(final) == ["file"]
    with replace_folder_atomically(final) as late:
        (late / "other").touch()
    assert os.listdir(final) == ["file"]
    assert os.listdir(final.parent) == ["final"]


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    gone = tmp_path / ".unfinished-999999999-abcdefgh"
    gone.mkdir()
    with lock_folder(gone):
        (gone / "half").touch()
    (tmp_path / f".unfinished-{'9' * 40}-abcdefgh").mkdir()  # killed before it wrote anything
    with open_private_folder(tmp_path, ".unfinished-") as mine, open_private_folder(tmp_path, ".unfinished-") as other:
        assert mine.is_dir()
        assert other.is_dir()
        assert not gone.exists()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_swept_where_a_younger_process_has_its_number(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as younger:
        left = tmp_path / f".unfinished-{younger.pid}-abcdefgh"
        left.mkdir()
        with lock_folder(left):
            pass
        with open_private_folder(tmp_path, ".unfinished-"):
            assert left.is_dir()  # it may be that process's own
        os.utime(left, (0, 0))  # made before that process was
        with open_private_folder(tmp_path, ".unfinished-"):
            assert not left.exists()
        younger.communicate(b"\n")


@pytest.mark.parametrize("name", ["2024-drafts", "2024-chapters", "999999999-abcdefgh", "999999999", "9" * 40])
def test_a_users_folder_with_such_a_name_stays_as_it_is(tmp_path: Path, name: str) -> None:
    mine, link = tmp_path / f".unfinished-{name}", tmp_path / ".unfinished-999999998-abcdefgh"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    linked = tmp_path / "linked"
    linked.mkdir()
    with lock_folder(linked):
        (linked / "letter.txt").touch()
    link.symlink_to(linked)
    with replace_folder_atomically(tmp_path / "policy") as made:
        (made / "file").touch()
    assert os.listdir(mine) == ["thesis.txt"]
    assert link.is_symlink()
    assert (linked / "letter.txt").exists()
