"""A model's chat format as ids: prompts from its template, and what its template writes between two turns.

After the prompt, no template is ever applied to what the policy wrote: ids are only appended. What stands between the
end of one turn and the beginning of the next (the glue) is read off the template with probes in the place of texts.
Glue may hold control tokens; texts are encoded alone, without any.
"""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from repl_rl.errors import ConfigError
from repl_rl.record.trajectory import Observed, Prompt
from repl_rl.rollout.renderer import Renderer

Message = Mapping[str, object]
"""A message as chat templates take it: `role`, `content`, ..."""

_PROBE = "REPLRLPROBE{}Q"


def opening(renderer: Renderer, system: str, question: str, template: str) -> Prompt:
    """The prompt of a sampler that continues one text: `template` is `chat`, or anything else for plain text.

    `chat`: the model's chat template with `system` and `question`. Otherwise `system` and `question` on lines of
    their own; an empty `system` is left out.
    """
    if template == "chat":
        return ChatFormat(renderer).prompt(conversation(system, question))
    text = "".join(f"{part}\n" for part in (system, question) if part)
    return Prompt(text, renderer.encode(text))


def conversation(system: str, question: str) -> list[Message]:
    """The messages that a policy is asked with; an empty `system` is left out."""
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}]


class ChatFormat:
    """The chat template of one model."""

    def __init__(self, renderer: Renderer, schemas: Sequence[Mapping[str, object]] = ()) -> None:
        """`schemas`: the JSON schemas of the tools that the prompt offers.

        Raises:
            ConfigError: there is no chat template, or it writes no tools although there are some.
        """
        self._renderer = renderer
        self._schemas = list(schemas) or None
        self._name = str(renderer.tokenizer.name_or_path)
        if not renderer.tokenizer.chat_template:
            raise ConfigError(f"chat template of {self._name}", None, "use a chat model for this sampler")
        if self._schemas and self.render([_user("?")], True) == self._rendered([_user("?")], True, None):
            raise ConfigError(f"chat template of {self._name}", "without tools", "use a model that was made for tools")

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The conversation so far and the beginning of the policy's turn, as the template writes it."""
        text = self.render(messages, True)
        return Prompt(text, self._with_controls(text))

    def reply(self, messages: Sequence[Message], max_tokens: int) -> Observed:
        """What the template writes after the end token of the policy's turn: `messages`, and the policy's next turn.

        Args:
            messages: at least one; a `content` of more than `max_tokens` ids has its middle cut, visibly.
            max_tokens: for each message, >= 1.

        Raises:
            ConfigError: the template cannot write such messages.
        """
        rendered = [self._renderer.observation(str(message["content"]), max_tokens) for message in messages]
        shown = [each.text for each in rendered]
        probes = [_PROBE.format(i) for i in range(len(messages))]
        frame = self._after_turn(messages, probes)
        text, ids = "", list[int]()
        rest = frame
        for i, probe in enumerate(probes):
            glue, found, rest = rest.partition(probe)
            if not found:
                role = messages[i]["role"]
                raise ConfigError(f"chat template of {self._name}", f"leaves out role {role!r}", "use another model")
            written = self._written(messages, probes, i, shown[i], frame)
            text += glue + written
            ids += (*self._with_controls(glue), *self._renderer.encode(written))
        return Observed(text + rest, (*ids, *self._with_controls(rest)), any(each.cut for each in rendered))

    def render(self, messages: Sequence[Message], open_turn: bool) -> str:
        """`messages` as the template writes them; `open_turn`: and the beginning of the policy's turn."""
        return self._rendered(messages, open_turn, self._schemas)

    def _written(self, messages: Sequence[Message], probes: Sequence[str], i: int, content: str, frame: str) -> str:
        """How the template writes `content` as message `i`: as it is, trimmed, as JSON, ..."""
        before, _, after = frame.partition(probes[i])
        real = self._after_turn(messages, [*probes[:i], content, *probes[i + 1 :]])
        if not (real.startswith(before) and real.endswith(after) and len(real) >= len(before) + len(after)):
            remedy = "what it writes around a message must not depend on the message; use another model"
            raise ConfigError(f"chat template of {self._name}", real[:80], remedy)
        return real[len(before) : len(real) - len(after)]

    def _after_turn(self, messages: Sequence[Message], contents: Sequence[str]) -> str:
        probe, end = _PROBE.format("T"), self._renderer.decode([min(self._renderer.eos_ids)])
        filled = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        text = self.render([_user("?"), {"role": "assistant", "content": probe}, *filled], True)
        _, found, tail = text.partition(probe)
        _, ended, glue = tail.partition(end)
        if not found or not ended:
            remedy = f"a turn of the policy must end with {end!r}; set the end token of the tokenizer"
            raise ConfigError(f"chat template of {self._name}", text[-80:], remedy)
        return glue

    def _rendered(
        self, messages: Sequence[Message], open_turn: bool, schemas: Sequence[Mapping[str, object]] | None
    ) -> str:
        try:
            return str(
                self._renderer.tokenizer.apply_chat_template(
                    list(messages), tools=schemas, tokenize=False, add_generation_prompt=open_turn
                )
            )
        except TemplateError as error:
            raise ConfigError(f"chat template of {self._name}", str(error), "it refuses this conversation") from error

    def _with_controls(self, text: str) -> tuple[int, ...]:
        return tuple(self._renderer.tokenizer.encode(text, add_special_tokens=False))


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
