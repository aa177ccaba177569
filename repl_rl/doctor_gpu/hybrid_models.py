"""Small random policies with convolution and recurrent states, in sizes that GPU kernels support."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES: Mapping[str, object] = {
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_KINDS: Mapping[str, Mapping[str, object]] = {
    "qwen3_5_text": {
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon_h1": {
        "mamba_d_ssm": 256,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
    },
    "mamba2": {"num_heads": 8, "state_size": 64, "n_groups": 1, "chunk_size": 64, "expand": 2},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}


def write_hybrid_policy(folder: Path, model_type: str, seed: int = 0) -> Path:
    """Write a random model of type `model_type` into `folder`. Equal seeds give equal weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **_SIZES, **_KINDS[model_type])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
