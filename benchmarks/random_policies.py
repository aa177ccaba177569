"""Random policies of two sizes, with the bundled tokenizer."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from repl_rl.utils.package_data import find_asset


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of a Qwen3 policy: width, layers and attention heads."""

    hidden: int
    layers: int
    heads: int


SIZES = {"small": Size(128, 4, 4), "medium": Size(512, 8, 8)}
"""Sizes with about 1 M and 25 M parameters."""


def write_policy(size: Size, folder: Path) -> int:
    """Write a random policy and the bundled tokenizer into `folder`. Return its number of parameters."""
    # torch and transformers take seconds to import.
    from transformers import AutoTokenizer

    from repl_rl.sft.create_random_model import make_random_policy

    bundled = find_asset("policies/quickstart")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.pad_token_id, tokenizer.eos_token_id
    model = make_random_policy(len(tokenizer), *ids, hidden=size.hidden, layers=size.layers, heads=size.heads)
    model.save_pretrained(folder)
    return int(model.num_parameters())
