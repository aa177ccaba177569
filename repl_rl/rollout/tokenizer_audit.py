"""Audit of a vocabulary: newline ids and end tokens."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from repl_rl.errors import ConfigError

_END_TOKEN_FILES = ("generation_config.json", "config.json")
"""Files of a model folder that name end tokens in addition to the tokenizer's."""


@dataclass(frozen=True, slots=True)
class VocabularyAudit:
    """Newline ids and end tokens of a vocabulary."""

    newline_ids: frozenset[int]
    """Every id whose text contains a newline: the ids that end a line."""
    overshoot_ids: frozenset[int]
    """Part of `newline_ids` with other text after the last newline."""
    eos_ids: frozenset[int]
    """Every id that ends a turn or a text."""


def audit_vocabulary(
    tokenizer: PreTrainedTokenizerBase, anchor: Sequence[int], source: str, extra_ends: Collection[int] = ()
) -> VocabularyAudit:
    """Check every id once.

    Args:
        tokenizer: owner of the vocabulary.
        anchor: ids before each decoded id, because some tokenizers drop a first space.
        source: name of the vocabulary in error messages.
        extra_ends: end tokens in addition to the tokenizer's; ids outside the vocabulary are left out.

    Raises:
        ConfigError: no id contains a newline, or no end token is named.
    """
    newline, overshoot = set(), set()
    # One batch call decodes the whole vocabulary.
    texts = tokenizer.batch_decode(
        [[*anchor, i] for i in range(len(tokenizer))], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    for i, text in enumerate(texts):
        if "\n" in text:
            newline.add(i)
            if not text.endswith("\n"):
                overshoot.add(i)
    if not newline:
        raise ConfigError(f"vocabulary of {source}", "without a newline", "no line can end; use another")
    # A model folder may name ids that its tokenizer does not have.
    ends = {i for i in extra_ends if 0 <= i < len(texts)}
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    if not ends:
        raise ConfigError(f"eos_token of {source}", None, "name one in tokenizer_config.json")
    return VocabularyAudit(frozenset(newline), frozenset(overshoot), frozenset(ends))


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Return the end tokens that a model folder names in addition to the tokenizer's.

    A file names an id or a list of ids, at its top level or in its `text_config`.

    Raises:
        ConfigError: a file that could name some is not JSON.
    """
    tables = (_read_json_table(folder / name) for name in _END_TOKEN_FILES)
    parts = [part for table in tables for part in (table, table.get("text_config")) if isinstance(part, Mapping)]
    return frozenset(i for part in parts for i in _get_token_ids(part.get("eos_token_id")))


def check_embedded_ids(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Check that the model in `folder` has an embedding for every ordinary id of its tokenizer.

    Added tokens may have larger ids: Gemma 3 has one that only its larger variants embed. A config.json without a
    `vocab_size` is not checked.

    Raises:
        ConfigError: an ordinary id has no embedding.
    """
    # A model with several modalities has the size of its text vocabulary in `text_config`.
    config = _read_json_table(folder / "config.json")
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("vocab_size")
    # The backend of Mistral's own tokenizer files has no added tokens.
    added = getattr(tokenizer, "added_tokens_encoder", {})
    largest = max((i for token, i in tokenizer.get_vocab().items() if token not in added), default=-1)
    if isinstance(size, int) and largest >= size:
        remedy = f"its config.json has a vocab_size of {size}; save the tokenizer that belongs to these weights"
        raise ConfigError(f"tokenizer of {folder}, largest id", largest, remedy)


def _read_json_table(file: Path) -> Mapping[str, object]:
    """Return the table in a JSON file, or an empty one if the file is missing or holds something else."""
    if not file.is_file():
        return {}
    try:
        content: object = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError("file of the model", str(file), f"it is not JSON: {error}") from error
    return content if isinstance(content, Mapping) else {}


def _get_token_ids(value: object) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
