"""Chat template of a model, applied with the arguments of a run."""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

from jinja2 import Environment, TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from repl_rl.errors import ConfigError
from repl_rl.rollout.bounded_jinja import BoundedEnvironment, TooLarge
from repl_rl.settings.toml_values import Scalar
from repl_rl.utils.timeouts import call_with_time_limit

Message = Mapping[str, object]
"""Message in the form of chat templates: `role`, `content`, ..."""

APPLY_S = 5.0
"""CPU time limit to format one conversation, seconds. A usual template takes a thousandth of a second."""
_MAX_CHARS = 1 << 24
"""Characters that a template may write in addition to the messages."""
_CLOCK = "strftime_now"
"""Name of the function with which templates read the clock."""
_PROBE = "REPLRLPROBEQ"
_MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of `{% generation %}` blocks, which mark text to train on. Only transformers can parse them."""
_ALWAYS_PASSED = ("messages", "raise_exception", _CLOCK)
_log = logging.getLogger(__name__)


def reads_clock(folder: Path) -> bool:
    """Return True if a chat template in a model folder writes the date or the time."""
    patterns = ("*.jinja", "tokenizer_config.json", "chat_template.json", "additional_chat_templates/*.jinja")
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    return any(_CLOCK in file.read_text(encoding="utf-8", errors="replace") for file in files)


def parse_date(date: str) -> datetime:
    """Parse a date in ISO format.

    Raises:
        ConfigError: the text is not such a date.
    """
    try:
        return datetime.fromisoformat(date)
    except ValueError as error:
        raise ConfigError("date", date, "give one as 2026-11-27 or 2026-11-27T09:30") from error


class ChatTemplate:
    """Chat template of one tokenizer, which may have none."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str,
        arguments: Mapping[str, Scalar],
        gives_ids: bool = False,
        now: datetime | None = None,
    ) -> None:
        """Bind the template of a tokenizer to the arguments of a run.

        Args:
            tokenizer: owner of the template.
            source: name of the model in error messages.
            arguments: template arguments in addition to the messages, such as `enable_thinking`.
            gives_ids: True for a template that returns ids instead of text. It takes no arguments.
            now: date and time that the template reads. None means the time of this call, which then stays fixed.

        Raises:
            ConfigError: the template does not read one of the arguments.
        """
        self.tokenizer = tokenizer
        self.name = f"chat template of {source}"
        """Name of the template in error messages."""
        self.kwargs = dict(arguments)
        self.was_applied = False
        """True once the template was applied."""
        self._gives_ids = gives_ids
        self._now = now or datetime.now()
        # An argument that the template ignores would have no effect: refuse it.
        for key, value in self.kwargs.items():
            if key not in self.variable_names:
                hint = f"it reads {', '.join(sorted(self.variable_names))}" if self.variable_names else "it reads none"
                raise ConfigError(
                    f"chat_template_kwargs.{key}",
                    value,
                    f"the {self.name} does not read it, so it has no effect; {hint}",
                )

    @property
    def exists(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template) or self._gives_ids

    def render_text(
        self, messages: Sequence[Message], open_turn: bool, tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Format `messages` with the template.

        With `open_turn`, the text ends with the beginning of the policy's turn.

        Raises:
            ConfigError: the tokenizer has no template, or the template refuses these messages.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError(self.name, None, "use a chat model, or --prompt base for a base model")
        self.was_applied = True
        try:
            return self._apply(self._adapt_messages(messages), open_turn, tools)
        except ConfigError:
            raise
        # A template is foreign code, which may raise anything.
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigError(self.name, reason, "it refuses this conversation") from error

    def render_ids(self, messages: Sequence[Message]) -> tuple[int, ...] | None:
        """Return the ids of `messages`, followed by the beginning of the policy's turn.

        None means that this template returns text.
        """
        if not self._gives_ids:
            return None
        conversation = [dict(message) for message in messages]
        return tuple(self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False))

    def _apply(self, messages: Sequence[Message], open_turn: bool, tools: Sequence[Mapping[str, object]] | None) -> str:
        names = {
            **self.tokenizer.special_tokens_map,
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": open_turn,
            _CLOCK: self._now.strftime,
            **self.kwargs,
        }
        # The limit grows with the messages, which may be long themselves.
        max_chars = _MAX_CHARS + 4 * sum(len(str(message.get("content"))) for message in messages)

        def apply() -> str:
            return self._environment.render(self.tokenizer.get_chat_template(tools=names["tools"]), names, max_chars)

        # A template is foreign code that may never end: bound its CPU time.
        try:
            return call_with_time_limit(apply, APPLY_S)
        except TooLarge as error:
            raise ConfigError(self.name, str(error), "it writes more than a model reads; use another") from error
        except TimeoutError as error:
            raise ConfigError(self.name, f"over {APPLY_S:g} s", "it does not end; use another model") from error
        except MemoryError as error:
            raise ConfigError(self.name, "out of memory", "it writes more than fits; use another model") from error

    def _adapt_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return `messages` in the form that this template accepts.

        A system message is merged into the first question if the template takes none. Contents are text, or become a
        list with one text part.
        """
        if messages and messages[0]["role"] == "system" and not self._takes_system:
            messages = _fold_system_message(messages)
        return [self._split_into_parts(message) for message in messages] if self._wants_parts else messages

    @staticmethod
    def _split_into_parts(message: Message) -> Message:
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    @cached_property
    def _environment(self) -> BoundedEnvironment:
        # transformers' own environment has the filters and functions that templates expect.
        return BoundedEnvironment(_compile_jinja_template("").environment)

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template ignores text and writes text parts, as templates of vision models do."""
        user: Message = {"role": "user", "content": _PROBE}
        return not self._renders_all([user]) and self._renders_all([self._split_into_parts(user)])

    @cached_property
    def _takes_system(self) -> bool:
        """False if the template refuses or ignores a system message, but writes its text as part of a user message.

        The log reports this once.
        """
        messages: list[Message] = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
        variants = [
            [self._split_into_parts(message) for message in variant] if self._wants_parts else variant
            for variant in (messages, _fold_system_message(messages))
        ]
        if self._renders_all(variants[0]) or not self._renders_all(variants[1]):
            return True
        _log.warning("the %s takes no system message: its text goes before the first question", self.name)
        return False

    def _renders_all(self, messages: Sequence[Message]) -> bool:
        try:
            return _PROBE in self._apply(messages, True, None)
        except ConfigError:
            raise
        # A template is foreign code, which may raise anything.
        except Exception:
            return False

    @cached_property
    def variable_names(self) -> frozenset[str]:
        """Names that the template reads, except the messages and the arguments that every template gets."""
        templates = self.tokenizer.chat_template
        if self._gives_ids or not templates:
            return frozenset()
        texts = templates.values() if isinstance(templates, dict) else [templates]
        always_passed = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, *_ALWAYS_PASSED}
        try:
            names = {name for text in texts for name in _find_template_variables(text)}
        except (TemplateError, RecursionError) as error:
            raise ConfigError(self.name, str(error), "it is not a template of Jinja; use another model") from error
        # The tokenizer passes its special tokens, such as `bos_token`.
        return frozenset(name for name in names - always_passed if not name.endswith("_token"))


def _fold_system_message(messages: Sequence[Message]) -> Sequence[Message]:
    """Return `messages` with the system text before the first question's text, separated by a blank line."""
    if len(messages) < 2 or messages[1]["role"] != "user":
        return messages
    system, first = messages[:2]
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *messages[2:]]


def _find_template_variables(text: str) -> set[str]:
    """Return the names that a template expects from its caller.

    The template never assigns them, or only if they are missing.
    """
    parser = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    tree = parser.parse(_MARKERS.sub("", text))
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    parameters = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "param"}
    # A name that is tested for existence is an argument, even if the template assigns a default to it.
    tested = {
        test.node.name
        for test in tree.find_all((nodes.Test, nodes.Filter))
        if test.name in ("defined", "undefined", "default", "d") and isinstance(test.node, nodes.Name)
    }
    return meta.find_undeclared_variables(tree) - (assigned - tested) - parameters - set(parser.globals)
