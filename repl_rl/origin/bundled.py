"""Recognition of the bundled policy, and of policies trained from it."""

import json
from pathlib import Path

from repl_rl.machine.assets import asset

_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)


def is_bundled_kind(folder: Path) -> bool:
    """Return True if config.json has the bundled policy's shape and tokenizer.json its vocabulary.

    Every checkpoint of a run and every policy of `repl-rl sft` has both, in all versions. No pretrained model has this
    vocabulary, because it was made for the bundled policy (`repl_rl.coldstart.fresh`). A folder that cannot be read
    gives False.
    """
    own = _read(asset("policies/quickstart"))
    return own is not None and _read(folder) == own


def _read(folder: Path) -> object:
    """Return the shape and the vocabulary that identify the bundled policy, or None if they cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = [(token["id"], token["content"]) for token in tokenizer["added_tokens"]]
        return [config.get(name) for name in _SHAPE], tokenizer["model"]["vocab"], added
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
