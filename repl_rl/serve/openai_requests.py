"""Strict parsing of requests, field by field. A field that would have no effect is an error, never ignored."""

import json
from collections.abc import Container, Mapping
from typing import Annotated, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from repl_rl.serve.http_errors import RequestError

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_FIRST = Field(fail_fast=True)
"""Parsing of a list stops at its first error. To find all errors of a very long body would block other clients."""
_MAX_SEED = (1 << 63) - 1
"""Largest seed: the largest signed integer of 64 bits."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    # Without tools, both values mean the same.
    "parallel_tool_calls": (False, True),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_p": (1,),
    "use_beam_search": (False,),
}
"""Unsupported fields of OpenAI's and vLLM's APIs -> values that request nothing. These and null are accepted."""
LABELS = frozenset({"prompt_cache_key", "safety_identifier", "user"})
"""Fields that name the client, for the server's own records. Any text is accepted, because they request nothing."""
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": ([],),
    "images": ([],),
    "name": ("",),
    "provider_specific_fields": ({},),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_calls": ([],),
}
"""`NEUTRAL` for the fields of a message. Clients return earlier answers with every field that they know."""
NEUTRAL_IN_PART: Mapping[str, tuple[object, ...]] = {"annotations": ([],)}
"""`NEUTRAL` for the fields of a part of a message."""
NEUTRAL_IN_STREAM_OPTIONS: Mapping[str, tuple[object, ...]] = {"include_obfuscation": (False,)}
"""`NEUTRAL` for the fields of `stream_options`."""


class ReplOptions(BaseModel):
    """Request options beyond OpenAI's fields."""

    model_config = _STRICT

    show: Literal["transcript", "answer"] = "transcript"
    """Text of the answer: all lines and their output, or only the submitted answer."""
    keep: bool | None = None
    """Keep the console for another turn. None keeps it if `conversation` is given."""
    conversation: str | None = None
    """Id of the conversation to continue."""
    tokens: bool = False
    """Return all token ids, and which of them were sampled."""


class ContentPart(BaseModel):
    """Part of a message."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Message of the user or of the policy."""

    model_config = _STRICT

    role: Literal["user", "assistant"]
    content: str | Annotated[list[ContentPart], _FIRST] | None

    @property
    def text(self) -> str:
        """Text of all parts, joined."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = _STRICT

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields that both kinds of requests have."""

    model_config = _STRICT

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = None
    stop: str | Annotated[list[str], _FIRST, Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    repl: ReplOptions = ReplOptions()

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of ids to sample. None means that only the limits of a rollout apply."""
        return self.max_tokens

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end the turn; see `RolloutObserver.stop_texts`."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    @property
    def keep(self) -> bool:
        """True if the console is to be kept for another turn."""
        return self.repl.conversation is not None if self.repl.keep is None else self.repl.keep


class ChatCompletionRequest(GenerationRequest):
    """Request of /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    messages: Annotated[list[ChatMessage], _FIRST, Field(min_length=1)]

    @property
    def max_new_tokens(self) -> int | None:
        """See `GenerationRequest.max_new_tokens`. Two fields can set it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def question(self) -> str:
        """Text of the last message."""
        return self.messages[-1].text


class CompletionRequest(GenerationRequest):
    """Request of /v1/completions. The policy continues exactly these ids, or the ids of this text."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], _FIRST]
    """One prompt. A list of one prompt is read as that prompt."""


RequestT = TypeVar("RequestT", bound=GenerationRequest)
"""Kind of request."""


def parse_request(request_type: type[RequestT], body: bytes) -> RequestT:
    """Parse the request in `body`.

    Raises:
        RequestError: the body is not JSON, or asks for something unsupported (400).
    """
    try:
        fields = json.loads(body, parse_constant=_reject_constant)
        # `json.loads` also accepts UTF-16, UTF-32 and encoded surrogates. Require strict UTF-8.
        body.decode().encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "the body is not a JSON object", code="invalid_json")
    try:
        request = request_type.model_validate(_remove_neutral_fields(request_type, fields))
    except ValidationError as error:
        _raise_request_error(error)
    _validate_request(request)
    return request


def _remove_neutral_fields(request_type: type[GenerationRequest], fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a request without those that request nothing.

    Raises:
        RequestError: a field is unknown or unsupported.
    """
    requested = {name: value for name, value in fields.items() if value is not None}
    # Remove or refuse unsupported fields, then clean the parts of the supported ones.
    for name in sorted(requested.keys() - request_type.model_fields.keys()):
        value, label = requested.pop(name), f"{name:.80}"
        if name in LABELS and isinstance(value, str):
            continue
        if not any(_is_json_equal(value, neutral) for neutral in NEUTRAL.get(name, ())):
            known = "it is not supported here" if name in NEUTRAL else "it is not known here"
            message = f"{label} is {value!r:.80}: {known}; leave it out"
            raise RequestError(400, message, param=label, code="unsupported_parameter")
    if isinstance(messages := requested.get("messages"), list):
        requested["messages"] = [_remove_neutral_message_fields(message) for message in messages]
    if "stream_options" in requested:
        requested["stream_options"] = _remove_neutral_values(requested["stream_options"], NEUTRAL_IN_STREAM_OPTIONS)
    if "repl" in requested:
        requested["repl"] = _remove_neutral_values(requested["repl"], {})
    # OpenAI's API takes several prompts in a list. A list of one is that prompt.
    prompt = requested.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        requested["prompt"] = prompt[0]
    return requested


def _remove_neutral_message_fields(message: object) -> object:
    """Return a message without the fields that request nothing, and so each part of its content."""
    message = _remove_neutral_values(message, NEUTRAL_IN_MESSAGE, {"content"})
    if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
        return {**message, "content": [_remove_neutral_values(part, NEUTRAL_IN_PART) for part in parts]}
    return message


def _remove_neutral_values(
    part: object, neutral: Mapping[str, tuple[object, ...]], null_allowed: Container[str] = frozenset()
) -> object:
    """Return a part of a request without fields that request nothing.

    These are fields with a neutral value, and fields with null that are not in `null_allowed`.
    """
    if not isinstance(part, dict):
        return part
    return {
        name: value
        for name, value in part.items()
        if name in null_allowed
        or not (value is None or any(_is_json_equal(value, neutral_value) for neutral_value in neutral.get(name, ())))
    }


def _is_json_equal(value: object, other: object) -> bool:
    """Return True if two values are equal as JSON. 0 is not false: /v1/completions requests `logprobs` with 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _validate_request(request: GenerationRequest) -> None:
    """Reject texts and combinations of fields that pydantic cannot check."""
    if request.stream_options is not None and request.stream_options.include_usage and not request.stream:
        raise RequestError(400, "include_usage has no effect without stream; leave it out", param="stream_options")
    # Stop texts are looked for in single lines, which end with their newline.
    if any("\n" in text[:-1] for text in request.stop_texts):
        raise RequestError(
            400, "stop: a text with characters after a newline never occurs in a line of the policy", param="stop"
        )
    if not isinstance(request, ChatCompletionRequest):
        if isinstance(request, CompletionRequest):
            _validate_prompt(request.prompt)
        return
    if (
        None not in (request.max_tokens, request.max_completion_tokens)
        and request.max_tokens != request.max_completion_tokens
    ):
        raise RequestError(
            400, "max_tokens and max_completion_tokens are one limit; give one of them", param="max_tokens"
        )
    if request.messages[-1].role != "user" or not request.question.strip():
        raise RequestError(400, "the last message is not a question from the user", param="messages")
    for message in request.messages:
        if not _is_encodable(message.text):
            raise RequestError(400, "a message holds half of a surrogate pair, which is no text", param="messages")


def _validate_prompt(prompt: str | list[int]) -> None:
    """Reject a prompt that is empty or cannot be encoded."""
    if not prompt:
        raise RequestError(400, "the prompt is empty", param="prompt")
    if isinstance(prompt, str) and not _is_encodable(prompt):
        raise RequestError(400, "the prompt holds half of a surrogate pair, which is no text", param="prompt")


def _is_encodable(text: str) -> bool:
    """Return True if UTF-8 can encode a text: JSON may hold half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _raise_request_error(error: ValidationError) -> NoReturn:
    """Raise a `RequestError` for the first error. For a field of several types it gives the error of each type."""
    # pydantic names the tried type as part of the location. Without it, all errors of one field have one location.
    problems = error.errors(include_url=False, include_context=False)
    locations = [tuple(part for part in problem["loc"] if not _is_union_branch(part)) for problem in problems]
    same_field = [
        problem
        for problem, location in zip(problems, locations, strict=True)
        if location[: len(locations[0])] == locations[0]
    ]
    location = f"{'.'.join(map(str, locations[0])):.80}"
    input_value, remedy = problems[0]["input"], ""
    value = f" is {input_value!r:.80}" if isinstance(input_value, str | int | float) else ""
    if location.startswith("messages") and location.endswith("role"):
        remedy = "; the policy has the prompt that it was trained with: put instructions into the user's message"
    reasons = ", or: ".join(dict.fromkeys(problem["msg"] for problem in same_field))
    raise RequestError(400, f"{location}{value}: {reasons}{remedy}", param=location) from error


def _is_union_branch(part: int | str) -> bool:
    """Return True if a part of pydantic's location names a tried type, not a field or an index."""
    return part == "str" or str(part).startswith("list[")


def _reject_constant(name: str) -> NoReturn:
    """Reject NaN and infinities, which `json.loads` accepts and JSON has not."""
    raise ValueError(f"{name} is not a number")
