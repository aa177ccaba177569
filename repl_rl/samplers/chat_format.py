"""Chat format of a model as token ids, and the text patterns that samplers share.

The first part builds prompts from the chat template, and the text between two turns. After the prompt, the template is
never applied to the policy's text, and ids are only appended. The text between the end of one turn and the beginning of
the next is called glue. It is extracted from the template, with probes in place of texts. Glue may contain control
tokens; texts are encoded separately, without any.

The second part compiles regular expressions that users provide, for calls, blocks and answers. Each has one group. It
also fills frames with one place for a text.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from repl_rl.errors import ConfigError
from repl_rl.rollout.chat_template import Message
from repl_rl.rollout.prompts import OWN
from repl_rl.rollout.token_renderer import Renderer
from repl_rl.trajectory.trajectory import Observed, Prompt

_PROBE = "REPLRLPROBE{}Q"
"""Probe in place of the content of message number {}. Templates leave such a word unchanged."""
_TURN = _PROBE.format("T")
"""Probe in place of the policy's turn."""
_BRACED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
BOXED = rf"\\boxed\{{({_BRACED})\}}"
"""Answer in LaTeX's \\boxed{}, which may contain braces to a depth of two, such as \\frac{\\sqrt{2}}{3}."""


def build_opening_prompt(renderer: Renderer, system: str, question: str, template: str) -> Prompt:
    """Build the prompt of a sampler whose rollout continues one text, without further chat turns.

    The template `chat` uses the model's chat template with `system` and `question`. A user's own text (see
    `prompts.read_template`) is the plain text before the console, or the system message of a chat. Any other template
    gives `system` and `question` as plain text on separate lines. An empty `system` is left out.

    Raises:
        ConfigError: the template does not fit the model, or there are two system messages.
    """
    if template.startswith(OWN):
        filled = renderer.fill_template(template, question, "")
        if filled.system is None:
            return renderer.build_plain_prompt(filled.head)
        if system:
            raise ConfigError("system", system[:40], "the prompt file is the system message already; leave one out")
        return renderer.build_question_prompt(filled.system, question, filled.examples)
    if template == "chat":
        return ChatFormat(renderer).build_prompt(build_conversation(system, question))
    return renderer.build_plain_prompt("".join(f"{part}\n" for part in (system, question) if part))


def build_conversation(system: str, question: str) -> list[Message]:
    """Return the first messages of a conversation; an empty `system` is left out."""
    system_messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*system_messages, {"role": "user", "content": question}]


class ChatFormat:
    """Chat template of one model."""

    def __init__(self, renderer: Renderer, schemas: Sequence[Mapping[str, object]] = ()) -> None:
        """Check the chat template of a model. `schemas` are the JSON schemas of the tools that the prompt offers.

        Raises:
            ConfigError: there is no chat template, or it leaves out the tools.
        """
        self._renderer = renderer
        self.schemas = tuple(schemas)
        """JSON schemas of the tools that the prompt offers."""
        self.template = renderer.chat_template
        """Chat template of the model, as the run applies it."""
        if not self.template.exists:
            raise ConfigError(self.template.name, None, "use a chat model for this sampler")
        # A template that ignores tools writes the same text with and without them.
        if self.schemas and self.render([_make_user_message("?")], True) == self.template.render_text(
            [_make_user_message("?")], True
        ):
            raise ConfigError(self.template.name, "without tools", "use a model that was made for tools")

    def build_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Return the conversation so far and the beginning of the policy's turn, as the template writes them."""
        return self._renderer.build_chat_prompt(messages, self.schemas or None)

    def encode_reply(self, messages: Sequence[Message], max_tokens: int, called: Sequence[str] = ()) -> Observed:
        """Return the text after the end token of the policy's turn: `messages`, and the beginning of its next turn.

        Args:
            messages: at least one. If a `content` has more than `max_tokens` ids, a visible marker replaces its middle.
            max_tokens: limit per message, tokens, >= 1.
            called: names of the tools that the turn called, if `messages` answer its calls, one name per call.

        Raises:
            ConfigError: the template cannot write such messages.
        """
        # Truncate long contents first. The template gets only what is shown.
        rendered = [
            self._renderer.encode_observation(str(message["content"]), max_tokens, last=True) for message in messages
        ]
        texts = [observation.text for observation in rendered]
        # Render the template with one probe per message, then put each text in the place of its probe.
        probes = [_PROBE.format(i) for i in range(len(messages))]
        turn, answers, frame = self._split_reply_frame(messages, called, probes)
        text, ids = "", list[int]()
        rest = frame
        for i, probe in enumerate(probes):
            glue, matched, rest = rest.partition(probe)
            if not matched:
                role = messages[i]["role"]
                raise ConfigError(self.template.name, f"leaves out role {role!r}", "use another model")
            # Encode glue and text separately, so that no text can form a control token.
            content = self._render_content(turn, answers, probes, i, texts[i], frame)
            text += glue + content
            ids += (*self._renderer.encode_with_control_tokens(glue), *self._renderer.encode(content))
        return Observed(
            text + rest,
            (*ids, *self._renderer.encode_with_control_tokens(rest)),
            any(observation.cut for observation in rendered),
        )

    def render(self, messages: Sequence[Message], open_turn: bool) -> str:
        """Render `messages` with the template. True as `open_turn` adds the beginning of the policy's turn."""
        return self.template.render_text(messages, open_turn, self.schemas or None)

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """End tokens of the policy, as text."""
        return tuple(self._renderer.decode([i]) for i in sorted(self._renderer.eos_ids))

    def _split_reply_frame(
        self, messages: Sequence[Message], called: Sequence[str], probes: Sequence[str]
    ) -> tuple[Message, Sequence[Message], str]:
        """Return the policy's turn, the messages that answer it, and the template's text after that turn with probes.

        Some templates write only one call per turn, or none. The turn then has fewer calls than the policy made.
        """
        # Try all calls, then only the last one, then none.
        *candidates, last = [
            _link_tool_calls(messages, names) for names in dict.fromkeys((tuple(called), tuple(called[-1:]), ()))
        ]
        for turn, answers in candidates:
            try:
                return turn, answers, self._render_after_turn(turn, answers, probes)
            except ConfigError:
                continue
        return *last, self._render_after_turn(*last, probes)

    def _render_content(
        self, turn: Message, messages: Sequence[Message], probes: Sequence[str], i: int, content: str, frame: str
    ) -> str:
        """Return `content` as the template writes it in message `i`: unchanged, trimmed, as JSON, ..."""
        prefix, _, suffix = frame.partition(probes[i])
        rendered = self._render_after_turn(turn, messages, [*probes[:i], content, *probes[i + 1 :]])
        # The template must write the same glue around every text.
        if not (
            rendered.startswith(prefix) and rendered.endswith(suffix) and len(rendered) >= len(prefix) + len(suffix)
        ):
            remedy = "what it writes around a message must not depend on the message; use another model"
            raise ConfigError(self.template.name, rendered[:80], remedy)
        return rendered[len(prefix) : len(rendered) - len(suffix)]

    def _render_after_turn(self, turn: Message, messages: Sequence[Message], contents: Sequence[str]) -> str:
        """Return the text after the end of a turn that is followed by `messages` with these contents.

        Raises:
            ConfigError: the template does not write the turn, or the turn has no end token.
        """
        # Some templates refuse a conversation that does not begin with the user.
        filled = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        text = self.render([_make_user_message("?"), turn, *filled], True)
        _, matched, tail = text.partition(_TURN)
        # Render the turn alone too. Its end shows the place of the end token.
        glue = (
            self._cut_after_end(tail, self.render([_make_user_message("?"), turn], False).partition(_TURN)[2])
            if matched
            else None
        )
        if glue is None:
            end_names = " or ".join(map(repr, self.end_tokens))
            remedy = f"a turn of the policy must end with {end_names}; set the end token in generation_config.json"
            raise ConfigError(self.template.name, text[-80:], remedy)
        return glue

    def _cut_after_end(self, tail: str, last_turn: str) -> str | None:
        """Return the text behind the end of a turn in `tail`, or None if the turn has no end.

        `tail` begins in the middle of that turn. `last_turn` is the same text without messages after the turn. There,
        the turn ends with an end token, as when the policy ends it. If messages follow, some templates write another
        control token in that place.
        """
        positions = sorted((last_turn.index(end), end) for end in self.end_tokens if end in last_turn)
        if positions:
            # Look in `tail` for the place where the last turn ends, and accept any control token there.
            prefix, end = last_turn[: positions[0][0]], positions[0][1]
            rest = tail.removeprefix(prefix) if tail.startswith(prefix) else ""
            end_candidates = [end, *(token for token in self._controls if token)]
            end_token = next((token for token in end_candidates if rest.startswith(token)), None)
            if end_token is not None:
                return rest[len(end_token) :]
        # Otherwise the first end token counts, unless the next message comes before it.
        positions = sorted((tail.index(end), end) for end in self.end_tokens if end in tail)
        probes = [tail.index(probe) for probe in (_PROBE.format(0),) if probe in tail]
        if not positions or (probes and positions[0][0] > probes[0]):
            return None
        return tail[positions[0][0] + len(positions[0][1]) :]

    @cached_property
    def _controls(self) -> tuple[str, ...]:
        """Control tokens of the tokenizer, as text."""
        return tuple(token.content for token in self._renderer.tokenizer.added_tokens_decoder.values())


def make_tool_call_message(calls: Sequence[tuple[str, Mapping[str, object]]], content: str = "") -> Message:
    """Return a turn of the policy that calls tools with these names and arguments."""
    tool_calls = [
        {"id": _make_call_id(i), "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def _link_tool_calls(messages: Sequence[Message], called: Sequence[str]) -> tuple[Message, Sequence[Message]]:
    """Return the policy's turn with a probe in it, and `messages` as answers to its calls.

    If there are more messages than calls, the last call gets the rest.
    """
    if not called:
        return {"role": "assistant", "content": _TURN}, messages
    # Only the last call carries the probe, because the text after the turn begins behind it.
    *earlier, last = called
    turn = make_tool_call_message([*((name, {"value": "?"}) for name in earlier), (last, {"value": _TURN})])
    numbers = [min(i, len(earlier)) for i in range(len(messages))]
    numbered = zip(messages, numbers, strict=True)
    return turn, [{**message, "name": called[i], "tool_call_id": _make_call_id(i)} for message, i in numbered]


def _make_call_id(number: int) -> str:
    return f"call{number:05d}"


def _make_user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def compile_single_group(name: str, pattern: str, flags: re.RegexFlag = re.DOTALL) -> re.Pattern[str]:
    """Compile the regular expression of option `name`.

    Raises:
        ConfigError: it is not a regular expression, or does not have exactly one group.
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(name, pattern, f"it is not a regular expression: {error}") from error
    if compiled.groups != 1:
        raise ConfigError(name, pattern, f"it has {compiled.groups} groups; give exactly one")
    return compiled


def check_single_place(name: str, frame: str) -> str:
    """Return the frame of option `name`, after a check that it has one place for a text.

    Raises:
        ConfigError: it does not contain `{}` exactly once.
    """
    if frame.count("{}") != 1:
        raise ConfigError(name, frame, "mark the place of the text with exactly one {}")
    return frame


def fill_frame(frame: str, text: str) -> str:
    """Return `frame` with its placeholder `{}` replaced by `text`. Braces in `text` stay as they are."""
    # Not `str.format`, because the frame may contain other braces.
    prefix, _, suffix = frame.partition("{}")
    return prefix + text + suffix


def find_last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the group of the last match, without surrounding white space. None means that there is no match."""
    matches = pattern.findall(text)
    return str(matches[-1]).strip() if matches else None
