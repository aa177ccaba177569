"""Policy with random weights and its own tokenizer, for a cold start.

The tokenizer is byte-level BPE with about 384 ids, some of which merge text with a newline. It first cuts text into
pieces. A piece of the vocabulary is one token; any other piece gives one token per byte. So `submit_final_answer` and
`>>> ` are one token each. Digits and the letters of a quoted word are single tokens, because a tiny policy copies them
one by one. The token that ends a line often holds more than its newline: `)`, `')` and `:` merge with it. Two newlines
merge too, since the second newline is a blank line. No token has text after its last newline.
"""

import json
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from repl_rl.rollout.token_renderer import Renderer

EOS = "<|endoftext|>"
PAD = "<|pad|>"
CONTEXT_TOKENS = 1024
"""Default context length of a random policy, tokens."""

_LINE_ENDS = ("')\n", "])\n", "()\n", "):\n", ")\n", "]\n", "'\n", ":\n", "\n\n")
_PHRASES = (
    *(">>> ", "... ", "    ", "Traceback (most recent call last):\n", '  File "<stdin>", line ', ", in <module>\n"),
    *(" = ", " + ", " - ", " * ", " > ", " < ", " += ", ", ", " '", "('", ", '", "()", "[::-1]"),
)
_CODE_WORDS = """
    submit_final_answer print len sum max min sorted int str list range count upper lower replace reverse join
    result total for if else True False None SyntaxError NameError TypeError AttributeError ValueError IndexError
    Compute Let Reverse Count Find Sort Join In Take If compute else then
"""
_SPACED_WORDS = """
    and in of the by it is not word letter list upper case replace reverse length times plus sum max
    compute object has no attribute name defined invalid syntax unmatched type str int
"""
_PIECES = (*_LINE_ENDS, *_PHRASES, *_CODE_WORDS.split(), *(f" {word}" for word in _SPACED_WORDS.split()))
"""All texts of more than one byte that are one token."""


def write_random_policy(folder: Path, seed: int) -> None:
    """Write a tokenizer, a configuration and random weights into `folder`.

    The policy has the architecture of Qwen3 and 0.89 M parameters. Equal seeds give equal weights with the same torch.
    """
    disable_progress_bar()
    make_tokenizer(folder)
    renderer = Renderer.from_folder(folder)
    vocab, eos = len(renderer.tokenizer), renderer.end_id
    make_random_policy(vocab, renderer.pad_id, eos, seed=seed).save_pretrained(folder)


def make_random_policy(
    vocab: int,
    pad_id: int,
    eos_id: int,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    context_tokens: int = CONTEXT_TOKENS,
    seed: int = 0,
) -> PreTrainedModel:
    """Build a float32 Qwen3 with random weights, an untied output layer, and half as many key-value heads as heads.

    Equal arguments give equal weights with the same torch.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def make_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, loadable by `transformers.AutoTokenizer`, into `folder`.

    Nothing is random: the same version of this file writes the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Without merges, a piece is one token if the vocabulary has it, and bytes otherwise.
    tokenizer = Tokenizer(BPE(vocab=_build_vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_build_split_pattern()), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([EOS, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _build_vocabulary() -> dict[str, int]:
    """Return the ids of all tokens but the special ones, in the byte-level alphabet."""
    alphabet = sorted(ByteLevel.alphabet())
    # The byte alphabet comes first, so every text has a tokenization.
    pieces = ["".join(_BYTE_TO_CHAR[byte] for byte in piece.encode()) for piece in _PIECES]
    return {token: i for i, token in enumerate(dict.fromkeys((*alphabet, *pieces)))}


def _map_bytes_to_characters() -> dict[int, str]:
    """Return the byte-level alphabet: printable bytes map to themselves, the others to characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in table)}
    return table


_BYTE_TO_CHAR = _map_bytes_to_characters()


def _build_split_pattern() -> str:
    """Return the pattern that cuts text into the longest known pieces, whole words and single characters."""
    # Alternatives are tried in order, so longer pieces come first.
    pieces = sorted(_PIECES, key=len, reverse=True)
    return "|".join((*map(_build_piece_pattern, pieces), r"[\s\S]"))


def _build_piece_pattern(piece: str) -> str:
    """Return the pattern that matches a piece where it is one token."""
    escaped = re.escape(piece)
    # A word is one token only if no letter or digit adjoins it.
    if piece.strip().isidentifier():
        return rf"(?<![A-Za-z0-9_]){escaped}(?![A-Za-z0-9_])" if piece[0] != " " else rf"{escaped}(?![A-Za-z0-9_])"
    # Before a blank line the two newlines are one token, so the character before them is a separate one.
    return rf"{escaped}(?!\n)" if piece.endswith("\n") and piece != "\n\n" else escaped
