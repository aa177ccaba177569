"""Renderer: sole owner of the tokenizer, for prompts, observations and captions.

Ids are the source of truth, and text is a caption of them. A prompt is encoded once. Each observation is encoded alone
and once, without special tokens: a program that prints `<|im_end|>` prints ten characters of text. Sampled ids are
decoded for the console and never encoded again.

The policy may sample the space after a prompt (see `joins_words`). Captions still look like the console: the space
belongs to the prompt's text, though its id belongs to the line. Control tokens that a message spells are encoded as
text (see `ControlTokens`).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from repl_rl.deprecations import keeps_old_names
from repl_rl.engine.base import Chunk, ChunkEnd
from repl_rl.errors import ConfigError
from repl_rl.models.describe_load_error import describe_load_error
from repl_rl.rollout.chat_template import ChatTemplate, Message
from repl_rl.rollout.prompts import (
    BANNER,
    QUESTION,
    TEMPLATES,
    VERSION,
    WORKSPACE,
    FewShotExample,
    FilledTemplate,
    PromptTemplate,
    is_recorded_template,
    read_template,
)
from repl_rl.rollout.tokenizer_audit import audit_vocabulary, check_embedded_ids, read_end_tokens
from repl_rl.settings.toml_values import Scalar
from repl_rl.trajectory.console_text import PS1, PS2
from repl_rl.trajectory.trajectory import Line, LineEnd, Observed, Prompt

Encode = Callable[[str], Sequence[int]]
"""Function that encodes text alone, without control tokens."""
Decode = Callable[[Sequence[int]], str]
"""Function that returns the exact text of ids."""

EncodeWithControlTokens = Callable[[str], Sequence[int]]
"""Function that encodes text and recognises control tokens in it."""

Overshoot = Literal["forbid", "carry", "refuse"]
"""Treatment of tokens with text after their last newline.

`forbid`: the policy never samples one. Its probability is 0 in the sampler and in the trainer, so that both have the
same renormalised distribution. The rest of the vocabulary does not change, and other tokens can write the same text.
`carry`: such a token ends the line like any other with a newline, and the text after it begins the next line. `refuse`:
the audit raises an error.
"""

PromptSpace = Literal["auto", "observed", "sampled"]
"""Writer of the space that ends a spliced text.

`observed`: the console, which splices it in. `sampled`: the policy. `auto`: `sampled` if the vocabulary has tokens for
a word with the space before it, else `observed`.
"""

_ENDS = {ChunkEnd.STOP_ID: LineEnd.NEWLINE, ChunkEnd.WATCH: LineEnd.MATCH, ChunkEnd.LENGTH: LineEnd.LENGTH}
"""End of a line by the end of its chunk, unless the last id is an end token."""
_ANCHOR = "a"
"""Text before everything that is decoded, because some tokenizers drop a space at the beginning."""
_MAX_OBSERVED_CHARS = 65_536
"""Length limit of an observation before it is encoded, characters."""
_MAX_RECENT_IDS = 16
"""Number of newest ids that a watch decodes again for each new id. Of older ids, only the text is kept."""
_MAX_CACHED_CHARS = 4096
"""Length limit of cached texts, characters. Longer texts rarely recur, and thousands of them would fill the memory."""

_PROMPTS = (">>>", "...")
"""Console prompts, without the space after them."""
_FIRST_WORDS = ("x", "print", "for", "result", "import")
"""Typical first words of a line. Digits are left out, because many vocabularies split them from every space."""

_PRIVATE_PLANES = (0xF0000, 0x100000)
"""First characters of the two private planes of Unicode, from which placeholders are taken."""
_PLANE_CHARS = 0xFFFD
"""Number of characters that are taken from each plane."""


@keeps_old_names
class Renderer:
    """Converter between text and ids: it encodes prompts and console output, and decodes sampled ids."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        overshoot: Overshoot = "forbid",
        source: str = "",
        *,
        ends: Collection[int] = (),
        chat: Mapping[str, Scalar] | None = None,
        bos: bool = True,
        prompt_space: PromptSpace = "auto",
        now: datetime | None = None,
    ) -> None:
        """Audit the vocabulary once.

        Args:
            tokenizer: tokenizer for all later calls.
            overshoot: treatment of ids with text after their last newline.
            source: name of the model in messages; "" means the tokenizer's name.
            ends: end tokens in addition to the tokenizer's.
            chat: arguments of the chat template.
            bos: begin plain prompts with the tokens that the tokenizer puts before a text (BOS).
            prompt_space: writer of the space after a prompt.
            now: date and time that the chat template reads; None means the current time.

        Raises:
            ConfigError: no id contains a newline, or no end token is defined. Or some id has text after its last
                newline and `overshoot` is "refuse", or is "forbid" and no other id holds a newline. Or the chat
                template does not read one of its arguments.
        """
        self.tokenizer = tokenizer
        self._source = source or str(tokenizer.name_or_path)
        self._backend = _copy_backend(tokenizer)
        # Compare the name: importing the class takes seconds, and the package behind it is not always installed.
        self._tekken = any(kind.__name__ == "MistralCommonBackend" for kind in type(tokenizer).__mro__)
        # Everything is decoded after an anchor, see `_ANCHOR`.
        self._anchor = tuple(self._raw_encode(_ANCHOR))
        self._anchor_text = self._raw_decode(self._anchor)
        self._bos = self._find_bos_ids() if bos else ()
        try:
            self.audit = audit_vocabulary(tokenizer, self._anchor, self._source, ends)
        except _get_panic_types() as error:
            raise self._make_error("decode", error) from error
        self.chat_template = ChatTemplate(tokenizer, self._source, chat or {}, gives_ids=self._tekken, now=now)
        """Chat template of the model."""
        self._controls = ControlTokens(tokenizer)
        self.forbidden_ids = self.audit.overshoot_ids if overshoot == "forbid" else frozenset[int]()
        """Ids that the policy never samples, in the engine and in the trainer."""
        if self.forbidden_ids >= self.audit.newline_ids:
            remedy = "no line could end without them; use --newline-tokens carry"
            raise ConfigError(f"vocabulary of {self._source}, forbidden ids", len(self.forbidden_ids), remedy)
        if self.audit.overshoot_ids and overshoot == "refuse":
            examples = [self.decode((i,)) for i in sorted(self.audit.overshoot_ids)[:3]]
            raise ConfigError(
                f"vocabulary of {self._source}, ids with text after a newline ({len(self.audit.overshoot_ids)})",
                examples,
                "use --newline-tokens forbid, with which the policy never samples one, or carry; or another tokenizer",
            )
        self._templates: dict[str, PromptTemplate] = {}
        self._encode_cached = lru_cache(maxsize=65_536)(self._encode)
        samples_space = joins_words(self._encode, self.decode) if prompt_space == "auto" else prompt_space == "sampled"
        self._ends_in_space = lru_cache(maxsize=1024)(lambda token: self.decode((token,)).endswith(" "))
        self.samples_space = samples_space
        """True if the policy writes the space that ends a prompt."""

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        overshoot: Overshoot = "forbid",
        chat: Mapping[str, Scalar] | None = None,
        *,
        bos: bool = True,
        prompt_space: PromptSpace = "auto",
        now: datetime | None = None,
    ) -> "Renderer":
        """Load the tokenizer of a model folder, or of a cached hub name, with all its end tokens.

        Raises:
            ConfigError: no usable tokenizer exists, the model has no embedding for some of its ids, or its vocabulary
                or an argument of `chat` is refused.
        """
        path = Path(folder)
        has_tekken, has_tokenizer_files = (path / "tekken.json").is_file(), any(path.glob("tokenizer*"))
        if path.is_dir() and not has_tekken and not has_tokenizer_files:
            raise ConfigError("model folder without tokenizer", str(folder), "save the tokenizer next to the weights")
        if has_tekken and not has_tokenizer_files and find_spec("mistral_common") is None:
            raise ConfigError("tokenizer folder", str(folder), "tekken.json needs `pip install mistral-common`")
        # If both formats exist, transformers would choose by the installed packages.
        choice = {"mistral_format": not has_tokenizer_files} if has_tekken else {}
        # Load the class late: it imports torch, and wrong settings are reported without that wait.
        load = transformers.AutoTokenizer
        try:
            tokenizer = load.from_pretrained(str(folder), trust_remote_code=False, **choice)
        # A parser may raise anything for foreign bytes.
        except _get_panic_types(Exception) as error:
            raise ConfigError(
                "tokenizer folder", str(folder), f"it cannot be loaded: {describe_load_error(error)}"
            ) from error
        check_embedded_ids(tokenizer, path)
        ends = read_end_tokens(path)
        return cls(tokenizer, overshoot, str(folder), ends=ends, chat=chat, bos=bos, prompt_space=prompt_space, now=now)

    @property
    def findings(self) -> str:
        """One-line summary of the audit."""
        writer = "the policy" if self.samples_space else "the console"
        return (
            f"vocabulary: {len(self.newline_ids)} tokens contain a newline, {len(self.forbidden_ids)} are never "
            f"sampled, {len(self.eos_ids)} end a rollout; {writer} writes the space after {PS1.rstrip()}"
        )

    @property
    def newline_ids(self) -> frozenset[int]:
        """Every id whose text contains a newline."""
        return self.audit.newline_ids

    @property
    def eos_ids(self) -> frozenset[int]:
        """End tokens, of which at least one exists."""
        return self.audit.eos_ids

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a line: every id with a newline, and the end tokens."""
        return self.audit.newline_ids | self.audit.eos_ids

    @property
    def pad_id(self) -> int:
        """Id that pads rows and is always masked: the tokenizer's padding id, or the end token."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if pad is not None else self.end_id

    @property
    def end_id(self) -> int:
        """Main end token: the tokenizer's own if it names one, else the smallest id."""
        own = self.tokenizer.eos_token_id
        return int(own) if own is not None else min(self.eos_ids)

    def build_prompt(
        self, question: str, template: str = "base", version: str = "3", console: bool = True, told: str = ""
    ) -> Prompt:
        """Build the prompt of a task, up to and including the first console prompt.

        Args:
            question: question of the task.
            template: shipped template or a text of the user, see `read_template`. It is plain text, or a system
                message for the model's chat template.
            version: Python version that the banner shows.
            console: include the beginning of the console, which is assistant text in a chat.
            told: description of the task's workspace.

        Raises:
            ConfigError: the template does not exist, or the model has no chat template.
        """
        # A template without a system message is plain text; otherwise the chat template formats the question.
        filled = self.fill_template(template, question, version, told)
        prefill = filled.console if console else ""
        if filled.system is None:
            return self.build_plain_prompt(filled.head + prefill)
        prompt = self.build_question_prompt(filled.system, filled.question, filled.examples)
        return Prompt(prompt.text + prefill, (*prompt.token_ids, *self.encode_splice(prefill)))

    def preload_template(self, template: str) -> None:
        """Read a shipped template now. Any other one is read when a prompt first needs it, and then raises its errors.

        A template as a run records it is read once.
        """
        if template in TEMPLATES:
            self._get_template(template)

    def _get_template(self, template: str) -> PromptTemplate:
        found = self._templates.get(template)
        if found is None:
            found = read_template(template)
            if is_recorded_template(template):
                self._templates[template] = found
        return found

    def fill_template(self, template: str, question: str, version: str, workspace_text: str = "") -> FilledTemplate:
        """Fill in a template (see `read_template`) for a question, in the console of Python `version`.

        Raises:
            ConfigError: the template does not exist, or its turns do not alternate.
        """
        found = self._get_template(template)
        if workspace_text and not found.has_workspace:
            question = f"{question} {workspace_text}"
        banner = found.banner.replace(VERSION, version)
        console = found.console.replace(BANNER, banner)
        if found.system is not None:
            system = found.system.replace(WORKSPACE, workspace_text)
            return FilledTemplate(system, "", console, question, found.examples)
        # The question comes last, so that no placeholder in it is filled in.
        head = found.head.replace(BANNER, banner).replace(WORKSPACE, workspace_text).replace(QUESTION, question)
        return FilledTemplate(None, head, console, question)

    def build_plain_prompt(self, text: str) -> Prompt:
        """Build a prompt from `text`, without a chat template.

        It begins with the tokenizer's BOS, if the tokenizer writes one, and never has its end token.
        """
        if not self._bos:
            return Prompt(text, self.encode_splice(text))
        body = self._strip_withheld_space(text)
        ids = (*self._bos, *self._encode_first(body))
        return Prompt(self.decode(ids) + text[len(body) :], ids)

    def build_prompt_from_ids(self, token_ids: Sequence[int]) -> Prompt:
        """Build a prompt from ids.

        If the policy samples the space after a console prompt, the prompt's text includes that space, but its ids do
        not.
        """
        text = self.decode(token_ids)
        space_withheld = self.samples_space and text.endswith((PS1.rstrip(), PS2.rstrip()))
        return Prompt(f"{text} " if space_withheld else text, tuple(token_ids))

    def build_question_prompt(self, system: str, question: str, examples: Sequence[FewShotExample] = ()) -> Prompt:
        """Build a question in the model's chat template, up to the policy's turn.

        An empty `system` is left out. `examples` are turns between the system message and the question.

        Raises:
            ConfigError: see `build_chat_prompt`.
        """
        messages = [{"role": "system", "content": system}] if system else []
        for example, session in examples:
            messages += [{"role": "user", "content": example}, {"role": "assistant", "content": session}]
        return self.build_chat_prompt([*messages, {"role": "user", "content": question}])

    def build_chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None
    ) -> Prompt:
        """Build a prompt from `messages` in the model's chat template, up to the policy's turn.

        Only the template writes control tokens. A message that spells one has it encoded as text.

        Raises:
            ConfigError: the model has no chat template, it refuses these messages, or it alters such a spelling.
        """
        ids = self.chat_template.render_ids(messages)  # text could not show which tokens are control tokens
        if ids is not None:
            return Prompt(self.decode(ids), ids)
        # Step 1: format the messages as they are, and replace spelled control tokens by placeholders.
        text = self.chat_template.render_text(messages, True, tools)
        ids = self.encode_with_control_tokens(text)
        harmless, placeholders = self._controls.replace(messages, self.encode_with_control_tokens)
        # Step 2: if a message could complete a control token with text of the template, replace whole messages.
        if self._controls.can_complete_token(messages):
            replaced, whole_placeholders = self._controls.replace_whole(messages)
            control_ids = self.encode_with_control_tokens(self.chat_template.render_text(replaced, True, tools))
            if placeholders or self._controls.find_in(control_ids) != self._controls.find_in(ids):
                harmless, placeholders = replaced, whole_placeholders
        if not placeholders:
            return Prompt(text, ids)
        # Step 3: encode the text of the template with control tokens, and the replaced texts without.
        rendered = self.chat_template.render_text(harmless, True, tools)
        pieces = placeholders.split_at_placeholders(rendered)
        if "".join(pieces) == text:
            encoders = (self.encode_with_control_tokens, self.encode)
            return Prompt(text, tuple(t for i, piece in enumerate(pieces) for t in encoders[i % 2](piece)))
        if self._controls.find_in(self.encode_with_control_tokens(rendered)) == self._controls.find_in(ids):
            return Prompt(text, ids)  # the template itself writes the spelling in harmless characters
        remedy = "it changes the spelling of a control token in a message; remove this token from the message"
        raise ConfigError(self.chat_template.name, placeholders.replaced_texts[0], remedy)

    def encode_with_control_tokens(self, text: str) -> tuple[int, ...]:
        """Encode text of a chat template: control tokens in it are recognised, and none is added."""
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except _get_panic_types() as error:
            raise self._make_error("encode", error) from error

    def make_watch(
        self, until: str | re.Pattern[str], before: Prompt | Observed | None = None
    ) -> Callable[[int], bool]:
        """Return a function that takes sampled ids one by one, and returns True once their text matches `until`.

        `before` is the prompt or observation before the line, as in `make_line`.
        """
        pattern = re.compile(until)
        settled_text, recent = "", list[int]()
        withheld = " " if before is not None and self.withholds_space(before) else ""

        def matches(token: int) -> bool:
            nonlocal settled_text
            recent.append(token)
            text = self.decode(recent)
            matched = pattern.search((settled_text + text).removeprefix(withheld)) is not None
            # Decode only the newest ids again: the last one may hold part of a character, which decodes to U+FFFD.
            if len(recent) >= _MAX_RECENT_IDS and not text.endswith("\ufffd"):
                settled_text += text
                recent.clear()
            return matched

        return matches

    def encode_observation(self, text: str, max_tokens: int | None = None, *, last: bool = False) -> Observed:
        """Encode console output alone. A visible marker replaces the middle of more than `max_tokens` tokens.

        More than 65,536 characters are cut in the same way before anything is encoded, because rollouts share one
        thread. `last` means that no line follows.
        """
        cut = len(text) > _MAX_OBSERVED_CHARS
        if cut:
            half, left_out = _MAX_OBSERVED_CHARS // 2, len(text) - _MAX_OBSERVED_CHARS
            text = f"{text[:half]}\n[... {left_out} characters cut ...]\n{text[-half:]}"
        body = text if last else self._strip_withheld_space(text)
        ids = self.encode(body)
        if max_tokens is None or len(ids) <= max_tokens:
            # Some vocabularies have no id for some control characters. Text without any token is not shown.
            return Observed(text if ids else "", ids, cut)
        marker = f"\n[... {len(ids) - max_tokens} tokens cut ...]\n"
        # Keep both ends; the marker comes on top of `max_tokens`.
        head, tail = ids[: max_tokens // 2], ids[len(ids) - (max_tokens - max_tokens // 2) :]
        shown = self.decode(head) + marker + self.decode(tail) + text[len(body) :]
        return Observed(shown, (*head, *self.encode(marker), *tail), cut=True)

    def encode_splice(self, text: str) -> tuple[int, ...]:
        """Encode a text that the policy continues, alone and without a last space that the policy writes."""
        return self.encode(self._strip_withheld_space(text))

    def _strip_withheld_space(self, text: str) -> str:
        """Return `text` without its last space if the policy writes this space."""
        return strip_last_space(text) if self.samples_space else text

    def withholds_space(self, before: Prompt | Observed) -> bool:
        """Return True if the text of `before` ends in a space that its ids lack. The next line's ids begin with it."""
        if not before.text.endswith(" ") or not before.token_ids:
            return False
        return not self._ends_in_space(before.token_ids[-1])

    def make_line(self, chunk: Chunk, before: Prompt | Observed | None = None) -> Line:
        """Build a line from sampled ids.

        `before` is the prompt or observation before the line. A space that was withheld there is not part of the line's
        text.
        """
        ids, step = chunk.token_ids, chunk.policy_step
        ended = ids[-1] in self.eos_ids
        text = self.decode(ids[:-1] if ended else ids)
        if before is not None and self.withholds_space(before):
            text = text.removeprefix(" ")
        return Line(ids, chunk.logprobs, text, LineEnd.EOS if ended else _ENDS[chunk.end], policy_step=step)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode `text` alone: no special token is added or recognised."""
        return self._encode_cached(text) if len(text) <= _MAX_CACHED_CHARS else self._encode(text)

    def encode_as_sampled(self, text: str, before: Prompt | Observed | None = None) -> tuple[int, ...]:
        """Encode `text` as the policy could have sampled it, without forbidden ids.

        If an id would be forbidden, each physical line is encoded alone. `before` is the prompt or observation before
        the text. A space that was withheld there comes first, unless the line is blank.
        """
        if before is not None and self.withholds_space(before) and text[:1] not in ("", "\n"):
            text = f" {text}"
        ids = self.encode(text)
        if self.forbidden_ids.isdisjoint(ids):
            return ids
        return tuple(i for line in re.findall(r"[^\n]*\n|[^\n]+", text) for i in self.encode(line))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the exact text of `ids` in the middle of a sequence, with leading spaces and special tokens."""
        text = self._raw_decode((*self._anchor, *ids))
        return text.removeprefix(self._anchor_text)

    def _encode(self, text: str) -> tuple[int, ...]:
        # A console may print lone surrogates, which no tokenizer accepts.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        if not text:
            return ()
        ids = tuple(self._raw_encode(text))
        if self.decode(ids) == text:
            return ids
        # SentencePiece-style tokenizers put a space before the first word: encode after an anchor, then drop the
        # anchor.
        anchored = tuple(self._raw_encode(_ANCHOR + "\n" + text))
        anchor = tuple(self._raw_encode(_ANCHOR + "\n"))
        if anchored[: len(anchor)] == anchor and self.decode(anchored[len(anchor) :]) == text:
            return anchored[len(anchor) :]
        return ids

    def _encode_first(self, text: str) -> tuple[int, ...]:
        """Encode `text` after BOS. SentencePiece puts a space before the first word there, as in training."""
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        ids = tuple(self._raw_encode(text)) if text else ()
        return ids if self.decode(ids) in (text, f" {text}") else self.encode(text)

    def _find_bos_ids(self) -> tuple[int, ...]:
        """Return the ids that the tokenizer's post-processor puts before a text: BOS, or several, or none."""
        anchor = list(self._anchor)
        # The ids in front of the anchor are those that the tokenizer adds.
        ids = self._raw_encode(_ANCHOR, special=True)
        positions = range(len(ids) - len(anchor) + 1)
        bos_count = next((i for i in positions if ids[i : i + len(anchor)] == anchor), 0)
        return tuple(ids[:bos_count])

    def _raw_encode(self, text: str, special: bool = False) -> list[int]:
        as_text = {} if self._tekken else {"split_special_tokens": True}  # Tekken never reads control tokens in text
        try:
            if self._backend is not None:
                return self._backend.encode(text, add_special_tokens=special).ids
            ids: list[int] = self.tokenizer(text, add_special_tokens=special, **as_text)["input_ids"]
        except _get_panic_types() as error:
            raise self._make_error("encode", error) from error
        return ids

    def _raw_decode(self, ids: Sequence[int]) -> str:
        try:
            if self._backend is not None:
                return self._backend.decode(ids, skip_special_tokens=False)
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
        except _get_panic_types() as error:
            raise self._make_error("decode", error) from error

    def _make_error(self, verb: str, error: BaseException) -> ConfigError:
        reason = " ".join(str(error).split())[:300]
        return ConfigError(f"tokenizer of {self._source}", reason, f"it cannot {verb} this text; use another model")


def _copy_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return a copy of the backend of a fast tokenizer, or None for a tokenizer written in Python.

    For the few ids of a line, the wrapper takes three times as long as the backend. The wrapper also leaves the
    truncation and padding of its last caller in the backend, so this copy is private.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    backend: Tokenizer = deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # as text: a program that prints a control token prints characters
    return backend


def _get_panic_types(*further: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return `further`, and the exception types that libraries in Rust raise for a panic.

    tokenizers panics if a regular expression of tokenizer.json does not terminate. The type is no `Exception`, and no
    module exports it. Each library makes its own on its first panic.
    """
    return (*further, *(kind for kind in BaseException.__subclasses__() if kind.__module__ == "pyo3_runtime"))


def joins_words(encode: Encode, decode: Decode) -> bool:
    """Return True if most words after a prompt form one token with the space before them.

    Byte-level BPE and SentencePiece encode a word and the space before it as one token (` print`). A pretrained model
    has hardly ever seen a word after a context that ends in a lone space. For such a vocabulary, the renderer withholds
    the last space of a spliced text. The policy samples this space, and it is trained with the line. It is not part of
    the code.
    """
    joined = [not ends_token_at(f"\n{prompt} ", word, encode, decode) for prompt in _PROMPTS for word in _FIRST_WORDS]
    return 2 * sum(joined) > len(joined)


def ends_token_at(text: str, following: str, encode: Encode, decode: Decode) -> bool:
    """Return True if a token ends exactly with `text` when the tokenizer encodes it together with `following`."""
    ids = encode(text + following)
    return any(decode(ids[:n]) == text for n in range(len(ids), 0, -1))


def strip_last_space(text: str) -> str:
    """Return `text` without its last space, unless the space is all of it."""
    return text[:-1] if text.endswith(" ") and len(text) > 1 else text


class ControlTokenPlaceholders:
    """Texts that were replaced. A placeholder is one private character, repeated to the length of its text.

    A template that trims, cuts, repeats or counts then treats it as it would treat the text.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        """Choose characters that no message contains.

        Raises:
            ConfigError: the messages contain characters of both private planes.
        """
        private_chars = {
            ord(c) for message in messages for c in str(message.get("content")) if ord(c) >= _PRIVATE_PLANES[0]
        }
        free = [first for first in _PRIVATE_PLANES if not any(first <= c < first + _PLANE_CHARS for c in private_chars)]
        if not free:
            remedy = "it has control tokens as text, and characters of both private planes; leave these characters out"
            raise ConfigError("message", chr(min(private_chars)), remedy)
        self._first = free[0]
        self._numbers: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._numbers)

    @property
    def replaced_texts(self) -> Sequence[str]:
        """Replaced texts, each once."""
        return tuple(self._numbers)

    def make_placeholder(self, text: str) -> str:
        """Return the placeholder of a text."""
        number = self._numbers.setdefault(text, len(self._numbers) % _PLANE_CHARS)
        return chr(self._first + number) * len(text)

    def split_at_placeholders(self, written: str) -> list[str]:
        """Split a text at the placeholders, and restore their texts: text, replaced, text, replaced, ..., text."""
        pieces = re.split(f"((?P<one>[{chr(self._first)}-{chr(self._first + _PLANE_CHARS - 1)}])(?P=one)*)", written)
        # Each match adds two pieces, one per group of the pattern; the second one is not needed.
        del pieces[2::3]
        return [self._restore_text(piece) if i % 2 else piece for i, piece in enumerate(pieces)]

    def _restore_text(self, placeholder: str) -> str:
        text = self.replaced_texts[ord(placeholder[0]) - self._first]
        # The template may have cut or repeated the placeholder, so the text is cut or repeated to its length.
        return (text * (len(placeholder) // len(text) + 1))[: len(placeholder)]


class ControlTokens:
    """Control tokens of one tokenizer, and their spellings in a message.

    A spelling in a message is encoded as text, regardless of its author. A chat template joins its own control tokens
    and the texts of messages to one string, in which they look alike. Before the template is applied, a placeholder
    therefore replaces each spelling in a message. Afterwards the spelling is encoded as text in its place.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def replace(
        self, messages: Sequence[Message], encode: EncodeWithControlTokens
    ) -> tuple[Sequence[Message], ControlTokenPlaceholders]:
        """Replace spelled control tokens by placeholders, and return the messages with the replaced texts."""
        placeholders = ControlTokenPlaceholders(messages)

        def replace_spelled(content: str) -> str:
            if self._ids.isdisjoint(encode(content)):
                return content
            replaced = self._pattern.sub(lambda match: placeholders.make_placeholder(match[0]), content)
            # Any control token left is spelled in characters that the tokenizer normalises: replace the whole content.
            return replaced if self._ids.isdisjoint(encode(replaced)) else placeholders.make_placeholder(content)

        return _map_contents(messages, replace_spelled), placeholders

    def replace_whole(self, messages: Sequence[Message]) -> tuple[Sequence[Message], ControlTokenPlaceholders]:
        """Replace each content by one placeholder, and return the messages with the replaced texts."""
        placeholders = ControlTokenPlaceholders(messages)
        return _map_contents(
            messages, lambda text: text.replace(stripped := text.strip(), placeholders.make_placeholder(stripped))
        ), placeholders

    def can_complete_token(self, messages: Sequence[Message]) -> bool:
        """Return True if a content begins or ends like part of a control token, which the template could complete."""
        contents = (text.strip() for message in messages if isinstance(text := message.get("content"), str))
        return any(self._is_partial_token(text) for text in contents if text)

    def _is_partial_token(self, text: str) -> bool:
        if len(text) < self._longest and any(text in token for token in self._texts):
            return True
        # The end of a token may begin the text, or its beginning may end the text.
        ends = range(1, min(len(text) + 1, self._longest))
        return any(text[:n] in self._suffixes or text[-n:] in self._prefixes for n in ends)

    def find_in(self, ids: Sequence[int]) -> list[int]:
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


def _map_contents(messages: Sequence[Message], change: Callable[[str], str]) -> Sequence[Message]:
    """Return the messages with each text that is not blank changed."""
    texts = [message.get("content") for message in messages]
    return [
        {**message, "content": change(text)} if isinstance(text, str) and text.strip() else message
        for message, text in zip(messages, texts, strict=True)
    ]
