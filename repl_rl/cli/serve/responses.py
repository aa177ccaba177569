"""HTTP responses that play a turn and send it, whole or streamed. A disconnect of the client cancels the turn."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from repl_rl.cli.serve.desk import Done, Tell
from repl_rl.cli.serve.refusal import Refusal
from repl_rl.cli.serve.shapes import Json, Shape
from repl_rl.cli.serve.telling import Told

Play = Callable[[Tell], Coroutine[object, object, Done]]
"""Function that plays the turn."""
_STOPPING = Refusal(503, "the server is stopping", code="stopping", retry_after_s=5)


class TurnResponse(Response):
    """Response that plays a turn and sends its news. The turn is cancelled as soon as the client disconnects.

    A slow reader holds nothing but its connection: the turn runs at its own speed and its news is queued here. The
    limits of a rollout bound the queue. A reader that receives nothing for `patience_s` is disconnected.
    """

    def __init__(self, play: Play, shape: Shape, *, stream: bool, patience_s: float) -> None:
        super().__init__(media_type="text/event-stream" if stream else "application/json")
        self._play = play
        self._shape = shape
        self._stream = stream
        self._patience_s = patience_s
        self._news: asyncio.Queue[Told | None] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Play the turn and send it, as an ASGI application."""
        playing = asyncio.create_task(self._play(self._news.put_nowait), name="turn")
        # None in the queue means that the turn has ended, with or without an error.
        playing.add_done_callback(lambda _: self._news.put_nowait(None))
        telling = asyncio.create_task(self._tell(playing, send), name="telling")
        gone = asyncio.create_task(_gone(receive), name="gone")
        tasks: set[asyncio.Task[object]] = {playing, telling, gone}
        # Run until all is sent, or the client disconnects. In both cases end the other tasks.
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = telling.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            _heard(playing)
        if over:
            # After a timeout of the reader the answer is incomplete, so uvicorn closes the connection.
            with suppress(TimeoutError):
                telling.result()

    async def _tell(self, playing: "asyncio.Task[Done]", send: Send) -> None:
        # The status is sent only after the turn has begun, so that an earlier refusal can still set it.
        if await self._news.get() is None:
            # The turn failed before it began, so this raises its error.
            _result(playing)
        if not self._stream:
            while await self._news.get() is not None:
                pass
            done = _result(playing)
            await self._send(send, _start(self._head(200)))
            await self._send(send, _body(json.dumps(self._shape.whole(done)).encode(), more=False))
            return
        await self._send(send, _start(self._head(200)))
        await self._event(send, self._shape.first())
        while (told := await self._news.get()) is not None:
            for chunk in self._shape.chunks(told):
                await self._event(send, chunk)
        try:
            done = _result(playing)
        except Refusal as refusal:
            # The status is sent already, so the error is sent as an event.
            await self._event(send, refusal.body)
        else:
            for chunk in self._shape.last(done):
                await self._event(send, chunk)
        await self._send(send, _body(b"data: [DONE]\n\n", more=False))

    def _head(self, status: int) -> Mapping[str, object]:
        headers = [(b"content-type", (self.media_type or "").encode()), (b"cache-control", b"no-store")]
        return {"status": status, "headers": headers}

    async def _event(self, send: Send, said: Json) -> None:
        await self._send(send, _body(b"data: " + json.dumps(said).encode() + b"\n\n", more=True))

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._patience_s):
            await send(message)


def _start(head: Mapping[str, object]) -> dict[str, object]:
    return {"type": "http.response.start", **head}


def _body(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _result(playing: "asyncio.Task[Done]") -> Done:
    """Return the finished turn.

    Raises:
        Refusal: the turn was not played, or the server cancelled it.
    """
    if playing.cancelled():
        raise _STOPPING
    return playing.result()


def _heard(playing: "asyncio.Task[Done]") -> None:
    """Retrieve the error of a turn, which is sent already or has no reader. Otherwise asyncio would log it."""
    if not playing.cancelled():
        playing.exception()


async def _gone(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
