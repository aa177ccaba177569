"""Random policies of two sizes, with the bundled tokenizer."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from repl_rl.machine.assets import asset


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a Qwen3 policy: its width, and how many layers and attention heads it has."""

    hidden: int
    layers: int
    heads: int


SIZES = {"small": Size(128, 4, 4), "medium": Size(512, 8, 8)}
"""About 1 M and 25 M parameters."""


def write_policy(size: Size, folder: Path) -> int:
    """Write a random policy and the bundled tokenizer into `folder`. Returns its number of parameters."""
    # torch and transformers take seconds to import
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    bundled = asset("policies/quickstart")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            intermediate_size=3 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            head_dim=size.hidden // size.heads,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.float().save_pretrained(folder)
    return int(model.num_parameters())
