"""Responses in the formats of OpenAI's API, whole or in chunks, with our additions in the field `repl`.

`ResponseBuilder` formats the answer to a request. `TurnResponse` plays the turn and sends the answer, whole or
streamed. A disconnect of the client cancels the turn.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from repl_rl.serve.conversation_service import OnTurnUpdate, TurnResult
from repl_rl.serve.http_errors import RequestError
from repl_rl.serve.openai_requests import ChatCompletionRequest, GenerationRequest
from repl_rl.serve.turn_updates import TurnUpdate
from repl_rl.trajectory.trajectory import Stop

JsonObject = Mapping[str, object]
_LENGTH_STOPS = frozenset({Stop.MAX_LINES, Stop.MAX_TOKENS, Stop.LINE_TOO_LONG, Stop.WALL_CLOCK})
"""Stops by a limit, reported as `length`. All others are reported as `stop`."""
PlayTurn = Callable[[OnTurnUpdate], Coroutine[object, object, TurnResult]]
"""Function that plays the turn."""
_STOPPING = RequestError(503, "the server is stopping", code="stopping", retry_after_s=5)
"""Error of a turn that the server cancelled."""


class ResponseBuilder:
    """Formatter of the answer to one request."""

    def __init__(self, asked: GenerationRequest, model: str) -> None:
        self._asked = asked
        self._chat = isinstance(asked, ChatCompletionRequest)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def build_full(self, done: TurnResult) -> JsonObject:
        """Return the whole answer."""
        content, end = done.format_content(self._asked), _get_finish_reason(done)
        if self._chat:
            message = {"role": "assistant", "content": content, "refusal": None}
            choice: JsonObject = {"index": 0, "message": message, "finish_reason": end, "logprobs": None}
        else:
            choice = {"index": 0, "text": content or "", "finish_reason": end, "logprobs": None}
        kind = "chat.completion" if self._chat else "text_completion"
        ours = {**self._build_repl_field(done), "lines": [ran.to_json for ran in done.lines]}
        return {**self._head, "object": kind, "choices": [choice], "usage": compute_usage(done), "repl": ours}

    def build_first_chunk(self) -> JsonObject:
        """Return the first chunk, which opens the answer."""
        return self._build_chunk("", opening=True)

    def build_chunks(self, told: TurnUpdate) -> Iterator[JsonObject]:
        """Yield a chunk for an update: its text, if the transcript is requested, and its complete line."""
        text = told.text if self._asked.repl.show == "transcript" else ""
        if told.executed_line is not None:
            yield {**self._build_chunk(text), "repl": {"line": told.executed_line.to_json}}
        elif text:
            yield self._build_chunk(text)

    def build_last_chunks(self, done: TurnResult) -> Iterator[JsonObject]:
        """Yield the chunks that end the answer."""
        # An answer is only known at the end, so it is one chunk.
        if self._asked.repl.show == "answer" and done.trajectory.answer is not None:
            yield self._build_chunk(done.trajectory.answer)
        yield {**self._build_chunk("", end=_get_finish_reason(done)), "repl": self._build_repl_field(done)}
        # OpenAI's API sends the usage in a last chunk without choices.
        if self._asked.stream_options is not None and self._asked.stream_options.include_usage:
            yield {**self._build_chunk(""), "choices": [], "usage": compute_usage(done)}

    def _build_chunk(self, text: str, end: str | None = None, opening: bool = False) -> JsonObject:
        if self._chat:
            delta = {"role": "assistant", "content": text} if opening else {"content": text} if text else {}
            choice: JsonObject = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}
        else:
            choice = {"index": 0, "text": text, "finish_reason": end, "logprobs": None}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice]}

    def _build_repl_field(self, done: TurnResult) -> dict[str, object]:
        """Return our additions to OpenAI's fields."""
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


def compute_usage(done: TurnResult) -> JsonObject:
    """Return the token counts. Console output counts as prompt, because the policy reads it."""
    played = done.trajectory
    read, wrote = len(played.prompt.token_ids) + played.observed_tokens, played.sampled_tokens
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def _get_finish_reason(done: TurnResult) -> str:
    return "length" if done.trajectory.stop in _LENGTH_STOPS else "stop"


class TurnResponse(Response):
    """Response that plays a turn and sends its updates. The turn is cancelled as soon as the client disconnects.

    A slow reader holds nothing but its connection: the turn runs at its own speed and its updates are queued here. The
    limits of a rollout bound the queue. A reader that receives nothing for `patience_s` is disconnected.
    """

    def __init__(self, play: PlayTurn, shape: ResponseBuilder, *, stream: bool, patience_s: float) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._play = play
        self._shape = shape
        self._stream = stream
        self._patience_s = patience_s
        self._updates: asyncio.Queue[TurnUpdate | None] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Play the turn and send it, as an ASGI application."""
        playing = asyncio.create_task(self._play(self._updates.put_nowait), name="turn")
        # None in the queue means that the turn has ended, with or without an error.
        playing.add_done_callback(lambda _: self._updates.put_nowait(None))
        telling = asyncio.create_task(self._stream_updates(playing, send), name="telling")
        gone = asyncio.create_task(_wait_for_disconnect(receive), name="gone")
        tasks: set[asyncio.Task[object]] = {playing, telling, gone}
        # Run until all is sent, or the client disconnects. In both cases end the other tasks.
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = telling.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            _consume_result(playing)
        if over:
            # After a timeout of the reader the answer is incomplete, so uvicorn closes the connection.
            with suppress(TimeoutError):
                telling.result()

    async def _stream_updates(self, playing: "asyncio.Task[TurnResult]", send: Send) -> None:
        """Send the answer, whole or in chunks while the turn runs.

        Raises:
            RequestError: the turn failed before the status was sent.
            TimeoutError: the client received nothing for `patience_s`.
        """
        # The status is sent only after the turn has begun, so that an earlier refusal can still set it.
        if await self._updates.get() is None:
            # The turn failed before it began, so this raises its error.
            _get_result(playing)
        # For a whole answer, only the end of the updates matters.
        if not self._stream:
            while await self._updates.get() is not None:
                pass
            done = _get_result(playing)
            await self._send(send, _build_start_message(self._build_start(200)))
            await self._send(send, _build_body_message(json.dumps(self._shape.build_full(done)).encode(), more=False))
            return
        await self._send(send, _build_start_message(self._build_start(200)))
        await self._send_event(send, self._shape.build_first_chunk())
        while (update := await self._updates.get()) is not None:
            for chunk in self._shape.build_chunks(update):
                await self._send_event(send, chunk)
        try:
            done = _get_result(playing)
        except RequestError as refusal:
            # The status is sent already, so the error is sent as an event.
            await self._send_event(send, refusal.body)
        else:
            for chunk in self._shape.build_last_chunks(done):
                await self._send_event(send, chunk)
        await self._send(send, _build_body_message(b"data: [DONE]\n\n", more=False))

    def _build_start(self, status: int) -> Mapping[str, object]:
        headers = [(b"content-type", (self.media_type or "").encode()), (b"cache-control", b"no-store")]
        return {"status": status, "headers": headers}

    async def _send_event(self, send: Send, event: JsonObject) -> None:
        await self._send(send, _build_body_message(b"data: " + json.dumps(event).encode() + b"\n\n", more=True))

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._patience_s):
            await send(message)


def _build_start_message(head: Mapping[str, object]) -> dict[str, object]:
    return {"type": "http.response.start", **head}


def _build_body_message(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _get_result(playing: "asyncio.Task[TurnResult]") -> TurnResult:
    """Return the finished turn.

    Raises:
        RequestError: the turn was not played, or the server cancelled it.
    """
    if playing.cancelled():
        raise _STOPPING
    return playing.result()


def _consume_result(playing: "asyncio.Task[TurnResult]") -> None:
    """Retrieve the error of a turn, which is sent already or has no reader. Otherwise asyncio would log it."""
    if not playing.cancelled():
        playing.exception()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
