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

    def __init__(self, request: GenerationRequest, model: str) -> None:
        self._request = request
        self._chat = isinstance(request, ChatCompletionRequest)
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def build_full(self, result: TurnResult) -> JsonObject:
        """Return the whole answer."""
        content, finish_reason = result.format_content(self._request), _get_finish_reason(result)
        if self._chat:
            message = {"role": "assistant", "content": content, "refusal": None}
            choice: JsonObject = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        else:
            choice = {"index": 0, "text": content or "", "finish_reason": finish_reason, "logprobs": None}
        object_type = "chat.completion" if self._chat else "text_completion"
        repl_fields = {**self._build_repl_field(result), "lines": [line.to_json for line in result.lines]}
        return {
            **self._head,
            "object": object_type,
            "choices": [choice],
            "usage": compute_usage(result),
            "repl": repl_fields,
        }

    def build_first_chunk(self) -> JsonObject:
        """Return the first chunk, which opens the answer."""
        return self._build_chunk("", opening=True)

    def build_chunks(self, update: TurnUpdate) -> Iterator[JsonObject]:
        """Yield a chunk for an update: its text, if the transcript is requested, and its complete line."""
        text = update.text if self._request.repl.show == "transcript" else ""
        if update.executed_line is not None:
            yield {**self._build_chunk(text), "repl": {"line": update.executed_line.to_json}}
        elif text:
            yield self._build_chunk(text)

    def build_last_chunks(self, result: TurnResult) -> Iterator[JsonObject]:
        """Yield the chunks that end the answer."""
        # An answer is only known at the end, so it is one chunk.
        if self._request.repl.show == "answer" and result.trajectory.answer is not None:
            yield self._build_chunk(result.trajectory.answer)
        yield {**self._build_chunk("", end=_get_finish_reason(result)), "repl": self._build_repl_field(result)}
        # OpenAI's API sends the usage in a last chunk without choices.
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            yield {**self._build_chunk(""), "choices": [], "usage": compute_usage(result)}

    def _build_chunk(self, text: str, end: str | None = None, opening: bool = False) -> JsonObject:
        if self._chat:
            delta = {"role": "assistant", "content": text} if opening else {"content": text} if text else {}
            choice: JsonObject = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}
        else:
            choice = {"index": 0, "text": text, "finish_reason": end, "logprobs": None}
        object_type = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": object_type, "choices": [choice]}

    def _build_repl_field(self, result: TurnResult) -> dict[str, object]:
        """Return our additions to OpenAI's fields."""
        trajectory = result.trajectory
        fields: dict[str, object] = {
            "conversation": result.conversation,
            "stop": str(trajectory.stop),
            "answer": trajectory.answer,
            "observed_tokens": trajectory.observed_tokens,
        }
        if self._request.repl.tokens:
            fields["prompt_token_ids"] = trajectory.prompt.token_ids
            fields["completion_token_ids"] = trajectory.completion_ids
            fields["sampled"] = trajectory.loss_mask
        return fields


def compute_usage(result: TurnResult) -> JsonObject:
    """Return the token counts. Console output counts as prompt, because the policy reads it."""
    trajectory = result.trajectory
    prompt_tokens, completion_tokens = (
        len(trajectory.prompt.token_ids) + trajectory.observed_tokens,
        trajectory.sampled_tokens,
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _get_finish_reason(result: TurnResult) -> str:
    return "length" if result.trajectory.stop in _LENGTH_STOPS else "stop"


class TurnResponse(Response):
    """Response that plays a turn and sends its updates. The turn is cancelled as soon as the client disconnects.

    A slow reader holds nothing but its connection: the turn runs at its own speed and its updates are queued here. The
    limits of a rollout bound the queue. A reader that receives nothing for `patience_s` is disconnected.
    """

    def __init__(self, play_turn: PlayTurn, builder: ResponseBuilder, *, stream: bool, patience_s: float) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._play = play_turn
        self._builder = builder
        self._stream = stream
        self._patience_s = patience_s
        self._updates: asyncio.Queue[TurnUpdate | None] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Play the turn and send it, as an ASGI application."""
        turn = asyncio.create_task(self._play(self._updates.put_nowait), name="turn")
        # None in the queue means that the turn has ended, with or without an error.
        turn.add_done_callback(lambda _: self._updates.put_nowait(None))
        send_task = asyncio.create_task(self._stream_updates(turn, send), name="send")
        disconnect_task = asyncio.create_task(_wait_for_disconnect(receive), name="disconnect")
        tasks: set[asyncio.Task[object]] = {turn, send_task, disconnect_task}
        # Run until all is sent, or the client disconnects. In both cases end the other tasks.
        try:
            await asyncio.wait({send_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_sent = send_task.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            _consume_result(turn)
        if is_sent:
            # After a timeout of the reader the answer is incomplete, so uvicorn closes the connection.
            with suppress(TimeoutError):
                send_task.result()

    async def _stream_updates(self, turn: "asyncio.Task[TurnResult]", send: Send) -> None:
        """Send the answer, whole or in chunks while the turn runs.

        Raises:
            RequestError: the turn failed before the status was sent.
            TimeoutError: the client received nothing for `patience_s`.
        """
        # The status is sent only after the turn has begun, so that an earlier refusal can still set it.
        if await self._updates.get() is None:
            # The turn failed before it began, so this raises its error.
            _get_result(turn)
        # For a whole answer, only the end of the updates matters.
        if not self._stream:
            while await self._updates.get() is not None:
                pass
            result = _get_result(turn)
            await self._send(send, _build_start_message(self._build_start(200)))
            await self._send(
                send, _build_body_message(json.dumps(self._builder.build_full(result)).encode(), more=False)
            )
            return
        await self._send(send, _build_start_message(self._build_start(200)))
        await self._send_event(send, self._builder.build_first_chunk())
        while (update := await self._updates.get()) is not None:
            for chunk in self._builder.build_chunks(update):
                await self._send_event(send, chunk)
        try:
            result = _get_result(turn)
        except RequestError as error:
            # The status is sent already, so the error is sent as an event.
            await self._send_event(send, error.body)
        else:
            for chunk in self._builder.build_last_chunks(result):
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


def _get_result(turn: "asyncio.Task[TurnResult]") -> TurnResult:
    """Return the finished turn.

    Raises:
        RequestError: the turn was not played, or the server cancelled it.
    """
    if turn.cancelled():
        raise _STOPPING
    return turn.result()


def _consume_result(turn: "asyncio.Task[TurnResult]") -> None:
    """Retrieve the error of a turn, which is sent already or has no reader. Otherwise asyncio would log it."""
    if not turn.cancelled():
        turn.exception()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
