"""Answers in the formats of OpenAI's API, whole or in chunks, with our additions in the field `repl`."""

import secrets
import time
from collections.abc import Iterator, Mapping

from repl_rl.cli.serve.asking import Asked, ChatAsked
from repl_rl.cli.serve.desk import Done
from repl_rl.cli.serve.telling import Told
from repl_rl.record.trajectory import Stop

Json = Mapping[str, object]
_LENGTH = frozenset({Stop.MAX_LINES, Stop.MAX_TOKENS, Stop.LINE_TOO_LONG, Stop.WALL_CLOCK})
"""Stops by a limit, reported as `length`. All others are reported as `stop`."""


class Shape:
    """Formatter of the answer to one request."""

    def __init__(self, asked: Asked, model: str) -> None:
        self._asked = asked
        self._chat = isinstance(asked, ChatAsked)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, done: Done) -> Json:
        """Return the whole answer."""
        content, end = done.content(self._asked), _finish(done)
        if self._chat:
            message = {"role": "assistant", "content": content, "refusal": None}
            choice: Json = {"index": 0, "message": message, "finish_reason": end, "logprobs": None}
        else:
            choice = {"index": 0, "text": content or "", "finish_reason": end, "logprobs": None}
        kind = "chat.completion" if self._chat else "text_completion"
        ours = {**self._ours(done), "lines": [ran.said for ran in done.lines]}
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(done), "repl": ours}

    def first(self) -> Json:
        """Return the first chunk, which opens the answer."""
        return self._chunk("", opening=True)

    def chunks(self, told: Told) -> Iterator[Json]:
        """Yield a chunk for news: its text, if the transcript is requested, and its complete line."""
        text = told.text if self._asked.repl.show == "transcript" else ""
        if told.ran is not None:
            yield {**self._chunk(text), "repl": {"line": told.ran.said}}
        elif text:
            yield self._chunk(text)

    def last(self, done: Done) -> Iterator[Json]:
        """Yield the chunks that end the answer."""
        if self._asked.repl.show == "answer" and done.trajectory.answer is not None:
            yield self._chunk(done.trajectory.answer)
        yield {**self._chunk("", end=_finish(done)), "repl": self._ours(done)}
        # OpenAI's API sends the usage in a last chunk without choices.
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield {**self._chunk(""), "choices": [], "usage": usage(done)}

    def _chunk(self, text: str, end: str | None = None, opening: bool = False) -> Json:
        if self._chat:
            delta = {"role": "assistant", "content": text} if opening else {"content": text} if text else {}
            choice: Json = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}
        else:
            choice = {"index": 0, "text": text, "finish_reason": end, "logprobs": None}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice]}

    def _ours(self, done: Done) -> dict[str, object]:
        played = done.trajectory
        ours: dict[str, object] = {
            "conversation": done.conversation,
            "stop": str(played.stop),
            "answer": played.answer,
            "observed_tokens": played.observed_tokens,
        }
        if self._asked.repl.tokens:
            ours["prompt_token_ids"] = played.prompt.token_ids
            ours["completion_token_ids"] = played.completion_ids
            ours["sampled"] = played.loss_mask
        return ours


def usage(done: Done) -> Json:
    """Return the token counts. Console output counts as prompt, because the policy reads it."""
    played = done.trajectory
    read, wrote = len(played.prompt.token_ids) + played.observed_tokens, played.sampled_tokens
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def _finish(done: Done) -> str:
    return "length" if done.trajectory.stop in _LENGTH else "stop"
