"""Tiny tokenizers with different newline habits, trained here."""

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = [
    "for i in range(10):\n    print(i)\n\nsubmit_final_answer(3)\n>>> x = 1\n160\n>>> ",
    "if x:\n    y\n\ndef f(x):\n    return x\n\nf(3)\nx = [1, 2]\nlen('abc')\n",
] * 20


def merged_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose tokens merge text before a newline and several newlines (`)\\n`, `\\n\\n`)."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"[^\s\w]+\n*|\s*\n+|\w+| "), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_])
    return _byte_level(tokenizer, 400)


def overshooting_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges across newlines, so tokens have text after their newline."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(tokenizer, 500)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Metaspace pieces with byte fallback: a newline is `<0x0A>`, and a first word carries a space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    text = [line.replace("\n", " ") for line in _CORPUS]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=450, special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<s>", unk_token="<unk>", name_or_path="sentencepiece"
    )


def _byte_level(tokenizer: Tokenizer, size: int) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>", "<|pad|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", name_or_path="byte-level"
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "merged": merged_tokenizer,
    "overshooting": overshooting_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
}
