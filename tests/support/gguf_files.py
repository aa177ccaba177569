"""GGUF files made here: the bundled policy in another container."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
from safetensors.numpy import load_file

from repl_rl.utils.package_data import find_asset

POLICY = find_asset("policies/quickstart")
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_gguf(
    file: Path,
    architecture: str = "qwen3",
    without: str = "",
    end_of_turn: int | None = None,
    head_dim: int | None = None,
    changes: Mapping[str, int] | None = None,
) -> Path:
    """The bundled policy as `file`, its weights as they are; without those whose name contains `without`."""
    config = json.loads((POLICY / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config.update(changes or {})
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim or config["head_dim"])
    writer.add_value_length(head_dim or config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, config["vocab_size"], config["eos_token_id"], config["pad_token_id"])
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for name, weight in load_file(POLICY / "model.safetensors").items():
        if not without or without not in name:
            stem = names.get_name(name.removesuffix(".weight"))
            assert stem is not None
            writer.add_tensor(f"{stem}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, size: int, end: int, pad: int) -> None:
    tokenizer = json.loads((POLICY / "tokenizer.json").read_text())
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert len(tokens) == size
    special = {token["content"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([0.0] * size)
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(pad)
    writer.add_chat_template(CHAT)
