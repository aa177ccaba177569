"""The sole owner of a tokenizer: prompts, observations and captions.

Ids are the truth and text is the caption. A prompt is encoded once; each observation is encoded alone, once, with
special tokens disabled (a program that prints `<|im_end|>` prints ten characters of text, not a control token);
sampled ids are decoded for the console and never encoded again.
"""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from repl_rl.errors import ConfigError
from repl_rl.machine.assets import asset
from repl_rl.record.console import PS1
from repl_rl.record.trajectory import Line, LineEnd, Observed, Prompt

Overshoot = Literal["forbid", "carry", "refuse"]
"""What to do with a vocabulary that has tokens with text after their last newline.

`forbid`: the policy never samples one. Its probability is 0 in the sampler and in the trainer alike, so that both have
the same, renormalised distribution; nothing else of the vocabulary is touched, and what such a token says can be
written with others. `carry`: such a token ends the line like any other that holds a newline, and the text after it
begins the next line. `refuse`: the audit is an error.
"""

TEMPLATES = ("bare", "base", "few_shot", "chat", "chat_few_shot")
"""Prompt templates: a file each in `prompts/`."""

_ANCHOR = "a"
_OBSERVED_CHARS = 65_536
_SETTLED_IDS = 16


@dataclass(frozen=True, slots=True)
class Audit:
    """What the vocabulary does with newlines and with the end of text."""

    newline_ids: frozenset[int]
    """Every id whose text contains a newline: the ids that end a line."""
    overshoot_ids: frozenset[int]
    """The part of `newline_ids` that has other text after the last newline."""
    eos_ids: frozenset[int]


class Renderer:
    """Turns tasks and console output into ids, and sampled ids into text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, overshoot: Overshoot = "forbid", source: str = "") -> None:
        """Audit the vocabulary once.

        Raises:
            ConfigError: no id contains a newline, no end or padding id is defined, or some id has text after its last
                newline and `overshoot` is "refuse", or is "forbid" and no other id holds a newline.
        """
        self.tokenizer = tokenizer
        self._source = source or str(tokenizer.name_or_path)
        self._backend = _own_backend(tokenizer)
        # By name: importing the class takes seconds, and what it wraps is not always installed.
        self._tekken = any(kind.__name__ == "MistralCommonBackend" for kind in type(tokenizer).__mro__)
        self._anchor = tuple(self._raw_encode(_ANCHOR))
        self._anchor_text = self._raw_decode(self._anchor)
        self.audit = self._audit()
        self.forbidden_ids = self.audit.overshoot_ids if overshoot == "forbid" else frozenset[int]()
        """Ids that the policy never samples, in the engine and in the trainer."""
        if self.forbidden_ids >= self.audit.newline_ids:
            remedy = "no line could end without them; use --overshoot carry"
            raise ConfigError(f"vocabulary of {self._source}, forbidden ids", len(self.forbidden_ids), remedy)
        if self.audit.overshoot_ids and overshoot == "refuse":
            examples = [self.decode((i,)) for i in sorted(self.audit.overshoot_ids)[:3]]
            raise ConfigError(
                f"vocabulary of {self._source}, ids with text after a newline ({len(self.audit.overshoot_ids)})",
                examples,
                "use --overshoot forbid, with which the policy never samples one, or carry; or another tokenizer",
            )
        self._encode_cached = lru_cache(maxsize=65_536)(self._encode)

    @classmethod
    def from_folder(cls, folder: str | Path, overshoot: Overshoot = "forbid") -> "Renderer":
        """Load the tokenizer of a model folder (or of a hub name that is already cached).

        Raises:
            ConfigError: there is no usable tokenizer, or its vocabulary is refused by the audit.
        """
        place = Path(folder)
        tekken, usual = (place / "tekken.json").is_file(), any(place.glob("tokenizer*"))
        if place.is_dir() and not tekken and not usual:
            raise ConfigError("model folder without tokenizer", str(folder), "save the tokenizer beside the weights")
        if tekken and not usual and find_spec("mistral_common") is None:
            raise ConfigError("tokenizer folder", str(folder), "tekken.json needs `pip install mistral-common`")
        # Where both formats are there, transformers would choose by what is installed.
        choice = {"mistral_format": not usual} if tekken else {}
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **choice)
        except (OSError, ValueError) as error:
            raise ConfigError("tokenizer folder", str(folder), f"it cannot be loaded: {error}") from error
        return cls(tokenizer, overshoot, str(folder))

    @property
    def newline_ids(self) -> frozenset[int]:
        return self.audit.newline_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.audit.eos_ids

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a line: every id with a newline, and the end tokens."""
        return self.audit.newline_ids | self.audit.eos_ids

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self.eos_ids)

    def prompt(self, question: str, template: str = "base", version: str = "3") -> Prompt:
        """The prompt of a task, up to and including the first console prompt.

        `template` is one of `TEMPLATES`: `chat` and `chat_few_shot` are the model's chat template with that system
        text, then the banner as the beginning of the assistant's text; the others are plain text.

        Raises:
            ConfigError: there is no such template, or the model has no chat template.
        """
        if template not in TEMPLATES:
            raise ConfigError("prompt", template, f"choose one of {', '.join(TEMPLATES)}")
        banner = asset("prompts/banner.txt").read_text().replace("{version}", version)
        written = asset(f"prompts/{template}.txt").read_text()
        if template in ("chat", "chat_few_shot"):
            return self._chat_prompt(question, written, banner + PS1)
        text = written.replace("{banner}", banner).replace("{question}", question)
        return Prompt(text, self.encode(text))

    def _chat_prompt(self, question: str, system: str, prefill: str) -> Prompt:
        if not self.tokenizer.chat_template and not self._tekken:
            raise ConfigError(f"chat template of {self._source}", None, "use --prompt base for a base model")
        messages = [
            {"role": "system", "content": system.strip()},
            {"role": "user", "content": question},
        ]
        if self._tekken:  # its template gives ids: text could not say which tokens control
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            return Prompt(self.decode(ids) + prefill, (*ids, *self.encode(prefill)))
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        head = self.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(text + prefill, (*head, *self.encode(prefill)))

    def watch(self, until: str | re.Pattern[str]) -> Callable[[int], bool]:
        """A function that is given sampled ids one by one, and says whether their text so far matches `until`.

        Only the newest ids are decoded again, since the last of them may hold part of a character.
        """
        pattern = re.compile(until)
        settled, recent = "", list[int]()

        def matches(token: int) -> bool:
            nonlocal settled
            recent.append(token)
            text = self.decode(recent)
            found = pattern.search(settled + text) is not None
            if len(recent) >= _SETTLED_IDS and not text.endswith("\ufffd"):
                settled += text
                recent.clear()
            return found

        return matches

    def observation(self, text: str, max_tokens: int | None = None) -> Observed:
        """Encode what a console printed, alone. Beyond `max_tokens` the middle gives way to a visible marker.

        So does the middle of more than 65,536 characters, before anything is encoded: rollouts share one thread.
        """
        cut = len(text) > _OBSERVED_CHARS
        if cut:
            half, left_out = _OBSERVED_CHARS // 2, len(text) - _OBSERVED_CHARS
            text = f"{text[:half]}\n[... {left_out} characters cut ...]\n{text[-half:]}"
        ids = self.encode(text)
        if max_tokens is None or len(ids) <= max_tokens:
            # Some vocabularies have no id for some control characters: what has no token is not shown.
            return Observed(text if ids else "", ids, cut)
        marker = f"\n[... {len(ids) - max_tokens} tokens cut ...]\n"
        head, tail = ids[: max_tokens // 2], ids[len(ids) - (max_tokens - max_tokens // 2) :]
        return Observed(self.decode(head) + marker + self.decode(tail), (*head, *self.encode(marker), *tail), cut=True)

    def line(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], end: LineEnd) -> Line:
        """What the policy sampled, as a line; `end` is what stopped it, unless its last id is an end token."""
        if token_ids[-1] in self.eos_ids:
            return Line(token_ids, logprobs, self.decode(token_ids[:-1]), LineEnd.EOS)
        return Line(token_ids, logprobs, self.decode(token_ids), end)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` alone: no special token is added, none is recognised."""
        return self._encode_cached(text)

    def written(self, text: str) -> tuple[int, ...]:
        """Ids of `text` as the policy could have sampled it: as `encode`, but no id is forbidden.

        Where one would be, each physical line is encoded alone.
        """
        ids = self.encode(text)
        if self.forbidden_ids.isdisjoint(ids):
            return ids
        return tuple(i for line in re.findall(r"[^\n]*\n|[^\n]+", text) for i in self.encode(line))

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text of `ids` in the middle of a sequence: leading spaces and special tokens are kept."""
        text = self._raw_decode((*self._anchor, *ids))
        return text.removeprefix(self._anchor_text)

    def _encode(self, text: str) -> tuple[int, ...]:
        # A console may print lone surrogates, which no tokenizer takes.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        if not text:
            return ()
        ids = tuple(self._raw_encode(text))
        if self.decode(ids) == text:
            return ids
        # Sentencepiece-style tokenizers put a space before the first word: encode after an anchor, drop the anchor.
        anchored = tuple(self._raw_encode(_ANCHOR + "\n" + text))
        anchor = tuple(self._raw_encode(_ANCHOR + "\n"))
        if anchored[: len(anchor)] == anchor and self.decode(anchored[len(anchor) :]) == text:
            return anchored[len(anchor) :]
        return ids

    def _raw_encode(self, text: str) -> list[int]:
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=False).ids
        as_text = {} if self._tekken else {"split_special_tokens": True}  # Tekken recognises none in text anyway
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, **as_text)["input_ids"]
        return ids

    def _raw_decode(self, ids: Sequence[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=False)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _audit(self) -> Audit:
        tokenizer = self.tokenizer
        newline, overshoot = set(), set()
        size = len(tokenizer)
        texts = tokenizer.batch_decode(
            [[*self._anchor, i] for i in range(size)], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        for i, text in enumerate(texts):
            if "\n" in text:
                newline.add(i)
                if not text.endswith("\n"):
                    overshoot.add(i)
        if not newline:
            raise ConfigError(f"vocabulary of {self._source}", "without a newline", "no line can end; use another")
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"eos_token of {self._source}", None, "name one in tokenizer_config.json")
        return Audit(frozenset(newline), frozenset(overshoot), frozenset({int(tokenizer.eos_token_id)}))


def _own_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """A copy of what does the work in a fast tokenizer; None: `tokenizer` is written in Python.

    Around a line's few ids the wrapper takes three times as long as the work. It also leaves its last caller's
    truncation and padding behind in what it shares with everybody; nobody else has this copy.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    backend: Tokenizer = deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # as text: a program that prints a control token prints characters
    return backend
