"""A model's chat template: messages as it writes them, with the arguments that a run gives it."""

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from jinja2 import Environment, TemplateError, meta, nodes
from transformers import PreTrainedTokenizerBase

from repl_rl.errors import ConfigError
from repl_rl.settings.scalars import Scalar

Message = Mapping[str, object]
"""A message as chat templates take it: `role`, `content`, ..."""

_PROBE = "REPLRLPROBEQ"
_MARKERS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of transformers' own, around what is trained."""
_GIVEN = ("messages", "raise_exception", "strftime_now")


class ChatTemplate:
    """The chat template of one tokenizer, which there may be none of."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, source: str, arguments: Mapping[str, Scalar], gives_ids: bool = False
    ) -> None:
        """Take a tokenizer's template with the arguments of a run.

        Args:
            tokenizer: whose template it is.
            source: what messages call the model.
            arguments: what the template is given beside the messages, such as `enable_thinking`.
            gives_ids: its template gives ids in place of text, and takes no arguments.

        Raises:
            ConfigError: the template does not read one of the arguments.
        """
        self.tokenizer = tokenizer
        self.name = f"chat template of {source}"
        """What messages call it."""
        self.arguments = dict(arguments)
        self.applied = False
        """True once something was written with it."""
        self._gives_ids = gives_ids
        for key, value in self.arguments.items():
            if key not in self.reads:
                known = f"it reads {', '.join(sorted(self.reads))}" if self.reads else "it reads none"
                raise ConfigError(
                    f"chat.{key}", value, f"the {self.name} does not read it, so it has no effect; {known}"
                )

    @property
    def there(self) -> bool:
        """Whether there is one."""
        return bool(self.tokenizer.chat_template) or self._gives_ids

    def text(
        self, messages: Sequence[Message], open_turn: bool, tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """`messages` as the template writes them; `open_turn`: and the beginning of the policy's turn.

        Raises:
            ConfigError: there is no template, or it refuses these messages.
        """
        if not self.tokenizer.chat_template:
            raise ConfigError(self.name, None, "use a chat model, or --prompt base for a base model")
        self.applied = True
        try:
            return self._apply(self._told(messages), open_turn, tools)
        except (TemplateError, TypeError) as error:
            raise ConfigError(self.name, str(error), "it refuses this conversation") from error

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...] | None:
        """The ids of `messages` and of the beginning of the policy's turn; None: this template gives text."""
        if not self._gives_ids:
            return None
        said = [dict(message) for message in messages]
        return tuple(self.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))

    def _apply(self, messages: Sequence[Message], open_turn: bool, tools: Sequence[Mapping[str, object]] | None) -> str:
        said = [dict(message) for message in messages]
        offered = [dict(tool) for tool in tools] if tools else None
        return str(
            self.tokenizer.apply_chat_template(
                said, tools=offered, tokenize=False, add_generation_prompt=open_turn, **self.arguments
            )
        )

    def _told(self, messages: Sequence[Message]) -> Sequence[Message]:
        """`messages` with their contents as this template wants them: as text, or as parts of which one is a text."""
        if not self._wants_parts:
            return messages
        return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]

    @cached_property
    def _wants_parts(self) -> bool:
        """True for a template that leaves texts out, as those of vision models do, and writes parts."""
        return not self._writes(_PROBE) and self._writes([{"type": "text", "text": _PROBE}])

    def _writes(self, content: object) -> bool:
        try:
            return _PROBE in self._apply([{"role": "user", "content": content}], True, None)
        except (TemplateError, TypeError):
            return False

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names that the template reads beside the messages and what every template is given."""
        found = self.tokenizer.chat_template
        if self._gives_ids or not found:
            return frozenset()
        texts = found.values() if isinstance(found, dict) else [found]
        given = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, *_GIVEN}
        names = {name for text in texts for name in _arguments(text)}
        return frozenset(name for name in names - given if not name.endswith("_token"))


def _arguments(text: str) -> set[str]:
    """The names that a template takes from whoever applies it: never assigned there, or only where they are missing."""
    parser = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    tree = parser.parse(_MARKERS.sub("", text))
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    parameters = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "param"}
    asked = {
        each.node.name
        for each in tree.find_all((nodes.Test, nodes.Filter))
        if each.name in ("defined", "undefined", "default", "d") and isinstance(each.node, nodes.Name)
    }
    return meta.find_undeclared_variables(tree) - (assigned - asked) - parameters - set(parser.globals)
