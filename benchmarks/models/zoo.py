"""A zoo of tiny random models: one of every family that transformers and vLLM share and this machine can build.

All speak the vocabulary of the bundled policy, so that the bundled tasks can be played. Equal seeds give equal weights.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from repl_rl.utils.package_data import find_asset

VOCABULARY, EOS, PAD = 362, 360, 361
"""Those of the bundled policy's tokenizer."""
CONTEXT = 512

Settings = Mapping[str, object]
SIZES: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
WINDOW = 24
"""Of families with sliding windows: shorter than a rollout, so that ignoring it shows."""
MIXED = ["sliding_attention", "full_attention"]
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: Settings = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR: Settings = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
SCAN: Settings = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A tiny model of a family, as its checkpoints are published."""

    name: str
    model_type: str
    settings: Settings
    vision: Settings | None = None
    """Settings of the vision tower of a composite model; None: text only."""
    finish: Callable[[Path], None] | None = None
    """What published folders of it have besides."""

    def write(self, folder: Path, seed: int = 0) -> Path:
        """Write weights, configuration and the bundled policy's tokenizer into `folder`."""
        disable_progress_bar()
        torch.manual_seed(seed)
        auto = AutoModelForCausalLM if self.vision is None else AutoModelForImageTextToText
        auto.from_config(self.config(), dtype=torch.float32).save_pretrained(folder)
        for file in find_asset("policies/quickstart").glob("tokenizer*"):
            shutil.copy(file, folder)
        if self.finish is not None:
            self.finish(folder)
        return folder

    def config(self) -> PretrainedConfig:
        """Its configuration."""
        text = {**SIZES, **self.settings}
        if self.vision is None:
            return AutoConfig.for_model(self.model_type, **text)
        ends = {name: text[name] for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")}
        return AutoConfig.for_model(self.model_type, text_config=text, vision_config=dict(self.vision), **ends)


def _with_its_head(folder: Path) -> None:
    """Store the tied output layer too, as some published checkpoints do."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _with_consolidated(folder: Path) -> None:
    """Lay the same weights beside the shards under other names, as Mistral's published checkpoints do."""
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): weight for name, weight in weights.items()}
    _in_shards(folder)
    save_file(renamed, folder / "consolidated.safetensors", metadata={"format": "pt"})


def _in_shards(folder: Path) -> None:
    """Store it in several files, as large models are."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")


TIED: Settings = {"tie_word_embeddings": True}
ZOO: tuple[Family, ...] = (
    Family("Llama", "llama", {}, finish=_in_shards),
    Family("Llama, tied", "llama", TIED),
    Family("Qwen2", "qwen2", {}),
    Family("Qwen2.5, tied", "qwen2", TIED),
    Family("Qwen3, tied, head stored", "qwen3", TIED, finish=_with_its_head),
    Family("Qwen3-MoE", "qwen3_moe", EXPERTS),
    Family("Qwen3-Next", "qwen3_next", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32}),
    Family("Qwen3.5, text", "qwen3_5_text", LINEAR),
    Family(
        "Qwen3.5, composite",
        "qwen3_5",
        {**LINEAR, **TIED},
        vision={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    Family("Mistral, windows", "mistral", {"sliding_window": WINDOW}, finish=_with_consolidated),
    Family("Mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family(
        "Gemma 2",
        "gemma2",
        {
            **TIED,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    Family("Gemma 3, text", "gemma3_text", {**TIED, "sliding_window": WINDOW, "layer_types": MIXED}),
    Family(
        "Gemma 3, composite",
        "gemma3",
        {**TIED, "sliding_window": WINDOW, "layer_types": MIXED},
        vision={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    Family("Phi-3", "phi3", {"sliding_window": WINDOW}),
    Family("OLMo 2", "olmo2", {}),
    Family("OLMoE", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("SmolLM3", "smollm3", {**TIED, "no_rope_layers": [1, 0]}),
    Family(
        "gpt-oss",
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    Family("GLM-4", "glm4", {}),
    Family(
        "GLM-4.5",
        "glm4_moe",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Family("Granite", "granite", {"logits_scaling": 4.0}),
    Family(
        "Granite hybrid",
        "granitemoehybrid",
        {
            **SCAN,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "logits_scaling": 4.0,
        },
    ),
    Family("Cohere", "cohere", {**TIED, "logit_scale": 0.25}),
    Family("DeepSeek-V2", "deepseek_v2", LATENT),
    Family("DeepSeek-V3", "deepseek_v3", {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    Family("Falcon-H1", "falcon_h1", {**SCAN, "lm_head_multiplier": 0.5}),
    Family(
        "Mamba 2",
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    ),
    Family(
        "LFM2",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "block_dim": 64,
            "block_ff_dim": 128,
            "conv_dim": 64,
            "conv_dim_out": 64,
        },
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-",
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    Family(
        "Jamba",
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
)
"""Every family, in the order of the table."""
