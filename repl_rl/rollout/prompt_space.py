"""The space after a console prompt, written by the console or by the policy with its next word.

Byte-level BPE and SentencePiece make a word and the space before it one token (` print`). A context that ends in a
lone space is then one that a pretrained model has hardly ever seen before a word. For such a vocabulary the last space
of a spliced text is withheld: the policy samples it, it is trained with the line, and it is no part of the code.
"""

from collections.abc import Callable, Sequence
from typing import Literal

PromptSpace = Literal["auto", "observed", "sampled"]
"""The writer of the space that a spliced text ends in.

`observed`: it is spliced in, as a console prints it. `sampled`: the policy writes it. `auto`: `sampled` where the
vocabulary has tokens for a word with the space before it, else `observed`.
"""

_PROMPTS = (">>>", "...")
_WORDS = ("x", "print", "for", "result", "import")
"""Typical first words of a line. Digits are left out: many vocabularies split them off every space."""
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


def joins_words(encode: Encode, decode: Decode) -> bool:
    """True where most words after a prompt are one token with the space before them."""
    joined = [not ends_at(f"\n{prompt} ", word, encode, decode) for prompt in _PROMPTS for word in _WORDS]
    return 2 * sum(joined) > len(joined)


def ends_at(text: str, following: str, encode: Encode, decode: Decode) -> bool:
    """True where a token ends with `text` when the tokenizer encodes it together with what follows."""
    ids = encode(text + following)
    return any(decode(ids[:n]) == text for n in range(len(ids), 0, -1))


def without_space(text: str) -> str:
    """`text` without the last space, where something is left of it."""
    return text[:-1] if text.endswith(" ") and len(text) > 1 else text
