"""A policy with random weights: what a cold start begins from."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from repl_rl.coldstart.vocabulary import CONTEXT_TOKENS, make_tokenizer
from repl_rl.rollout.renderer import Renderer


def write_fresh_policy(folder: Path, seed: int) -> None:
    """Write a tokenizer (see `vocabulary`), a configuration and random weights into `folder`.

    The policy has the shape of Qwen3 and 0.89 M parameters. Equal seeds give equal weights where torch is the same.
    """
    disable_progress_bar()
    make_tokenizer(folder)
    _policy(Renderer.from_folder(folder), seed).save_pretrained(folder)


def _policy(renderer: Renderer, seed: int) -> PreTrainedModel:
    """Embeddings are untied, see docs/design.md."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(renderer.tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=min(renderer.eos_ids),
        pad_token_id=renderer.pad_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)
