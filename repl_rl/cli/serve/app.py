"""Endpoints of the server: routes, access control, size limits and error responses."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from repl_rl.cli.serve.asking import A, Asked, ChatAsked, TextAsked, read
from repl_rl.cli.serve.desk import Desk, Done, Tell
from repl_rl.cli.serve.keys import Keys
from repl_rl.cli.serve.page import PAGES, page
from repl_rl.cli.serve.refusal import PATIENCE_S, Refusal
from repl_rl.cli.serve.responses import TurnResponse
from repl_rl.cli.serve.shapes import Shape

MOST_BYTES = 1 << 20
"""Largest body of a request, bytes."""
_OPEN = ("/health", *PAGES)
"""Paths that need no API key."""


class App:
    """ASGI application that serves one policy."""

    def __init__(
        self, desk: Desk, keys: Keys, model: str, hosts: Collection[str] | None, patience_s: float = PATIENCE_S
    ) -> None:
        """Set up the routes.

        Args:
            desk: the service that plays turns.
            keys: the API keys with access.
            model: the model name for clients.
            hosts: allowed host names of requests; None allows any. This prevents DNS rebinding: a page of another site,
                open in a browser on this machine, could resolve its own name to this server.
            patience_s: see `PATIENCE_S`.
        """
        self._patience_s = patience_s
        self._desk = desk
        self._keys = keys
        self._model = model
        self._hosts = hosts
        # Every route goes through `_guarded`, so that none lacks access control.
        self.asgi = app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, answer in (
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._complete),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._one_model),
            ("DELETE", "/v1/conversations/{id}", self._end),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            *(("GET", path, self._page) for path in PAGES),
        ):
            app.add_api_route(path, self._guarded(path, answer), methods=[method], response_model=None)
        app.add_exception_handler(HTTPException, self._lost)
        app.add_exception_handler(Refusal, self._late)

    def _guarded(
        self, path: str, answer: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint `answer` with access control, error responses and metrics."""

        async def guarded(request: Request) -> Response:
            try:
                response = await answer(request, self._owner(request, path))
            except Refusal as refusal:
                response = _refused(refusal)
            except ClientDisconnect:
                # The status is only for the metrics, because the client has left.
                response = Response(status_code=499)
            # A turn is counted when it has been played, in `_turn`.
            if not isinstance(response, TurnResponse):
                self._count(path, response.status_code)
            return response

        return guarded

    def _owner(self, request: Request, path: str) -> str:
        """Return the name of the client, which its API key determines.

        Raises:
            Refusal: the host name is not allowed (403), or the key is missing or wrong (401).
        """
        if self._hosts is not None:
            host, origin = _host(f"//{request.headers.get('host', '')}"), request.headers.get("origin")
            if host not in self._hosts or (origin is not None and _host(origin) not in self._hosts):
                remedy = "ask it as 127.0.0.1 or localhost, or let it listen for others with --host and --keys"
                raise Refusal(403, f"this server answers its own machine alone, under a name of its own; {remedy}")
        owner = "" if path in _OPEN else self._keys.owner(request.headers.get("authorization"))
        if owner is None:
            raise Refusal(401, "no API key, or a wrong one; send `Authorization: Bearer KEY`", code="invalid_api_key")
        return owner

    async def _chat(self, request: Request, owner: str) -> Response:
        return await self._turn(request, owner, ChatAsked)

    async def _complete(self, request: Request, owner: str) -> Response:
        return await self._turn(request, owner, TextAsked)

    async def _turn(self, request: Request, owner: str, kind: type[A]) -> Response:
        asked: Asked = read(kind, await _body(request, self._patience_s))
        self._refuse_other(asked.model)
        path = request.url.path

        async def play(tell: Tell) -> Done:
            try:
                done = await self._desk.play(asked, owner, tell)
            except Refusal as refusal:
                self._count(path, refusal.status)
                raise
            self._count(path, 200)
            return done

        return TurnResponse(play, Shape(asked, self._model), stream=bool(asked.stream), patience_s=self._patience_s)

    async def _models(self, request: Request, owner: str) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request, owner: str) -> Response:
        self._refuse_other(request.path_params["name"])
        return JSONResponse(self._described())

    async def _end(self, request: Request, owner: str) -> Response:
        self._desk.conversations.end(request.path_params["id"], owner)
        return Response(status_code=204)

    async def _health(self, request: Request, owner: str) -> Response:
        status = "stopping" if self._desk.stopping else "broken" if self._desk.broken is not None else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def _metrics(self, request: Request, owner: str) -> Response:
        return PlainTextResponse(self._desk.figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, request: Request, owner: str) -> Response:
        return page(request.url.path)

    async def _late(self, request: Request, error: Exception) -> Response:
        """Answer a refusal that a `TurnResponse` raises while it runs. It is counted already."""
        assert isinstance(error, Refusal)
        return _refused(error)

    async def _lost(self, request: Request, error: Exception) -> Response:
        """Answer an error of FastAPI itself, such as an unknown path or method."""
        assert isinstance(error, HTTPException)
        allowed = (error.headers or {}).get("Allow")
        remedy = f"use {allowed}" if allowed else "addresses are as in OpenAI's API: POST /v1/chat/completions, ..."
        message = f"{request.method} {request.url.path:.80} is not there; {remedy}"
        return _refused(Refusal(error.status_code, message, allow=allowed))

    def _described(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "repl_rl"}

    def _refuse_other(self, model: str) -> None:
        if model != self._model:
            message = f"model is {model!r:.80}; this server has {self._model!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def _count(self, path: str, status: int) -> None:
        self._desk.figures.requests.labels(path, str(status)).inc()


def _host(address: str) -> str:
    """Return the host name in an address, or "" if it has none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _refused(refusal: Refusal) -> Response:
    """Return the error response. Its JSON is ASCII, because quoted text of a request may hold a lone surrogate."""
    headers = dict(refusal.headers)
    return Response(json.dumps(refusal.body), refusal.status, headers, media_type="application/json")


async def _body(request: Request, patience_s: float) -> bytes:
    """Read the body of a request.

    Raises:
        Refusal: its content type is not JSON (415), it is too long (413), or too slow (408).
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "send the body as application/json")
    too_long = Refusal(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")
    # The announced length allows an early refusal. It may be missing or wrong, so the loop below counts the bytes too.
    said = request.headers.get("content-length", "0")
    if said.isascii() and said.isdigit() and int(said) > MOST_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(patience_s):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    raise too_long
    except TimeoutError as error:
        raise Refusal(408, f"the body did not come within {patience_s:g} s") from error
    return bytes(body)
