"""Control tokens spelled in the text of a message: they are encoded as text, regardless of its author.

A chat template joins its own control tokens and the texts of messages to one string, in which they look alike. Before
the template is applied, a placeholder replaces each spelling in a message. Afterwards the spelling is encoded as text
in its place.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from repl_rl.errors import ConfigError
from repl_rl.rollout.chat_template import Message

Encode = Callable[[str], Sequence[int]]
"""Function that encodes text and recognises control tokens in it."""


_PRIVATE = (0xF0000, 0x100000)
"""First characters of the two private planes of Unicode, from which placeholders are taken."""
_PLANE = 0xFFFD


class Spelled:
    """Texts that were replaced. A placeholder is one private character, repeated to the length of its text.

    A template that trims, cuts, repeats or counts then treats it as it would treat the text.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        """Choose characters that no message contains.

        Raises:
            ConfigError: the messages contain characters of both private planes.
        """
        have = {ord(c) for message in messages for c in str(message.get("content")) if ord(c) >= _PRIVATE[0]}
        free = [first for first in _PRIVATE if not any(first <= c < first + _PLANE for c in have)]
        if not free:
            remedy = "its control tokens are text, and characters of both private planes are in it too; leave these out"
            raise ConfigError("message", chr(min(have)), remedy)
        self._first = free[0]
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    @property
    def texts(self) -> Sequence[str]:
        """Replaced texts, each once."""
        return tuple(self._numbers)

    def placeholder(self, text: str) -> str:
        """Return the placeholder of a text."""
        number = self._numbers.setdefault(text, len(self._numbers) % _PLANE)
        return chr(self._first + number) * len(text)

    def split(self, written: str) -> list[str]:
        """Split a text at the placeholders, and restore their texts: text, replaced, text, replaced, ..., text."""
        pieces = re.split(f"((?P<one>[{chr(self._first)}-{chr(self._first + _PLANE - 1)}])(?P=one)*)", written)
        # Each match adds two pieces, one per group of the pattern; the second one is not needed.
        del pieces[2::3]
        return [self._restored(piece) if i % 2 else piece for i, piece in enumerate(pieces)]

    def _restored(self, found: str) -> str:
        text = self.texts[ord(found[0]) - self._first]
        # The template may have cut or repeated the placeholder, so the text is cut or repeated to its length.
        return (text * (len(found) // len(text) + 1))[: len(found)]


class ControlTokens:
    """Control tokens of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def replace(self, messages: Sequence[Message], encode: Encode) -> tuple[Sequence[Message], Spelled]:
        """Replace spelled control tokens by placeholders, and return the messages with the replaced texts."""
        spelled = Spelled(messages)

        def replaced(content: str) -> str:
            if self._ids.isdisjoint(encode(content)):
                return content
            once = self._pattern.sub(lambda match: spelled.placeholder(match[0]), content)
            # Any control token left is spelled in characters that the tokenizer normalises: replace the whole content.
            return once if self._ids.isdisjoint(encode(once)) else spelled.placeholder(content)

        return _with_contents(messages, replaced), spelled

    def replace_whole(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Spelled]:
        """Replace each content by one placeholder, and return the messages with the replaced texts."""
        spelled = Spelled(messages)
        return _with_contents(
            messages, lambda text: text.replace(bare := text.strip(), spelled.placeholder(bare))
        ), spelled

    def may_join(self, messages: Sequence[Message]) -> bool:
        """Return True if a content begins or ends like part of a control token, which the template could complete."""
        contents = (text.strip() for message in messages if isinstance(text := message.get("content"), str))
        return any(self._is_partly(text) for text in contents if text)

    def _is_partly(self, text: str) -> bool:
        if len(text) < self._longest and any(text in token for token in self._texts):
            return True
        # The end of a token may begin the text, or its beginning may end the text.
        ends = range(1, min(len(text) + 1, self._longest))
        return any(text[:n] in self._suffixes or text[-n:] in self._prefixes for n in ends)

    def among(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens in `ids`, in order."""
        return [i for i in ids if i in self._ids]

    @cached_property
    def _texts(self) -> dict[str, int]:
        """Spelling of each control token, with its id."""
        added = self._tokenizer.added_tokens_decoder.items()
        named = set(self._tokenizer.all_special_ids)
        return {token.content: i for i, token in added if token.content.strip() and (token.special or i in named)}

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._texts.values())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # The pattern takes the first alternative that matches, so the longest token comes first.
        longest_first = sorted(self._texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._texts), default=0)

    @cached_property
    def _prefixes(self) -> frozenset[str]:
        return frozenset(text[:n] for text in self._texts for n in range(1, len(text)))

    @cached_property
    def _suffixes(self) -> frozenset[str]:
        return frozenset(text[-n:] for text in self._texts for n in range(1, len(text)))


def _with_contents(messages: Sequence[Message], change: Callable[[str], str]) -> Sequence[Message]:
    texts = [message.get("content") for message in messages]
    return [
        {**message, "content": change(text)} if isinstance(text, str) and text.strip() else message
        for message, text in zip(messages, texts, strict=True)
    ]
