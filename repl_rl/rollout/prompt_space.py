"""Space after a console prompt, written by the console or by the policy with its next word.

Byte-level BPE and SentencePiece encode a word and the space before it as one token (` print`). A pretrained model has
hardly ever seen a word after a context that ends in a lone space. For such a vocabulary, the renderer withholds the
last space of a spliced text. The policy samples this space, and it is trained with the line. It is not part of the
code.
"""

from collections.abc import Callable, Sequence
from typing import Literal

PromptSpace = Literal["auto", "observed", "sampled"]
"""Writer of the space that ends a spliced text.

`observed`: the console, which splices it in. `sampled`: the policy. `auto`: `sampled` if the vocabulary has tokens for
a word with the space before it, else `observed`.
"""

_PROMPTS = (">>>", "...")
_WORDS = ("x", "print", "for", "result", "import")
"""Typical first words of a line. Digits are left out, because many vocabularies split them from every space."""
Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


def joins_words(encode: Encode, decode: Decode) -> bool:
    """Return True if most words after a prompt form one token with the space before them."""
    joined = [not ends_at(f"\n{prompt} ", word, encode, decode) for prompt in _PROMPTS for word in _WORDS]
    return 2 * sum(joined) > len(joined)


def ends_at(text: str, following: str, encode: Encode, decode: Decode) -> bool:
    """Return True if a token ends exactly with `text` when the tokenizer encodes it together with `following`."""
    ids = encode(text + following)
    return any(decode(ids[:n]) == text for n in range(len(ids), 0, -1))


def without_space(text: str) -> str:
    """Return `text` without its last space, unless the space is all of it."""
    return text[:-1] if text.endswith(" ") and len(text) > 1 else text
